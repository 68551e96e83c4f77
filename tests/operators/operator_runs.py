"""Runs a call of an operator by eager PyTorch and by the engine's roads, and compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from operator_cases import Case
from operator_exceptions import Kind, Row, is_refusal
from torch import fx
from torch.utils import _pytree as pytree

import torch_ort
from torch_ort import backend
from torch_ort.ortmodule import DebugOptions, LogLevel

Road = Callable[[Case, list[torch.Tensor], dict[str, Any]], Callable[..., Any]]


class _Calls(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._function(*tensors)


def by_ortmodule(case: Case, tensors: list[torch.Tensor], options: dict) -> Callable[..., Any]:
    """Give the call in an ORTModule."""
    debug = DebugOptions(log_level=LogLevel.ERROR, config=options)
    return torch_ort.ORTModule(_Calls(case.function), debug)


def by_graph(case: Case, tensors: list[torch.Tensor], options: dict) -> Callable[..., Any]:
    """Give the call as torch.compile's backend gets it from Dynamo: a graph, here of one node."""

    def flat(*tensors: torch.Tensor) -> tuple[Any, ...]:
        return tuple(_tensors_in(case.function(*tensors)))

    graph = fx.Graph()
    placeholders = tuple(graph.placeholder(f"tensor_{i}") for i in range(len(tensors)))
    graph.output(graph.call_function(flat, placeholders))
    return backend.ort(fx.GraphModule(torch.nn.Module(), graph), tensors, options=options)


def by_compile(case: Case, tensors: list[torch.Tensor], options: dict) -> Callable[..., Any]:
    """Give the call compiled by torch.compile."""
    torch.compiler.reset()
    return torch.compile(case.function, backend="ort", options=options)


ROADS: dict[str, Road] = {"ortmodule": by_ortmodule, "graph": by_graph, "compile": by_compile}


@dataclass
class Outcome:
    """What a call leaves behind: its results, gradients of its tensors, these themselves."""

    results: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    tensors: list[torch.Tensor]
    sharing: list[list[int]]  # of each result: which tensors and results share memory with it
    watched: list[bool]


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def run_eager(case: Case, tensors: list[torch.Tensor] | None = None) -> Outcome:
    """Run a call by eager PyTorch; raises what that raises."""
    return run(case.function, case.fresh() if tensors is None else tensors)


def run(call: Callable[..., Any], tensors: list[torch.Tensor]) -> Outcome:
    """Run forward and backward; raises what these raise, and Different for edited results."""
    torch.manual_seed(0)
    made = _tensors_in(call(*tensors))
    results = [result.detach().clone() for result in made]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    trained = [result for result in made if result.requires_grad]
    gradients: list[torch.Tensor | None] = [None] * len(wanted)
    if trained and wanted:
        gradients = list(
            torch.autograd.grad(trained, wanted, list(map(_weights, trained)), allow_unused=True)
        )
    for result, before in zip(made, results, strict=True):
        if not _is_same(result.detach(), before):
            raise Different("a result changes in backward")
    given = [tensor.detach() for tensor in tensors]
    return Outcome(
        results, gradients, given, _sharing(made, tensors), [x.requires_grad for x in made]
    )


def _weights(result: torch.Tensor) -> torch.Tensor:
    """Give another gradient for each element of a result."""
    count = torch.arange(result.numel(), device=result.device)
    return ((count % 7 - 2.5) / 4).to(result.dtype).view(result.shape)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or a.is_quantized:
        return True
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().reshape(-1)
    return plain.contiguous().view(torch.uint8)


def _sharing(made: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[list[int]]:
    def place(tensor: torch.Tensor) -> int | None:
        return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None

    places = [place(tensor) for tensor in (*tensors, *made)]
    return [
        [i for i, other in enumerate(places) if other is not None and other == place(result)]
        for result in made
    ]


class Different(AssertionError):
    """The engine gives something else than eager PyTorch; the words say what."""


def compare(case: Case, got: Outcome, want: Outcome, has_layout: bool, has_numbers: bool) -> None:
    """Raise Different where an outcome is not eager's.

    Numbers are right where they are eager's up to rounding, or not much farther from those in
    double precision than eager's.
    """
    if len(got.results) != len(want.results):
        raise Different(f"{len(got.results)} results, want {len(want.results)}")
    if got.watched != want.watched:
        raise Different(f"requires_grad of results: got {got.watched}, want {want.watched}")
    if has_layout and got.sharing != want.sharing:
        raise Different(f"memory shared by results: got {got.sharing}, want {want.sharing}")
    truth = _Truth(case)
    for kind in ("results", "gradients", "tensors"):
        pairs = zip(getattr(got, kind), getattr(want, kind), strict=True)
        for i, (ours, theirs) in enumerate(pairs):
            name = f"{kind}[{i}]"
            _compare_forms(name, ours, theirs, has_layout and kind != "gradients")
            if theirs is not None and has_numbers:
                _compare_numbers(name, ours, theirs, lambda kind=kind, i=i: truth.of(kind, i))


class _Truth:
    """The outcome in double precision; None where it cannot be had."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._outcome: Outcome | None = None

    def of(self, kind: str, index: int) -> torch.Tensor | None:
        if self._outcome is None:
            try:
                self._outcome = run_eager(self._case, self._case.wide())
            except (RuntimeError, TypeError, ValueError):
                return None
        found = getattr(self._outcome, kind)
        return found[index] if index < len(found) else None


def _form(tensor: torch.Tensor, with_strides: bool) -> tuple:
    strides: tuple = ()
    if with_strides and tensor.layout == torch.strided and tensor.numel():
        strides = tuple(
            stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
        )
    return tensor.dtype, tensor.layout, tuple(tensor.shape), strides


def _compare_forms(
    name: str, got: torch.Tensor | None, want: torch.Tensor | None, has_layout: bool
) -> None:
    if got is None or want is None:
        if got is not want:
            raise Different(f"{name}: got {_brief(got)}, want {_brief(want)}")
    elif (form := _form(got, has_layout)) != _form(want, has_layout):
        raise Different(f"{name}: got {form}, want {_form(want, has_layout)}")


def _compare_numbers(
    name: str, got: torch.Tensor, want: torch.Tensor, truth: Callable[[], torch.Tensor | None]
) -> None:
    if want.layout != torch.strided:
        got, want = got.to_dense(), want.to_dense()
    if want.dtype == torch.complex32:  # few operators are made for it
        got, want = got.to(torch.complex64), want.to(torch.complex64)
    try:
        torch.testing.assert_close(got, want, equal_nan=True, check_stride=False)
    except AssertionError as error:
        if not _is_near_enough(got, want, truth()):
            words = [line for line in str(error).splitlines() if line]
            raise Different(f"{name}: {' '.join(words[:3])}") from None


def _brief(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.flatten()[:4].tolist()}"


def _is_near_enough(got: torch.Tensor, want: torch.Tensor, truth: torch.Tensor | None) -> bool:
    inexact = want.is_floating_point() or want.is_complex()
    if not inexact or truth is None or truth.shape != want.shape:
        return False
    finite = want.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return False
    if not torch.equal(torch.nan_to_num(got[~finite]), torch.nan_to_num(want[~finite])):
        return False
    if not finite.any():
        return True
    eps = torch.finfo(want.dtype).eps
    got, want, truth = (x[finite].to(torch.complex128) for x in (got, want, truth))
    ours, theirs = (got - truth).abs().max(), (want - truth).abs().max()
    return bool(ours <= 4 * theirs + 8 * eps * truth.abs().max())


def check(road: str, case: Case, want: Outcome, row: Row | None = None) -> None:
    """Run a call by one of the engine's roads; raises Different, or what that raises.

    Where a row says how the call is an exception, it has to be one.
    """
    kind = row.kind if row is not None else None
    try:
        _check(road, case, want, kind)
    except Exception as error:
        if kind is not None or not is_refusal(case, error):
            raise
        _check(road, case, want, Kind.FALLS_BACK)


def _check(road: str, case: Case, want: Outcome, kind: Kind | None) -> None:
    torch_ort.reset_counters()
    tensors = case.fresh()
    torch.manual_seed(0)  # fakes of random operators may be drawn
    options = {"strict": kind is not Kind.FALLS_BACK, "exact_random": True}
    got = run(ROADS[road](case, tensors, options), tensors)
    counters = torch_ort.counters()
    left = {name: counters[name] for name in _LEFT_TO_EAGER if counters[name]}
    if kind is Kind.FALLS_BACK:
        if not left:
            raise Different("the engine runs it: the exception is not needed")
    elif counters["fallbacks"] or counters["captures_refused"]:
        raise Different(f"it ran in eager PyTorch: {left}")
    elif not counters["forward_runs"] and road != "compile":
        raise Different("the engine did not run")
    # An ORTModule copies arguments that are not dense.
    has_layout = road != "ortmodule" or all(map(torch.Tensor.is_contiguous, case.tensors))
    try:
        compare(case, got, want, has_layout, has_numbers=kind is not Kind.UNDEFINED)
    except Different:
        if kind is not Kind.WRONG:
            raise
        return
    if kind is Kind.WRONG:
        raise Different("it is as in eager: the exception is not needed")


_LEFT_TO_EAGER = (
    "fallbacks", "captures_refused", "graph_breaks", "frames_left_to_eager", "calls_left_to_eager",
)  # fmt: skip
