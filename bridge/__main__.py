"""python3 -m bridge plan|convert"""

from __future__ import annotations

import sys

from bridge.cli.main import main

sys.exit(main())
