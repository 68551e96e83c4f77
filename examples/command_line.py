"""What the command lines of the examples share: strict parsing and the choice of a backend."""

import argparse
import difflib
import math
import resource
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

BACKENDS = ("ort", "eager", "aot_eager", "inductor")


class Parser(argparse.ArgumentParser):
    """Parse options in full spelling only, and name near matches of an unknown one."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse the arguments; ends the program with a message at the first wrong one."""
        options, unknown = self.parse_known_args(args)
        if unknown:
            name = unknown[0].split("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            self.error(f"unknown option: {name}" + (f", did you mean {near[0]}?" if near else ""))
        return options

    def add_training_options(self, epochs: int) -> None:
        """Add the options of every example."""
        self.add_argument("--backend", choices=BACKENDS, default="ort", help="who runs the model")
        self.add_argument("--device", default="cpu", help="where it runs, such as cpu or cuda")
        self.add_argument("--epochs", type=whole(1), default=epochs, help="passes over the data")
        self.add_argument("--max-steps", type=whole(1), metavar="N", help="stop after N steps")
        self.add_argument("--seed", type=whole(0), default=0, help="seed of all random numbers")
        self.add_argument("--losses", type=Path, metavar="FILE.json", help="write every loss")

    def check_training_options(self, options: argparse.Namespace) -> None:
        """End the program with a message if the backend, device or an output cannot be used."""
        if options.backend != "eager":
            known = torch.compiler.list_backends(exclude_tags=())
            if options.backend not in known:
                self.error(
                    f"backend {options.backend}: not installed beside this torch"
                    " (in the repository: make build)"
                )
        try:
            torch.empty(1, device=options.device)
        except (AssertionError, RuntimeError, NotImplementedError) as error:
            self.error(f"device {options.device}: {str(error).splitlines()[0]}")
        for name in ("losses", "plot", "checkpoint"):
            path = getattr(options, name, None)
            if path and not path.resolve().parent.is_dir():
                self.error(f"--{name}: no such folder: {path.resolve().parent}")
            if path and path.is_dir():
                self.error(f"--{name}: got the folder {path}, want a file")


def _number(kind: Callable, accepts: Callable[[float], bool], want: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not math.isfinite(value) or not accepts(value):
            raise argparse.ArgumentTypeError(f"got {text!r}, want {want}")
        return value

    return parse


def whole(least: int) -> Callable[[str], float]:
    """Return a parser of whole numbers from `least` on."""
    return _number(int, lambda value: value >= least, f"a whole number, at least {least}")


def positive(text: str) -> float:
    """Parse a number above 0."""
    return _number(float, lambda value: value > 0, "a number above 0")(text)


def probability(text: str) -> float:
    """Parse a number from 0 up to, but not including, 1."""
    return _number(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")(text)


def compile_model(model: nn.Module, backend: str) -> nn.Module:
    """Return the model as the backend runs it; eager is the model itself."""
    return model if backend == "eager" else torch.compile(model, backend=backend)


class LossError(ArithmeticError):
    """A loss is not a number or infinite; the message names the step."""


def check_loss(loss: float, step: int, learning_rate: float) -> None:
    """Raise LossError unless the loss is finite."""
    if not math.isfinite(loss):
        raise LossError(
            f"loss is {loss} at step {step}: training stops, as no later step can repair it;"
            f" try a learning rate (--lr) below {learning_rate:g}"
        )


def peak_memory_mib(device: str) -> float:
    """Return the most memory that the process (on CUDA: its tensors) held so far."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def print_step_times(seconds: list[float], backend: str) -> None:
    """Print how long compiling took, seen as the first step beyond a usual one, and the median."""
    if len(seconds) < 2:
        return
    median = statistics.median(seconds[1:])
    compiled = "" if backend == "eager" else f", {seconds[0] - median:.2f} s of it compiling"
    print(f"first step {seconds[0]:.2f} s{compiled}; median step {median * 1e3:.1f} ms")


def print_counters(backend: str) -> None:
    """Print what the engine did, if it is the one that ran."""
    if backend != "ort":
        return
    # The other backends run without torch_ort.
    import torch_ort

    counters = torch_ort.counters()
    shown = {"fallbacks": counters.get("fallbacks", 0)}
    shown |= {name: count for name, count in sorted(counters.items()) if count}
    print("engine: " + ", ".join(f"{name} {count:,}" for name, count in shown.items()))


def run(parser: Parser, work: Callable[[], None]) -> int:
    """Do the work of an example; returns its exit status. A wrong loss ends the program."""
    try:
        work()
    except LossError as error:
        stop(parser, error)
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    return 0


def stop(parser: Parser, message: object) -> NoReturn:
    """End the program with status 1 and a message: it ran, and something went wrong on the way."""
    parser.exit(1, f"{parser.prog}: {message}\n")
