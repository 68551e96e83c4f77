"""The command `python -m torch_ort.compat install|uninstall|status`."""

from __future__ import annotations

import argparse
import sys

from torch_ort._C import UserError
from torch_ort.onnxruntime_training.compat import placing

_COMMANDS = {
    "install": placing.install,
    "uninstall": placing.uninstall,
    "status": placing.status,
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; gives the exit status, 1 where it is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_ort.compat",
        description="Place onnxruntime.training beside an installed onnxruntime, or remove it.",
    )
    parser.add_argument("command", choices=_COMMANDS)
    command = parser.parse_args(arguments).command
    try:
        print(_COMMANDS[command]())
    except (UserError, OSError) as error:
        print(f"compat {command}: {error}", file=sys.stderr)
        return 1
    return 0
