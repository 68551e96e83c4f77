"""Trains in processes from which one private name of torch each is hidden, as if it had none.

    python train_without_a_name.py MODULE:NAME ...

Prints warnings and errors, each set with a line "end" after it. A name that is empty hides the
module. Names are hidden from torch_ort alone, since torch itself needs them.
"""

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.backends.distributed


class Hiding:
    """An object of torch's without one thing that lies in it."""

    def __init__(self, theirs: Any, path: str) -> None:
        vars(self).update(theirs=theirs, path=path)

    def __getattr__(self, name: str) -> Any:
        first, _, rest = self.path.partition(".")
        found = getattr(self.theirs, name)
        if name != first:
            return found
        if not rest:
            raise AttributeError(name)
        return Hiding(found, rest)


def hide(module: str, path: str) -> None:
    """Hide a name of a module, or a module."""
    theirs = importlib.import_module
    hidden = f"{module}.{path}".removesuffix(".")

    def seen(name: str, *package: str) -> Any:
        asks = sys._getframe(1).f_globals["__name__"]
        if name == hidden and asks.startswith("torch_ort"):
            raise ModuleNotFoundError(name)
        found = theirs(name, *package)
        is_seen = name == module and asks.startswith("torch_ort")
        return Hiding(found, path) if is_seen else found

    importlib.import_module = seen


def roads(model: torch.nn.Module) -> Iterator[Callable[[], Any]]:
    """Give the ways to the engine: functions that make what is called in place of a model."""
    import torch_ort

    yield lambda: torch.compile(model, backend="ort")
    yield lambda: torch_ort.ORTModule(model)


def train() -> None:
    """Train a step by each road, as eager PyTorch does."""
    import torch_ort

    model, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    optimizer = torch_ort.optim.AdamW(model.parameters())
    for make in roads(model):
        run, before = make(), model.weight.clone()
        for _ in range(2):
            result = run(x)
            torch.testing.assert_close(result, model(x))
            result.sum().backward()
            optimizer.step()
        assert not model.weight.equal(before)
        torch.compiler.reset()
    run.recapture()
    torch.testing.assert_close(run(x), model(x))
    counters = torch_ort.counters()
    assert counters["fallbacks"] == counters["fallbacks_capture"] == 2, counters
    assert counters["graphs_captured"] == 0, counters


def train_strictly() -> None:
    """Print what is raised by each road where nothing may run in eager PyTorch."""
    os.environ["TORCH_ORT_STRICT"] = "1"
    model = torch.nn.Linear(3, 3)
    for make in roads(model):
        try:
            make()(torch.ones(2, 3))
        except Exception as raised:
            error = getattr(raised, "inner_exception", raised)  # Dynamo's has many lines
            print(f"{type(error).__name__}: {error}")


def run(module: str, path: str) -> None:
    """Train without a name."""
    hide(module, path)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train()
    for each in found:
        print("warning:", each.message)
    train_strictly()


for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            run(*name.split(":"))
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("end", flush=True)
