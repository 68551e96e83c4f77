"""Runs a program by eager PyTorch and by the engine's roads, and judges what differs.

Numbers are judged by how far rounding alone moves them: eager in double precision tells the truth,
and eager with noise of one rounding in every result of an operator tells how far from it a right
answer may be, also where a program asks whether one number is larger than another. What eager gives
where operands lie in memory another way is right as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from programs_parts import packed
from programs_write import Call, Program, make_inputs, make_module
from torch._functorch import config as functorch_config
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ort
from torch_ort.ortmodule import DebugOptions, LogLevel

OPTIONS = {"exact_random": True, "strict": True}
NOISY_RUNS = (3, 12, 30)  # asked one after the other, while the answer is no
FACTOR = 8.0  # how much farther than eager's roundings ours may lead


class Wrong(AssertionError):
    """The engine's outcome is not eager's; the words say where."""


@dataclasses.dataclass
class Outcome:
    """What a run leaves behind, by name: tensors, and what is compared as it is."""

    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def by_ortmodule(module: torch.nn.Module, program: Program) -> Callable[..., Any]:
    """Put a module into an ORTModule."""
    return torch_ort.ORTModule(module, DebugOptions(log_level=LogLevel.ERROR, config=OPTIONS))


def by_compile(module: torch.nn.Module, program: Program) -> Callable[..., Any]:
    """Compile a module."""
    torch.compiler.reset()
    return torch.compile(module, backend="ort", options=OPTIONS, dynamic=dynamic(program))


def dynamic(program: Program) -> bool | None:
    """Give torch.compile's `dynamic` for a program."""
    return (None, True, None, False)[program.seed % 4]


def by_aot_eager(module: torch.nn.Module, program: Program) -> Callable[..., Any]:
    """Compile a module by PyTorch's own capture with eager kernels."""
    torch.compiler.reset()
    functorch_config.donated_buffer = False  # some programs go backward twice
    return torch.compile(module, backend="aot_eager", dynamic=dynamic(program))


ROADS = {"ortmodule": by_ortmodule, "compile": by_compile}
_RUNS = ROADS | {"aot_eager": by_aot_eager}


def check(program: Program, road: str) -> list[str]:
    """Run a program by a road; give why the recorder has left parts of it to AOTAutograd.

    Raises Wrong, or what the engine raises where eager does not.
    """
    want = run_eager(program)
    torch_ort.reset_counters()
    module = make_module(program)
    with quiet(), _reasons_of_recorder() as reasons:
        got = run(program, module, _RUNS[road](module, program))
    counters = torch_ort.counters()
    if counters["recorder_bugs"]:
        raise Wrong(f"a bug of the recorder: {reasons}")
    if counters["fallbacks"] or counters["captures_refused"] or counters["calls_left_to_eager"]:
        raise Wrong(f"it ran in eager PyTorch: {counters}")
    if (road == "aot_eager" or counters["recordings_handed_over"]) and _random_states(
        got
    ) != _random_states(want):
        raise Wrong("AOTAutograd has left out draws that nothing reads: what follows is drawn anew")
    judge(program, got, want, has_layout(program, road))
    return reasons


@contextlib.contextmanager
def _reasons_of_recorder() -> Iterator[list[str]]:
    """Collect in a list what the recorder says of captures that it leaves to AOTAutograd."""
    reasons: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reasons.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch_ort.recorder")
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield reasons
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def _random_state() -> int:
    return zlib.crc32(torch.get_rng_state().numpy().tobytes())


def _random_states(outcome: Outcome) -> list[Any]:
    return [fact for name, fact in outcome.facts.items() if "random state" in name]


def has_layout(program: Program, road: str) -> bool:
    """Tell whether a road gives results with eager's strides: ORTModule copies what has gaps."""
    return road != "ortmodule" or all(one.layout == "dense" for one in program.inputs)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep eager PyTorch's warnings away."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run_eager(program: Program, wide: bool = False, threads: bool = True) -> Outcome:
    """Run a program by eager PyTorch; `threads` tells whether in those that it asks for."""
    module = make_module(program, wide)
    with quiet():
        return run(program, module, module, wide, threads)


def run(
    program: Program, module: torch.nn.Module, run_call: Callable[..., Any], wide: bool = False,
    threads: bool = True,
) -> Outcome:  # fmt: skip
    """Make all calls of a program; results of some have their backward at the end."""
    outcome = Outcome()
    later = []
    torch.manual_seed(program.seed)
    for number, call in enumerate(program.calls):
        inputs = make_inputs(program, call, number, wide)
        module.train(call.training)
        for name, value in call.numbers if program.has_parts() else ():
            setattr(module, name, value)
        given = packed(program.packed, inputs)
        (made,) = _called(run_call, [(call, given)], threads and call.in_thread)
        step = _Step(outcome, f"call {number}", module, inputs, made, call)
        step.note_forward()
        if call.backward == "later":
            later.append(step)
        elif call.backward != "never":
            step.go_backward(twice=call.backward == "twice")
    for step in reversed(later):
        step.go_backward(twice=False)
    if program.at_once:
        _run_at_once(program, module, run_call, outcome, wide, threads)
    return outcome


def _run_at_once(
    program: Program, module: torch.nn.Module, run_call: Callable[..., Any], outcome: Outcome,
    wide: bool, threads: bool,
) -> None:  # fmt: skip
    calls = [program.calls[0], program.calls[-1]]
    inputs = [make_inputs(program, call, 100 + i, wide) for i, call in enumerate(calls)]
    jobs = [(call, packed(program.packed, each)) for call, each in zip(calls, inputs, strict=True)]
    made = _called(run_call, jobs, threads)
    for i, (call, given, results) in enumerate(zip(calls, inputs, made, strict=True)):
        step = _Step(outcome, f"thread {i}", module, given, results, call)
        step.note_forward()
        step.go_backward(twice=False)


def _called(
    run_call: Callable[..., Any], jobs: list[tuple[Call, list[Any]]], threads: bool
) -> list[Any]:
    """Call with the arguments of each job, in threads at the same time where these are wanted."""
    found: list[Any] = [None] * len(jobs)

    def work(number: int) -> None:
        call, given = jobs[number]
        try:
            with _state_of(call):
                found[number] = run_call(*given), None
        except Exception as error:
            found[number] = None, error

    if threads:
        workers = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    else:
        for i in range(len(jobs)):
            work(i)
    for _, error in found:
        if error is not None:
            raise error
    return [made for made, _ in found]


@contextlib.contextmanager
def _state_of(call: Call) -> Iterator[None]:
    """Put the states of PyTorch around a call that it asks for."""
    dtype = getattr(torch, call.autocast or "bfloat16")
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(getattr(torch, call.default_dtype))
        torch.use_deterministic_algorithms(call.deterministic)
        with (
            _MODES[call.mode](), warnings.catch_warnings(),
            torch.autocast("cpu", dtype) if call.autocast else contextlib.nullcontext(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(default)
        torch.use_deterministic_algorithms(False)


_MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class _Step:
    """One call of a run: notes what it left behind."""

    def __init__(
        self, outcome: Outcome, name: str, module: torch.nn.Module, inputs: list[torch.Tensor],
        made: Any, call: Call,
    ) -> None:  # fmt: skip
        self._call = call
        self._outcome, self._name, self._module, self._inputs = outcome, name, module, inputs
        leaves, spec = pytree.tree_flatten(made)
        self._results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._fact("structure of the results", str(spec))
        self._fact("kinds of the results", [type(leaf).__name__ for leaf in leaves])

    def _fact(self, name: str, value: Any) -> None:
        self._outcome.facts[f"{self._name}, {name}"] = value

    def _note(self, name: str, tensor: torch.Tensor | None) -> None:
        name = f"{self._name}, {name}"
        if tensor is None:
            self._outcome.facts[name] = None
        else:
            if tensor.is_complex():
                self._outcome.facts[f"{name}, dtype"] = tensor.dtype
            self._outcome.tensors[name] = _real(tensor.detach()).clone()

    def note_forward(self) -> None:
        for i, result in enumerate(self._results):
            self._fact(f"strides of result {i}", _strides(result))
            self._fact(f"requires_grad of result {i}", _is_trained(result))
            self._note(f"result {i}", result)
        self._fact("memory shared", self._sharing())
        for name, buffer in self._module.named_buffers():
            self._note(f"buffer {name}", buffer)
        self._note("attribute last", self._module.last)
        for i, tensor in enumerate(self._inputs):
            self._note(f"input {i} afterwards", tensor)
        self._fact("random state", _random_state())
        for name in ("hot", "step"):
            self._fact(f"attribute {name}", repr(getattr(self._module, name, None)))

    def _sharing(self) -> list[tuple[int, int]]:
        """Tell which results share memory with which inputs (below 0) and earlier results."""
        places = [tensor.untyped_storage().data_ptr() for tensor in self._results]
        given = [tensor.untyped_storage().data_ptr() for tensor in self._inputs]
        pairs = [(i, j) for i in range(len(places)) for j in range(i) if places[i] == places[j]]
        pairs += [(i, -1 - j) for i, p in enumerate(places) for j, q in enumerate(given) if p == q]
        return [(i, j) for i, j in pairs if self._results[i].numel()]

    def go_backward(self, twice: bool) -> None:
        """Run backward from results; note gradients, and that results are as they were."""
        before = [_real(result.detach()).clone() for result in self._results]
        trained = list(filter(_is_trained, self._results))
        trained = [x for i, x in enumerate(trained) if i not in self._call.unread] or trained
        for again in (True, False) if twice else (False,):
            if trained:
                weights = list(map(_weights, trained))
                with self._around_backward():
                    torch.autograd.backward(trained, weights, retain_graph=again)
        for i, (result, copy) in enumerate(zip(self._results, before, strict=True)):
            same = torch.equal(torch.nan_to_num(_real(result.detach())), torch.nan_to_num(copy))
            self._fact(f"result {i} is as before backward", same)
        for i, tensor in enumerate(self._inputs):
            self._note(f"gradient of input {i}", tensor.grad)
        for name, parameter in self._module.named_parameters():
            self._note(f"gradient of {name}", parameter.grad)
        self._module.zero_grad()

    def _around_backward(self) -> contextlib.AbstractContextManager[Any]:
        if not self._call.backward_in_autocast:
            return contextlib.nullcontext()
        return torch.autocast("cpu", getattr(torch, self._call.autocast))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Give the real and imaginary parts of complex numbers."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    if not tensor.numel():
        return ()
    return tuple(n for size, n in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _is_trained(result: torch.Tensor) -> bool:
    """Tell whether a gradient comes to a result; a view made without them says so in vain."""
    return result.requires_grad and (result.grad_fn is not None or not result._is_view())


def _weights(result: torch.Tensor) -> torch.Tensor:
    """Give another gradient for each element of a result."""
    count = torch.arange(result.numel())
    weights = (count % 7 - 2.5) / 4
    if result.is_complex():
        weights = weights + 1j * (count % 5 - 1.5) / 4
    return weights.to(result.dtype).view(result.shape)


# Judging.


def judge(program: Program, got: Outcome, want: Outcome, with_layout: bool) -> None:
    """Raise Wrong where an outcome is not eager's up to rounding."""
    for name, fact in want.facts.items():
        if name in got.tensors:
            raise Wrong(f"{name}: got {_brief(got.tensors[name])}, want {fact}")
        if not with_layout and ("strides" in name or "memory" in name):
            continue
        if got.facts.get(name) != fact:
            raise Wrong(f"{name}: got {got.facts.get(name)}, want {fact}")
    for name, tensor in want.tensors.items():
        ours = got.tensors.get(name)
        if ours is None:
            raise Wrong(f"{name}: got None, want {_brief(tensor)}")
        if (ours.dtype, ours.shape) != (tensor.dtype, tensor.shape):
            raise Wrong(
                f"{name}: got {ours.dtype} {list(ours.shape)}, "
                f"want {tensor.dtype} {list(tensor.shape)}"
            )
    _judge_numbers(program, got, want)


def _brief(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.flatten()[:6].tolist()}"


def _judge_numbers(program: Program, got: Outcome, want: Outcome) -> None:
    doubtful = [
        name for name, tensor in want.tensors.items() if not _is_same(got.tensors[name], tensor)
    ]
    if not doubtful:
        return
    eagers = [want]
    # Other types draw other numbers from random generators.
    if not _draws(program, want):
        with contextlib.suppress(RuntimeError):
            eagers.append(run_eager(program, wide=True, threads=False))
    for lay in (_with_gaps, torch.Tensor.contiguous):
        with contextlib.suppress(RuntimeError), _Laid(lay):
            eagers.append(run_eager(program, threads=False))
    made = 0
    for runs in (0, *NOISY_RUNS):
        for number in range(made, made + runs):
            with contextlib.suppress(RuntimeError), _Noise(number):
                eagers.append(run_eager(program, threads=False))
        made += runs
        doubtful = [name for name in doubtful if not _is_among(name, got, eagers)]
        if not doubtful:
            return
    name = doubtful[0]
    ours, theirs = got.tensors[name], want.tensors[name]
    off = (ours.double() - theirs.double()).abs().nan_to_num()
    at = int(off.argmax()) if off.numel() else 0
    raise Wrong(
        f"{name}: off by {off.max().item():.3g} from {theirs.flatten()[at].item():.6g} at {at}: "
        f"got {_brief(ours)}, want {_brief(theirs)}"
    )


def _draws(program: Program, outcome: Outcome) -> bool:
    """Tell whether a run has drawn from torch's random generator."""
    with torch.random.fork_rng():
        torch.manual_seed(program.seed)
        before = _random_state()
    return any(fact != before for fact in _random_states(outcome))


def _is_same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got, want) or (
        want.is_floating_point()
        and torch.equal(got.isnan(), want.isnan())
        and torch.equal(got.nan_to_num(), want.nan_to_num())
    )


def _is_among(name: str, got: Outcome, eagers: list[Outcome]) -> bool:
    """Tell whether numbers are among those that eager PyTorch might have given."""
    ours = got.tensors[name]
    theirs = [one.tensors[name] for one in eagers if name in one.tensors]
    theirs = [one.to(torch.float64) for one in theirs if one.shape == ours.shape]
    if not ours.numel():
        return True
    eps = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
    stack = torch.stack(theirs)
    ours = ours.to(torch.float64)
    # What is not finite has to be so in one of eager's runs, at that place.
    is_finite = ours.isfinite() & stack.isfinite().any(0)
    odd = ~ours.isfinite()
    equal = (stack == ours) | (stack.isnan() & ours.isnan())
    if not bool(equal.any(0)[odd].all()):
        return False
    if not bool(is_finite[~odd].all()):
        return False
    if not is_finite.any():
        return True
    middle = stack[0]
    finite = torch.where(stack.isfinite(), stack, middle.nan_to_num(0, 0, 0))
    low, high = finite.amin(0), finite.amax(0)
    scale = float(finite.abs().amax())
    spread = float((high - low)[is_finite].max())
    slack = FACTOR * spread + 32 * eps * scale
    return bool(((ours >= low - slack) & (ours <= high + slack))[is_finite].all())


class _Noise(TorchDispatchMode):
    """Rounds every result of an operator another way; integers stay."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = not func._schema.is_mutable and any(
            one.alias_info for one in func._schema.returns
        )
        if not is_view:
            pytree.tree_map_only(torch.Tensor, self._move, result)
        return result

    def _move(self, tensor: torch.Tensor) -> None:
        if tensor.is_complex() and not (tensor.is_conj() or tensor._is_zerotensor()):
            tensor = torch.view_as_real(tensor)
        if not tensor.is_floating_point() or tensor.layout != torch.strided or not tensor.numel():
            return
        if tensor._is_zerotensor():  # it has no memory
            return
        if torch._debug_has_internal_overlap(tensor) == 1:
            return
        noise = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64) - 0.5
        moved = tensor.double() * (1 + 2 * torch.finfo(tensor.dtype).eps * noise)
        tensor.copy_(torch.where(tensor == tensor.round(), tensor, moved.to(tensor.dtype)))


class _Laid(TorchDispatchMode):
    """Lays operands in memory another way: kernels take NaN otherwise in loops without vectors."""

    def __init__(self, lay: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._lay = lay

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if not any(argument.alias_info for argument in func._schema.arguments):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._laid, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _laid(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or not tensor.dim() or tensor._is_zerotensor():
            return tensor
        return self._lay(tensor)


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]
