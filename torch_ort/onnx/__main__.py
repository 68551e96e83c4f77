"""The command `python -m torch_ort.onnx`: what a file needs, a trial, fine-tuning, differences."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from torch_ort import _C
from torch_ort.onnx.command import compare, finetune, info, trial


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 1 for a difference, 2 for what cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m torch_ort.onnx", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in (("info", info), ("run", trial), ("finetune", finetune), ("diff", compare)):
        _add(commands, name, module)
    options = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (_C.Error, DecodeError, OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _add(commands: Any, name: str, module: Any) -> None:
    description = module.run.__doc__.splitlines()[0]
    parser = commands.add_parser(name, help=description, description=description)
    parser.add_argument("file", type=Path, help="an ONNX model")
    module.add_arguments(parser)
    parser.set_defaults(command=module.run)


if __name__ == "__main__":
    sys.exit(main())
