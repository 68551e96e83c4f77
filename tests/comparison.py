# Trains an eager copy and a compiled copy of a model from the same state and compares all they
# leave behind: outputs, gradients, buffers, parameters, inputs and the random generator.
from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

import torch_ort

Context = Callable[[], contextlib.AbstractContextManager]


@dataclass
class Options:
    """How both copies are trained; the same object serves both runs."""

    steps: int = 3
    micro_batches: int = 1
    optimizer: Callable[[list], torch.optim.Optimizer] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    before_step: Callable[[Any, int], None] | None = None
    forward_context: Context = contextlib.nullcontext
    backward_context: Context = contextlib.nullcontext
    seed: int = 0


@dataclass
class Run:
    """What one copy left behind: a record per micro batch, from names to values."""

    model: Any
    records: list[dict[str, Any]] = field(default_factory=list)
    backwards: int = 0


def default_optimizer(parameters: list) -> torch.optim.Optimizer:
    """Return SGD with momentum, so that a wrong gradient also shows in later steps."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def default_loss(outputs: Any) -> torch.Tensor:
    """Reduce every differentiable output to one number whose gradient differs per element."""
    terms = []
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            wide = leaf if leaf.dtype == torch.float64 else leaf.float()
            terms.append((wide.pow(2).sum() + wide.sum()) / max(wide.numel(), 1))
    return torch.stack(terms).sum() if terms else torch.zeros(())


@contextlib.contextmanager
def _own_random_stream(seed: int, device: str) -> Iterator[None]:
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def build(make: Callable[..., Any], *args: Any, device: str, seed: int) -> Any:
    """Call `make` with new tensors on `device` and a random stream of its own."""
    with _own_random_stream(seed, device), torch.device(device):
        return make(*args)


def train(
    model: Any, call: Callable[..., Any], make_inputs: Callable, device: str, options: Options
) -> Run:
    """Train `model` through `call` (the model itself or its compiled form)."""
    run = Run(model)
    is_module = isinstance(model, torch.nn.Module)
    parameters = list(model.parameters()) if is_module else []
    optimizer = (options.optimizer or default_optimizer)(parameters) if parameters else None
    torch.manual_seed(options.seed + 1)
    for step in range(options.steps):
        if options.before_step is not None:
            options.before_step(model, step)
        if optimizer is not None:
            optimizer.zero_grad()
        for micro_batch in range(options.micro_batches):
            seed = 1000 + 10 * step + micro_batch
            inputs = build(make_inputs, step, device=device, seed=seed)
            inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            run.records.append(_step(run, call, inputs, device, options))
        if optimizer is not None:
            optimizer.step()
        if is_module:
            _record_state(run.records[-1], model)
    return run


def _step(run: Run, call: Callable, inputs: tuple, device: str, options: Options) -> dict:
    record: dict[str, Any] = {}
    leaves = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    for leaf in leaves:
        if leaf.requires_grad and not leaf.is_leaf:
            leaf.retain_grad()
    with options.forward_context():
        outputs = call(*inputs)
    values, spec = pytree.tree_flatten(outputs)
    record["structure of the outputs"] = str(spec)
    for i, value in enumerate(values):
        _record(record, f"output {i}", value)
        if isinstance(value, torch.Tensor):
            record[f"output {i} requires_grad"] = value.requires_grad
    with options.backward_context():
        loss = (options.loss or default_loss)(outputs)
        if loss.requires_grad:
            loss.backward()
            run.backwards += 1
    for i, leaf in enumerate(leaves):
        _record(record, f"input {i} afterwards", leaf)
        if leaf.requires_grad:
            _record(record, f"gradient of input {i}", leaf.grad)
    if isinstance(run.model, torch.nn.Module):
        for name, parameter in run.model.named_parameters():
            _record(record, f"gradient of {name}", parameter.grad)
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    record["state of the random generator"] = state
    return record


def _record_state(record: dict, model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        _record(record, f"parameter {name}", parameter)
    for name, buffer in model.named_buffers():
        _record(record, f"buffer {name}", buffer)


def _record(record: dict, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        # Kept apart because clone() densifies values that overlap themselves (expand). Strides of
        # dims of one element are read by nothing, and PyTorch's differ by the number of threads.
        strides = zip(value.shape, value.stride(), strict=True)
        record[f"strides of {name}"] = tuple(stride for size, stride in strides if size != 1)
        value = value.detach().clone()
    record[name] = value


def assert_same_runs(
    eager: Run, compiled: Run, rtol: float | None, atol: float | None, check_stride: bool
) -> None:
    """Compare two runs value by value; the message names the step and the value."""
    assert len(eager.records) == len(compiled.records)
    for number, (want, got) in enumerate(zip(eager.records, compiled.records, strict=True)):
        assert list(want) == list(got), f"micro batch {number}: other values were produced"
        for name in want:
            _assert_same(
                f"micro batch {number}, {name}", want[name], got[name], rtol, atol, check_stride
            )


def _assert_same(
    where: str, want: Any, got: Any, rtol: float | None, atol: float | None, check_stride: bool
) -> None:
    if "strides of" in where:
        assert not check_stride or want == got, f"{where}: got {got}, want {want}"
    elif isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        if rtol is None and atol is None:
            rtol, atol = _tolerances(want)
        torch.testing.assert_close(
            got, want, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    else:
        assert type(want) is type(got), f"{where}: got {got!r}, want {want!r}"
        assert want == got, f"{where}: got {got!r}, want {want!r}"


def _tolerances(want: torch.Tensor) -> tuple[float | None, float | None]:
    """Give those of assert_close, but let small numbers be as far off as large ones beside them.

    Products add up in another order than eager's, and what numbers cancel leaves the rounding of
    the largest.
    """
    if want.dtype not in (torch.float32, torch.float64) or want.numel() == 0:
        return None, None
    rtol, atol = (1.3e-6, 1e-5) if want.dtype == torch.float32 else (1e-7, 1e-7)
    largest = want.detach().abs().nan_to_num(0, 0, 0).max().item()
    return rtol, max(atol, 16 * rtol * largest)


def counters_of_a_steady_step(
    model: torch.nn.Module, compiled: Callable, x: torch.Tensor, labels: torch.Tensor
) -> dict[str, int]:
    """Train a classifier until its memory is settled; give the counters of one step after that."""
    for _ in range(6):
        torch_ort.reset_counters()
        model.zero_grad()
        torch.nn.functional.cross_entropy(compiled(x), labels).backward()
    return torch_ort.counters()


def plan_of(model: torch.nn.Module, *inputs: torch.Tensor) -> dict[str, Any]:
    """Give the memory plan of a model that is captured as one graph, by explain()."""
    torch.compiler.reset()
    (graph,) = torch_ort.explain(model, *inputs).graphs
    return graph.plan


def gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Run forward and backward with another weight for each element of the result.

    Give the result and the gradients of `x` and of all parameters.
    """
    x = x.detach().requires_grad_()
    result = model(x)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)
    (result * weights).sum().backward()
    found = [result.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return found


def assert_as_exact_as_eager(
    model: torch.nn.Module, compiled: torch.nn.Module, x: torch.Tensor
) -> None:
    """Measure result and gradients of both, as gradients() gives them, against eager in float64."""
    want = gradients(copy.deepcopy(model).double(), x.double())
    near = [
        8 * (eager.double() - truth).abs().max() + 1e-5 * truth.abs().max()
        for eager, truth in zip(gradients(model, x), want, strict=True)
    ]
    for got, truth, bound in zip(gradients(compiled, x), want, near, strict=True):
        assert got.dtype == x.dtype
        assert (got.double() - truth).abs().max() <= bound
