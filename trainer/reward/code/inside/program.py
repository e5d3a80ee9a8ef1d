"""The solution process of `stdin` cases: the solution runs as the main program."""

from __future__ import annotations

import site
import sys


def main(path: str) -> None:
    """Run the file as `__main__`; the exit status is that of the program."""
    site.setquit()  # `exit()` and `quit()`, which the interpreter's -S leaves out
    sys.argv = [path]
    namespace = vars(sys.modules["__main__"])
    namespace.clear()
    namespace.update(__name__="__main__", __file__=path, __builtins__=__builtins__)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, namespace)
