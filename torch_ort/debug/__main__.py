"""The command `python -m torch_ort.debug script.py`: runs a script and checks each graph."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from torch_ort.debug.bisect import again
from torch_ort.debug.numbers import names_of
from torch_ort.debug.watch import checking


def main(arguments: list[str] | None = None) -> int:
    """Check a script, or run a folder of an earlier finding again; 1: numbers are wrong."""
    parser = argparse.ArgumentParser(prog="python -m torch_ort.debug", description=__doc__)
    parser.add_argument("--folder", help="where to write graphs and inputs of what is found")
    parser.add_argument("--again", metavar="FOLDER", help="run the graphs of such a folder again")
    parser.add_argument("script", nargs="?", help="a Python program that trains with torch_ort")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args(arguments)
    if (given.again is None) == (given.script is None):
        parser.error("got neither a script nor --again, or both; want one of them")
    if given.again is not None:
        return _run_again(given.again)
    sys.argv = [given.script, *given.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(given.script)))
    with checking(given.folder) as checks:
        try:
            runpy.run_path(given.script, run_name="__main__")
        finally:
            print(checks, file=sys.stderr)
    return 1 if checks.findings else 0


def _run_again(folder: str) -> int:
    found = again(folder)
    print(names_of(found) if found else "the graphs give the same numbers")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
