"""Checks graphs in their first call, and functions against eager PyTorch."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_ort import _C
from torch_ort.debug import bisect
from torch_ort.debug.bisect import Case, Finding
from torch_ort.debug.numbers import Difference, Results, differences, with_noise
from torch_ort.engine import watchers
from torch_ort.engine.program import Program
from torch_ort.options import Options, resolve
from torch_ort.pytorch.generators import TorchGenerators
from torch_ort.pytorch.module_compat import pytree

__all__ = ["Checks", "Difference", "checking", "compare"]


class Checks:
    """The result of `checking`: graphs checked, findings, and graphs left out with the reason."""

    def __init__(self, programs: Sequence[Program], folder: str | None, options: Options) -> None:
        self.checked: list[int] = []  # numbers of programs
        self.findings: list[Finding] = []
        self.left_out: list[str] = []
        self._folder = folder
        self._options = options
        self._programs = programs  # the list that compiled graphs are added to
        self._seen: set[int] = set()  # ids of sessions

    def check(self, session: _C.Session, tensors: Sequence[Any], symbols: Sequence[Any]) -> None:
        """Check the graph of a session with the inputs of a call, if it is its first."""
        if session.id in self._seen:
            return
        self._seen.add(session.id)
        program = next((p for p in self._programs if p.session.id == session.id), None)
        if program is None:
            self.left_out.append("a graph that was compiled before the checks began")
            return
        inputs = _inputs_by_name(program, tensors, symbols)
        if isinstance(inputs, str):
            self.left_out.append(f"graph {program.number}: {inputs}")
            return
        case = Case(program, self._options, inputs)
        try:
            with torch.no_grad():
                finding = bisect.find(case)
        except _C.Error as error:  # the program itself may run all the same
            self.left_out.append(f"graph {program.number}: {error}")
            return
        self.checked.append(program.number)
        if finding is not None:
            if self._folder is not None:
                bisect.write(case, finding, os.path.join(self._folder, f"graph_{program.number}"))
            self.findings.append(finding)
            print(finding, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        lines = [f"torch_ort: {len(self.checked)} graphs checked, {len(self.findings)} wrong"]
        lines += [f"  not checked: {reason}" for reason in self.left_out]
        return "\n".join(lines)


@contextmanager
def checking(folder: str | None = None, options: dict[str, Any] | None = None) -> Iterator[Checks]:
    """Check the numbers of each graph that is compiled in the block, in its first call.

    A graph's results and gradients are compared with those of its nodes, run one by one with
    PyTorch's kernels. If they differ by more than rounding explains, the rewrite, kernel or part of
    the memory plan that makes them differ is searched for. It is printed to standard error, added
    to `findings` of the object that this gives, and, if `folder` is given, written into a
    sub-folder of it. The gradients of outputs are random numbers for these runs. The program
    continues with the numbers that it would have had anyway. A check needs several times the memory
    of the graph.

        with torch_ort.debug.checking() as checks:
            train_one_step()
        print(checks)
    """
    with watchers.watching() as programs:
        checks = Checks(programs, folder, resolve(options))
        with watchers.watching_calls(checks.check):
            yield checks


def compare(
    function: Callable[..., Any],
    *args: Any,
    options: dict[str, Any] | None = None,
    folder: str | None = None,
    **kwargs: Any,
) -> Finding | None:
    """Compare a function or module in eager PyTorch and in the engine.

    Compared are all tensors among the results, and the gradients of parameters and of arguments for
    random gradients of the results. `function` and its arguments are copied, and random numbers are
    those of eager PyTorch's stream (option `exact_random`).

    Returns None if the numbers agree up to rounding, else a `Finding` that names the cause. Its
    `cause` is "capture" if each graph is right by itself (see `checking`) but the results differ.
    Raises Unsupported if the engine cannot run the function: nothing falls back here.
    """
    given = {**(options or {}), "strict": True, "exact_random": True}

    def run(call: Callable[..., Any], values: tuple[Any, ...], named: dict[str, Any]) -> Results:
        state = TorchGenerators()
        try:
            torch.manual_seed(0)
            return _results(call, values, named)
        finally:
            state.restore()

    def copied(noise: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        mine, values, named = copy.deepcopy((function, args, kwargs))
        if noise:
            _add_noise(mine, values, named)
        return mine, values, named

    want = run(*copied())
    noisy = run(*copied(noise=True))
    mine, values, named = copied()
    torch.compiler.reset()
    with checking(folder, given) as checks:
        got = run(torch.compile(mine, backend="ort", options=given), values, named)
    if checks.findings:
        return checks.findings[0]
    found = differences(got, want, noisy)
    return Finding(-1, "capture", "", found) if found else None


def _add_noise(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if isinstance(function, torch.nn.Module):
        tensors += list(function.parameters())
    noisy = with_noise({str(i): x.detach() for i, x in enumerate(tensors)})
    with torch.no_grad():
        for i, tensor in enumerate(tensors):
            tensor.copy_(noisy[str(i)])


def _results(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Results:
    results = call(*args, **kwargs)
    tensors = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
    named: dict[str, torch.Tensor | None] = {f"result {i}": x for i, x in enumerate(tensors)}
    leaves = {
        f"argument {i}": x
        for i, x in enumerate(pytree.tree_leaves((args, kwargs)))
        if isinstance(x, torch.Tensor) and x.requires_grad
    }
    if isinstance(call, torch.nn.Module):
        # Names of parameters of a compiled module begin with `_orig_mod.`.
        leaves |= {
            name.removeprefix("_orig_mod."): x
            for name, x in call.named_parameters() if x.requires_grad
        }  # fmt: skip
    reached = [x for x in tensors if x.requires_grad]
    if reached and leaves:
        tangents = [_tangent(x.shape, x.dtype, x.device) for x in reached]
        gradients = torch.autograd.grad(reached, list(leaves.values()), tangents, allow_unused=True)
        named |= {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return named


def _tangent(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(tuple(shape), generator=generator, dtype=wide).to(dtype).to(device)


def _inputs_by_name(
    program: Program, tensors: Sequence[Any], symbols: Sequence[Any]
) -> dict[str, torch.Tensor] | str:
    """Give copies of the inputs by name, and gradients for the outputs; or why there are none."""
    graph = program.captured
    if any(not isinstance(tensor, torch.Tensor) for tensor in tensors):
        return "an input is not a tensor"
    given = {
        name: tensor.detach().clone()
        for name, tensor in zip(graph.input_names, tensors, strict=True)
    }
    sizes = dict(zip(graph.symbol_inputs, map(int, symbols), strict=True))
    inputs = given | {name: torch.tensor(size) for name, size in sizes.items()}
    types = graph.types()
    for name, tensor in given.items():
        for dim, size in zip(types[name][1] or (), tensor.shape, strict=False):
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
    for node in graph.nodes():
        if node["op"] != "YieldOp":
            continue
        for name in filter(None, node["outputs"]):
            dtype, shape, _, device = types[name]
            known = [_C.testing.dim_evaluate(str(dim), sizes) for dim in shape or ()]
            if dtype is None or shape is None or None in known:
                return f"output '{name}' has a data-dependent size"
            inputs[name] = _tangent(known, getattr(torch, dtype), device)
    return inputs
