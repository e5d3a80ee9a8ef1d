"""The comparison with verl: its verdicts always, itself where verl is installed (VERL=folder)."""

import os
from pathlib import Path

import pytest

from scripts.compare_verl import Row, load_verl, main


@pytest.mark.parametrize(
    ("ours", "theirs", "meant", "verdict"),
    [
        (1.0, 1.0 + 1e-8, None, "equal"),
        ([1.0, 2.0], [1.0, 2.1], None, "UNEXPECTED"),
        ([1.0, 2.0], [1.0, 2.1], "gpg", "differs, meant"),
        (1.0, 1.0, "gpg", "NO LONGER DIFFERS"),
        (float("nan"), 1.0, None, "UNEXPECTED"),
    ],
)
def test_verdicts(ours, theirs, meant, verdict):
    assert Row("name", ours, theirs, meant).verdict == verdict


def test_a_folder_without_verl_is_refused(tmp_path):
    with pytest.raises(ValueError, match="folder with the package verl"):
        load_verl(tmp_path)


def test_we_agree_with_verl_but_for_what_we_mean(capsys):
    if "VERL" not in os.environ:
        pytest.skip("no verl: set VERL to the folder it is installed in (scripts/compare_verl.py)")
    status = main(["--verl", str(Path(os.environ["VERL"]))])
    assert status == 0, capsys.readouterr().out
