"""torch_ort.optim on a GPU: against float64, against the CPU, and that nobody waits for it."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from emulated import cuda_device
from emulated.cuda_driver import ORDERS
from optimizer_steps import SIZES, error, give, gradients, like, make_parameters, train
from torch import Tensor, nn

import torch_ort
from torch_ort import _C, UserError
from torch_ort.engine import cuda as engine_cuda
from torch_ort.optim import SGD, Adam, AdamW, AdamWMode, FusedAdam, Lamb, on_cuda

pytestmark = pytest.mark.cuda

# Around the length of a chunk; and what is longer, and odd.
LENGTHS = [*SIZES, (8191,), (8192,), (8193,), (3, 7001)]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(SGD, lr=0.1),
    "sgd-decay": functools.partial(SGD, lr=0.1, weight_decay=0.1, maximize=True),
    "momentum": functools.partial(SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": functools.partial(Adam, lr=0.01, weight_decay=0.1),
    "amsgrad": functools.partial(Adam, lr=0.01, amsgrad=True, maximize=True),
    "adamw": functools.partial(AdamW, lr=0.01, betas=(0.8, 0.95), eps=1e-6),
    "adamw-amsgrad": functools.partial(AdamW, lr=0.01, amsgrad=True),
    **{
        f"fused-{mode.value}": functools.partial(
            FusedAdam, lr=0.01, weight_decay=0.1, adam_w_mode=mode
        )
        for mode in AdamWMode
    },
    "fused-uncorrected": functools.partial(FusedAdam, lr=0.01, bias_correction=False),
    "lamb": functools.partial(Lamb, lr=0.01, weight_decay=0.1),
    "lamb-limits": functools.partial(
        Lamb, lr=0.01, bias_correction=True, ratio_min=0.5, ratio_max=0.9
    ),
}
EACH = pytest.mark.parametrize("name", OPTIMIZERS)
FEW = pytest.mark.parametrize("name", ["nesterov", "amsgrad", "fused-1", "lamb"])
SCALED = pytest.mark.parametrize("name", ["fused-0", "fused-2", "lamb"])
CLOSE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.02, torch.float16: 0.002}


def there(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().cuda()) for param in params]


def here(params: list[Tensor]) -> list[Tensor]:
    return [param.detach().cpu() for param in params]


def assert_all_by_kernels(count: int) -> None:
    counters = torch_ort.counters()
    assert counters["optimizer_parameters"] == count
    assert counters["optimizer_parameters_by_torch"] == 0


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Return a function that gives the kernels launched since it was called last."""
    if not cuda_device.is_active():
        pytest.skip("reads the log of the fake driver")
    log = tmp_path / "launches"
    log.touch()
    monkeypatch.setenv("EMULATED_CUDA_LOG", str(log))
    seen = 0

    def names() -> list[str]:
        nonlocal seen
        lines = log.read_text().splitlines()
        new, seen = lines[seen:], len(lines)
        return [line.split()[0] for line in new]

    return names


class Waits:
    """Counts how often numbers were brought from the device."""

    def __init__(self) -> None:
        self.before = self.count()

    @staticmethod
    def count() -> int:
        if not cuda_device.is_active():
            return 0
        calls = cuda_device.calls()
        return calls["aten::_local_scalar_dense"] + calls["aten::_copy_from"]

    def none(self) -> bool:
        return self.count() == self.before


# Formulas.


@EACH
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_equal_to_float64_and_to_the_cpu(name: str, dtype: torch.dtype) -> None:
    make = OPTIMIZERS[name]
    on_cpu = make_parameters(dtype, LENGTHS)
    on_gpu, exact = there(on_cpu), like(on_cpu, torch.float64)
    train(make(exact), rounded_to=dtype)
    train(make(on_cpu))
    torch_ort.reset_counters()
    train(make(on_gpu))
    assert_all_by_kernels(5 * len(LENGTHS))
    assert error(here(on_gpu), exact) < CLOSE[dtype] * (50 if "adam" in name else 5)
    assert error(here(on_gpu), on_cpu) < CLOSE[dtype]


@FEW
def test_states_of_float32_with_short_parameters(name: str) -> None:
    results = []
    for place in (like, there):
        params = place(make_parameters(torch.bfloat16, LENGTHS))
        optimizer = OPTIMIZERS[name](params)
        train(optimizer, 1)
        for state in optimizer.state.values():
            for key in state:
                state[key] = state[key].float()
        train(optimizer, 4, first=1)
        results.append(here(params))
    assert error(*results) < 0.02
    assert_all_by_kernels(2 * 5 * len(LENGTHS))


@pytest.mark.parametrize("name", ["nesterov", "amsgrad", "fused-2", "lamb"])
def test_special_values(name: str) -> None:
    values = [0.0, -0.0, 1e-45, 1e38, torch.inf, -torch.inf, torch.nan, 1.0]
    pairs = torch.tensor(list(itertools.product(values, values)))
    results = []
    for place in (like, there):
        params = place([nn.Parameter(pairs[:, 0].clone())])
        optimizer = OPTIMIZERS[name](params)
        for _ in range(3):
            give(params, [pairs[:, 1]])
            optimizer.step()
        results.append(here(params))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7, equal_nan=True)


# Layouts, and what is there at all.


def layouts() -> dict[str, Callable[[], Tensor]]:
    return {
        "transposed": lambda: torch.randn(33, 65).t(),
        "channels_last": lambda: torch.randn(2, 3, 9, 65).to(memory_format=torch.channels_last),
        "permuted": lambda: torch.randn(5, 65, 7).permute(2, 0, 1),
        "unaligned": lambda: torch.randn(20000)[701:19000],
    }


@FEW
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("grads", ["alike", "transposed", "expanded"])
def test_layouts(name: str, layout: str, grads: str) -> None:
    torch.manual_seed(0)
    start = layouts()[layout]().cuda()
    got, want = [nn.Parameter(start)], [nn.Parameter(start.cpu().contiguous())]
    optimizers = OPTIMIZERS[name](got), OPTIMIZERS[name](want)
    for seed in range(3):
        (grad,) = gradients(want, seed)
        if grads == "expanded":
            grad = grad[..., :1].expand(grad.shape)
        if grads == "transposed":
            grad = grad.mT.contiguous().mT if grad.dim() > 1 else torch.stack([grad, grad], 1)[:, 0]
        want[0].grad = grad.contiguous()
        got[0].grad = torch.empty_like(got[0]).copy_(grad) if grads == "alike" else grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(here(got), here(want), rtol=1e-5, atol=1e-6)
    assert got[0].stride() == start.stride()
    assert_all_by_kernels(2 * 3)


def test_memory_around_a_parameter_stays() -> None:
    memory = torch.randn(30000).cuda()
    before = memory.clone()
    train(AdamW([nn.Parameter(memory[701:19000])], lr=0.1))
    assert torch.equal(memory[:701], before[:701])
    assert torch.equal(memory[19000:], before[19000:])
    assert not torch.equal(memory[701:19000], before[701:19000])


@FEW
def test_holes_are_left_to_torch(name: str) -> None:
    torch.manual_seed(0)
    start = [torch.randn(60), torch.randn(100)]
    results = []
    for device in ("cpu", "cuda"):
        first, second = (each.clone().to(device) for each in start)
        params = [nn.Parameter(first[::2]), nn.Parameter(second)]
        optimizer = OPTIMIZERS[name](params)
        for _ in range(3):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        results.append(here(params))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert torch_ort.counters()["optimizer_parameters"] == 2 * 3
    assert torch_ort.counters()["optimizer_parameters_by_torch"] == 2 * 3


@FEW
def test_gradients_that_come_and_go(name: str) -> None:
    results = []
    for place in (like, there):
        params = place(make_parameters(torch.float32, [(50,)] * 3))
        optimizer = OPTIMIZERS[name](params)
        for present in ([], [0], [0, 1], [1], [0, 1, 2]):
            grads = gradients(params, len(present))
            give(params, [grads[i] if i in present else None for i in range(3)])
            optimizer.step()
        results.append(here(params))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)
    assert torch_ort.counters()["optimizer_parameters_by_torch"] == 0


@FEW
def test_many_groups(name: str) -> None:
    """More than the arguments of a kernel have room for."""
    results = []
    for place in (like, there):
        params = place(make_parameters(torch.float32, [(5, 9)] * 70))
        groups = [{"params": [param], "lr": 0.001 * (i + 1)} for i, param in enumerate(params)]
        groups[3]["weight_decay"] = 0.5
        optimizer = OPTIMIZERS[name](groups)
        train(optimizer)
        results.append(here(params))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)
    assert_all_by_kernels(2 * 5 * 70)


@FEW
def test_both_devices(name: str) -> None:
    want = make_parameters(torch.float32, LENGTHS)
    got = like(want)
    got[1::2] = there(got[1::2])
    train(OPTIMIZERS[name](want))
    optimizer = OPTIMIZERS[name](got)
    train(optimizer)
    torch.testing.assert_close(here(got), here(want), rtol=1e-6, atol=1e-6)
    assert [param.is_cuda for param in got] == [i % 2 == 1 for i in range(len(got))]
    assert_all_by_kernels(2 * 5 * len(got))


def test_a_norm_over_both_devices() -> None:
    want = make_parameters(torch.float32, LENGTHS)
    got = like(want)
    got[1::2] = there(got[1::2])
    reference, optimizer = FusedAdam(want), FusedAdam(got)
    for each in (reference, optimizer):
        train(each, max_norm=1.0, grad_scale=4.0)
    assert optimizer.grad_norm == pytest.approx(reference.grad_norm, rel=1e-6)
    torch.testing.assert_close(here(got), here(want), rtol=1e-6, atol=1e-6)
    assert optimizer.param_groups[0]["step"] == 5


# Launches.


def test_thousands_of_tensors_are_one_launch(launches: Callable[[], list[str]]) -> None:
    want = make_parameters(torch.float32, [(3,), (2, 2), (1,)] * 700)
    got = there(want)
    reference, optimizer = AdamW(want), AdamW(got)
    for seed in range(3):
        give(want, gradients(want, seed))
        reference.step()
        for param, other in zip(got, want, strict=True):
            if param.grad is None:
                param.grad = other.grad.cuda()
            else:
                param.grad.copy_(other.grad)
        launches()
        optimizer.step()
        names = launches()
        assert [name for name in names if name != "write_words"] == [
            "begin_step",
            "adam_f32_f32_f32_f32",
        ]
        # The addresses are those of the step before.
        assert ("write_words" in names) == (seed == 0)
    torch.testing.assert_close(here(got), here(want), rtol=1e-6, atol=1e-7)
    assert_all_by_kernels(2 * 3 * len(want))


def test_one_launch_for_each_combination_of_dtypes(launches: Callable[[], list[str]]) -> None:
    params = there(
        [
            *make_parameters(torch.float32, [(5,), (9000,)]),
            *make_parameters(torch.bfloat16, [(5,), (9000,)]),
        ]
    )
    train(FusedAdam(params), 1, max_norm=1.0)
    assert [name for name in launches() if name != "write_words"] == [
        "sum_squares_f32",
        "sum_squares_bf16",
        "begin_step",
        "adam_f32_f32_f32_f32",
        "adam_bf16_bf16_f32_f32",
    ]
    train(Lamb(params), 1)
    assert [name for name in launches() if name != "write_words"] == [
        "begin_step", "lamb_f32_f32_f32_f32", "lamb_rates", "lamb_f32_f32_f32_f32_move",
        "lamb_bf16_bf16_f32_f32", "lamb_rates", "lamb_bf16_bf16_f32_f32_move",
    ]  # fmt: skip


def test_what_is_captured_writes_its_own_addresses(
    launches: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that is replayed must not read what later steps have written in the same place."""
    want = make_parameters()
    got = there(want)
    reference, optimizer = AdamW(want), AdamW(got, capturable=True)
    for seed, capturing in enumerate((False, True, True, False)):
        give(want, gradients(want, seed))
        for param, other in zip(got, want, strict=True):
            if seed == 0:
                param.grad = torch.empty_like(param)
            param.grad.copy_(other.grad)
        if capturing:
            monkeypatch.setenv("EMULATED_CUDA_CAPTURING", "1")
        else:
            monkeypatch.delenv("EMULATED_CUDA_CAPTURING", raising=False)
        launches()
        for each in (reference, optimizer):
            each.step()
        assert ("write_words" in launches()) == (capturing or seed == 0)
    torch.testing.assert_close(here(got), here(want), rtol=1e-6, atol=1e-7)


def test_no_number_compiles_a_kernel_anew() -> None:
    params = there(make_parameters())
    optimizer = AdamW(params, lr=0.1)
    train(optimizer, 1)
    built = _C.cuda.build_counts()
    optimizer.param_groups[0].update(lr=0.02, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.3)
    train(optimizer, 3)
    train(AdamW(there(make_parameters(sizes=[(77, 99)])), capturable=True), 2)
    assert _C.cuda.build_counts() == built


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["momentum", "amsgrad", "fused-1", "lamb"])
def test_bits_are_the_same_from_run_to_run(
    name: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for each in ("forward", order):
        monkeypatch.setenv("EMULATED_CUDA_ORDER", each)
        params = there(make_parameters(torch.float32, LENGTHS))
        optimizer = OPTIMIZERS[name](params)
        scaled = {"max_norm": 1.0} if hasattr(optimizer, "grad_norm") else {}
        train(optimizer, 2, **scaled)
        results.append([*here(params), getattr(optimizer, "grad_norm", torch.zeros(())).cpu()])
    assert all(map(torch.equal, *results))


def test_each_stream_has_its_turn() -> None:
    want = make_parameters()
    got = there(want)
    train(AdamW(want, lr=0.1))
    torch.cuda.synchronize()
    optimizer = AdamW(got, lr=0.1)
    for seed in range(5):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            give(got, gradients(got, seed))
            optimizer.step()
        stream.synchronize()
    torch.testing.assert_close(here(got), here(want), rtol=1e-6, atol=1e-7)


# Numbers on the device.


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["momentum", "adamw", "fused-2", "lamb"])
def test_a_tensor_as_learning_rate(name: str, device: str) -> None:
    want = make_parameters(torch.float32, LENGTHS)
    got = there(want)
    rate = torch.tensor(0.05, device=device)
    make = OPTIMIZERS[name].func
    optimizers = make(want, lr=0.05), make(got, lr=rate)
    for optimizer in optimizers:
        train(optimizer, 2)
    optimizers[0].param_groups[0]["lr"] = 0.2
    rate.fill_(0.2)
    for optimizer in optimizers:
        train(optimizer, 2, first=2)
    torch.testing.assert_close(here(got), here(want), rtol=1e-5, atol=1e-6)
    assert_all_by_kernels(2 * 4 * len(want))


def test_nobody_waits_for_a_capturable_step() -> None:
    want = make_parameters(torch.float32, LENGTHS)
    got = there(want)
    reference = AdamW(want, lr=0.1)
    optimizer = AdamW(got, lr=torch.tensor(0.1, device="cuda"), capturable=True)
    for seed in range(4):
        for params in (want, got):
            give(params, gradients(params, seed))
        reference.step()
        waits = Waits()
        optimizer.step()
        assert waits.none()
    torch.testing.assert_close(here(got), here(want), rtol=1e-6, atol=1e-6)
    assert all(state["step"].is_cuda for state in optimizer.state.values())
    assert_all_by_kernels(2 * 4 * len(want))


SCALERS = {
    "adamw": lambda params, device: AdamW(params, lr=0.1, capturable=device == "cuda"),
    "fused": lambda params, device: FusedAdam(params, lr=0.1),
    "lamb": lambda params, device: Lamb(params, lr=0.1),
    "not capturable": lambda params, device: AdamW(params, lr=0.1),
    "sgd": lambda params, device: SGD(params, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", SCALERS)
def test_gradient_scaler(name: str, unscale: bool) -> None:
    waits_for_nobody = name in ("adamw", "fused", "lamb")
    results = []
    for device in ("cpu", "cuda"):
        param = nn.Parameter(torch.ones(9000, device=device))
        optimizer = SCALERS[name]([param], device)
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        for factor in (torch.inf, 1.0, 2.0, torch.nan, 3.0):
            optimizer.zero_grad()
            scaler.scale((param * factor).sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            waits = Waits()
            scaler.step(optimizer)
            assert device == "cpu" or waits.none() or not waits_for_nobody
            if hasattr(optimizer, "step_skipped"):
                assert bool(optimizer.step_skipped) == (not math.isfinite(factor))
            scaler.update()
        results.append(param.detach().cpu())
        assert scaler.get_scale() == 1.0
        (state,) = optimizer.state_dict()["state"].values()
        assert name == "sgd" or state["step"] == 3
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)
    assert torch_ort.counters()["optimizer_parameters_by_torch"] == 0


@SCALED
def test_gradient_scaler_clips_what_it_has_scaled(name: str) -> None:
    want = make_parameters(torch.float32, LENGTHS)
    got = there(want)
    optimizers = [(want, OPTIMIZERS[name](want), "cpu"), (got, OPTIMIZERS[name](got), "cuda")]
    for params, optimizer, device in optimizers:
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        for seed in range(3):
            optimizer.zero_grad()
            grads = [grad.to(device) for grad in gradients(want, seed)]
            products = [(p * grad).sum() for p, grad in zip(params, grads, strict=True)]
            scaler.scale(sum(products)).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
    norms = [float(optimizer.grad_norm) for _, optimizer, _ in optimizers]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    torch.testing.assert_close(here(got), here(want), rtol=1e-5, atol=1e-6)


@SCALED
def test_complex_parameters(name: str) -> None:
    torch.manual_seed(0)
    want = [nn.Parameter(torch.randn(30, 40, dtype=torch.complex64))]
    got = there(want)
    for params in (want, got):
        optimizer = OPTIMIZERS[name](params)
        for seed in range(3):
            give(params, [torch.view_as_complex(gradients([torch.empty(30, 40, 2)], seed)[0])])
            optimizer.step(max_norm=1.0)
    torch.testing.assert_close(here(got), here(want), rtol=1e-5, atol=1e-6)
    assert_all_by_kernels(2 * 3)


def test_scaled_steps_of_what_is_left_to_torch() -> None:
    results = []
    for capturable in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(60).cuda()[::2]), nn.Parameter(torch.randn(100).cuda())]
        optimizer = AdamW(params, lr=0.1, capturable=capturable)
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
        for factor in (1.0, torch.inf, 2.0):
            optimizer.zero_grad()
            scaler.scale(sum((param * factor).sum() for param in params)).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(here(params))
    torch.testing.assert_close(*results)


@SCALED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [None, 8.0, "tensor"])
def test_clipping(name: str, dtype: torch.dtype, scale: float | str | None) -> None:
    want = make_parameters(dtype, LENGTHS)
    got = there(want)
    reference, optimizer = OPTIMIZERS[name](want), OPTIMIZERS[name](got)
    by = 8.0 if scale == "tensor" else scale
    # All; none; all of it.
    for seed, max_norm in enumerate((1.0, 1000.0, 0.0)):
        for params in (want, got):
            give(params, [grad * (by or 1) for grad in gradients(params, seed)])
        reference.step(grad_scale=by, max_norm=max_norm)
        waits = Waits()
        there_too = torch.tensor(8.0, device="cuda") if scale == "tensor" else by
        optimizer.step(grad_scale=there_too, max_norm=max_norm)
        assert waits.none()
        assert optimizer.grad_norm.is_cuda
        assert not optimizer.step_skipped
        assert optimizer.grad_norm.item() == pytest.approx(reference.grad_norm, rel=1e-12)
    assert error(here(got), want) < CLOSE[dtype]


@SCALED
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, -1])
def test_a_step_that_is_skipped(name: str, value: float, place: int) -> None:
    params = there(make_parameters(torch.float32, LENGTHS))
    before = here(params)
    optimizer = OPTIMIZERS[name](params)
    give(params, gradients(params, 0))
    params[place].grad.view(-1)[-1] = value
    optimizer.step(grad_scale=2.0)
    assert optimizer.step_skipped
    assert all(map(torch.equal, here(params), before))
    assert all(not state["exp_avg"].any() for state in optimizer.state.values())
    assert optimizer.param_groups[0]["step"] == 0
    train(optimizer, 1)
    assert optimizer.step_skipped is False
    assert optimizer.param_groups[0]["step"] == 1


@SCALED
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_was_found_before_is_believed(name: str, device: str) -> None:
    params = there(make_parameters())
    before = here(params)
    optimizer = OPTIMIZERS[name](params)
    train(optimizer, 1, found_inf=torch.tensor(1.0, device=device))
    assert optimizer.step_skipped
    assert all(map(torch.equal, here(params), before))
    train(optimizer, 1, found_inf=torch.tensor(0.0, device=device), grad_scale=2.0)
    assert not optimizer.step_skipped
    assert optimizer.param_groups[0]["step"] == 1


def test_large_gradients_are_finite() -> None:
    param = nn.Parameter(torch.zeros(30000, device="cuda"))
    optimizer = FusedAdam([param])
    param.grad = torch.full((30000,), 3e38, device="cuda")
    optimizer.step(max_norm=1.0)
    assert not optimizer.step_skipped
    assert optimizer.grad_norm.item() == pytest.approx(3e38 * math.sqrt(30000))


def test_numbers_out_of_range() -> None:
    optimizer = FusedAdam(there(make_parameters()))
    with pytest.raises(ValueError, match=r"FusedAdam: grad_scale: got 0\.0, want more than 0"):
        train(optimizer, 1, grad_scale=0.0)
    with pytest.raises(ValueError, match=r"FusedAdam: max_norm: got -1\.0, want 0 or more"):
        train(optimizer, 1, max_norm=-1.0)


# State.


@pytest.mark.parametrize("name", ["momentum", "amsgrad", "fused-2", "lamb"])
def test_states_move_between_devices(name: str) -> None:
    want = make_parameters()
    reference = OPTIMIZERS[name](want)
    train(reference, 9)
    params: list[nn.Parameter] = make_parameters()
    optimizer = OPTIMIZERS[name](params)
    train(optimizer, 3)
    for step, move in ((3, there), (6, lambda params: [nn.Parameter(p) for p in here(params)])):
        params = move(params)
        before, optimizer = optimizer, OPTIMIZERS[name](params)
        optimizer.load_state_dict(before.state_dict())
        train(optimizer, 3, first=step)
        saved, kept = optimizer.state_dict(), reference.state_dict()
        for mine, other in zip(saved["param_groups"], kept["param_groups"], strict=True):
            # PyTorch adds the former where it loads.
            assert mine.keys() - {"differentiable"} == other.keys() - {"differentiable"}
            assert type(mine.get("step")) is type(other.get("step"))
        for mine, other in zip(saved["state"].values(), kept["state"].values(), strict=True):
            assert {key: value.dtype for key, value in mine.items()} == {
                key: value.dtype for key, value in other.items()
            }
            assert "step" not in mine or not mine["step"].is_cuda
    torch.testing.assert_close(here(params), here(want), rtol=1e-5, atol=1e-6)
    assert torch_ort.counters()["optimizer_parameters_by_torch"] == 0


@pytest.mark.parametrize("first", ["ours", "fused", "torch"])
@pytest.mark.parametrize("second", ["ours", "fused", "torch"])
@pytest.mark.parametrize("capturable", [False, True])
def test_states_pass_between_torch_and_us(first: str, second: str, capturable: bool) -> None:
    settings = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6}
    kinds = {
        "ours": functools.partial(AdamW, **settings, capturable=capturable),
        "torch": functools.partial(torch.optim.AdamW, **settings, capturable=capturable),
        "fused": functools.partial(FusedAdam, **settings, adam_w_mode=AdamWMode.ADAMW_TORCH),
    }
    want = make_parameters(torch.float64)
    params = there(want)
    train(torch.optim.AdamW(want, **settings), 6)
    optimizer = kinds[first](params)
    train(optimizer, 3)
    after = kinds[second](params)
    after.load_state_dict(optimizer.state_dict())
    train(after, 3, first=3)
    # PyTorch's corrects for steps in float32 where it counts them on the device.
    assert error(here(params), want) < (1e-6 if capturable else 1e-12)
    assert all(state["step"] == 6 for state in after.state_dict()["state"].values())


@pytest.mark.parametrize("name", ["amsgrad", "fused-1", "lamb"])
def test_copies_go_on_like_the_original(name: str) -> None:
    params = there(make_parameters())
    optimizer = OPTIMIZERS[name](params)
    train(optimizer, 3)
    pair = copy.deepcopy((params, optimizer))
    for its_optimizer in (optimizer, pair[1]):
        train(its_optimizer, 3, first=3)
    assert all(map(torch.equal, params, pair[0]))


def test_a_step_between_forward_and_backward_is_noticed() -> None:
    param = nn.Parameter(torch.randn(10, device="cuda"))
    loss = (param * param).sum()
    param.grad = torch.ones(10, device="cuda")
    AdamW([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_steps_in_backward() -> None:
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 30), nn.Tanh(), nn.Linear(30, 3)).to(device)
        optimizer = AdamW(model.parameters(), lr=0.01, in_backward=True)
        for _ in range(3):
            model(torch.ones(4, 9, device=device)).square().mean().backward()
            optimizer.step()
        results.append(here(list(model.parameters())))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_trains_a_compiled_model() -> None:
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.LayerNorm(30), nn.Linear(30, 4))
        x, y = torch.randn(16, 20).to(device), torch.randint(4, (16,)).to(device)
        compiled = torch.compile(model.to(device), backend="ort")
        optimizer = FusedAdam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(10):
            loss = nn.functional.cross_entropy(compiled(x), y)
            loss.backward()
            optimizer.step(max_norm=1.0)
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-4)
    assert results[1][-1] < results[1][0]
    assert torch_ort.counters()["optimizer_parameters_by_torch"] == 0


# Where there are no kernels.


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches = (on_cuda._missing, engine_cuda._warn)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(_C.cuda, "missing", lambda: "cuda: driver: no such file")
    yield
    for cache in caches:
        cache.cache_clear()


@FEW
def test_without_a_driver_pytorch_does_it(
    name: str, no_driver: None, caplog: pytest.LogCaptureFixture
) -> None:
    want = make_parameters()
    got = there(want)
    train(OPTIMIZERS[name](want))
    torch_ort.reset_counters()
    with caplog.at_level(logging.WARNING, logger="torch_ort"):
        train(OPTIMIZERS[name](got))
        train(OPTIMIZERS[name](there(want)))
    assert [record.message for record in caplog.records] == [
        "nothing is fused on CUDA, where PyTorch's kernels run: cuda: driver: no such file"
    ]
    torch.testing.assert_close(here(got), here(want), rtol=1e-5, atol=1e-5)
    assert torch_ort.counters()["optimizer_parameters"] == 0


@FEW
def test_kernels_that_do_not_build(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise _C.Unsupported("adam_f32_f32_f32_f32: NVRTC: no")

    monkeypatch.setattr(_C, "step_on_cuda", refuse)
    want = make_parameters()
    got = there(want)
    arguments = {"max_norm": 1.0} if name in ("fused-1", "lamb") else {}
    train(OPTIMIZERS[name](want), **arguments)
    torch_ort.reset_counters()
    optimizer = OPTIMIZERS[name](got)
    train(optimizer, **arguments)
    torch.testing.assert_close(here(got), here(want), rtol=1e-5, atol=1e-5)
    assert torch_ort.counters()["optimizer_parameters"] == 0
    assert arguments == {} or isinstance(optimizer.grad_norm, float)


def test_the_engine_refuses_lists_that_do_not_fit() -> None:
    one, settings = [torch.ones(2, device="cuda")], [_C.StepSettings()]
    with pytest.raises(UserError, match="gradients: got 0 of them, want 1"):
        _C.step_on_cuda("sgd", one, [], [], [0], settings)
    with pytest.raises(UserError, match="number of settings: got 1, want one of 1"):
        _C.step_on_cuda("sgd", one, one, [], [1], settings)
    with pytest.raises(UserError, match="step counts: got 2 of them, want 1"):
        _C.step_on_cuda("adam", one, one, [one, one], [0], settings, steps=[*one, *one])
    with pytest.raises(UserError, match="rule: got 'lion', want sgd, adam or lamb"):
        _C.step_on_cuda("lion", one, one, [], [0], settings)
    with pytest.raises(AttributeError, match="speed"):
        _C.StepSettings(speed=1.0)
