"""Run a build and show how far it is.

    progress.py [--log FILE] COMMAND...

The status lines of ninja, `[12/210] ...`, become one line that is rewritten in a terminal, and
elsewhere a line for each twentieth of the build. Other output is passed on, or, with --log, written
into FILE and shown only if the command fails. The exit status is that of the command.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

STATUS = re.compile(r"\s*\[(\d+)/(\d+)\] (.*)")


class Progress:
    """What is shown of ninja's status lines."""

    def __init__(self) -> None:
        self.in_place = sys.stdout.isatty()
        self.open = False  # a line stands that is to be rewritten
        self.shown = (0, 0)

    def show(self, done: int, total: int, what: str) -> None:
        """Show one status line. Ninja begins anew, with another total, after it ran CMake."""
        if done == 0:  # in each run it looks for new files
            return
        if what.startswith("Building "):
            what = what.split()[-1].removesuffix(".o")
            what = what[max(what.find("csrc/"), 0) :]
        line = f"[{done}/{total}] {what}"
        if self.in_place:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", flush=True)
            self.open = True
        elif self.shown != (twentieth := (total, done * 20 // total)):
            self.shown = twentieth
            print(line, flush=True)

    def end_line(self) -> None:
        """Leave what stands in the terminal."""
        if self.open:
            print(flush=True)
            self.open = False


def run(command: list[str], log: Path | None) -> int:
    """Run the command to its end; returns its exit status."""
    progress, kept = Progress(), []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"NINJA_STATUS": "[%f/%t] "},
    ) as process:
        for line in process.stdout:
            status = STATUS.fullmatch(line.rstrip("\n"))
            if status:
                progress.show(int(status[1]), int(status[2]), status[3])
            elif log:
                kept.append(line)
            elif not line.startswith("ninja: "):
                progress.end_line()
                print(line, end="", flush=True)
    progress.end_line()
    if log:
        log.write_text("".join(kept))
    if process.returncode and kept:
        print("".join(kept), end="", flush=True)
    return process.returncode


def main() -> int:
    """Read the command line and run the build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log", type=Path, metavar="FILE")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        return run(options.command, options.log)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
