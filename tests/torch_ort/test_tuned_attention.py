"""Kernels of attention on CUDA that are chosen by timing: which one a graph gets, and when."""

from __future__ import annotations

import json
import logging
import os
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_memory import settled
from emulated import cuda_device
from own_process import run_python
from roads import ROADS, Applies
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_ort
from torch_ort import DebugOptions, ORTModule, UserError
from torch_ort.engine import attention, attention_times, tuning, watchers
from torch_ort.engine.attention import Choice
from torch_ort.engine.attention_times import Call, Layout, Run, time_in_turns

pytestmark = pytest.mark.ort_only

TRAINING, INFERENCE = "tuning_results_training.json", "tuning_results_inference.json"
TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def flash_before_the_others() -> Iterator[None]:
    """Let PyTorch prefer the kernels in one order on all GPUs; on a few it would take cuDNN's."""
    if not torch.cuda.is_available():
        yield
        return
    attention_times.have_order_set(torch.device("cuda", 0))
    order = torch._C._get_sdp_priority_order()
    first = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel([*first, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION], set_priority=True):
        yield
    assert torch._C._get_sdp_priority_order() == order


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a process that has measured and read nothing."""
    for name in ("ENABLE_TUNING", "MAX_TUNING_DURATION_MS", "TUNING_RESULTS_PATH"):
        monkeypatch.delenv(f"ORTMODULE_{name}", raising=False)
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "0")
    monkeypatch.setattr(attention_times, "_HEAD_START_BYTES", 1 << 10)
    tuning.forget()
    yield
    tuning.forget()


class Times:
    """Takes the place of the stopwatch: says how long kernels take, and notes which have run."""

    def __init__(self, us: dict[str, float]) -> None:
        self.us = us
        self.runs: list[str] = []

    def microseconds(self, run: Run) -> float:
        run()
        self.runs.append(run.kernel)
        return self.us[run.kernel]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Let flash be the slower one."""
    made = Times({"flash": 30, "cudnn": 40, "efficient": 20})
    monkeypatch.setattr(attention_times, "Stopwatch", lambda device: made)
    return made


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend="ort", options={"strict": True, **options})


def tuned(function: Callable[..., Any], **options: Any) -> Any:
    return compiled(function, enable_tuning=True, **options)


def count(name: str) -> int:
    return torch_ort.counters()[name]


def attend(x: torch.Tensor, mask: torch.Tensor | None = None, **settings: Any) -> torch.Tensor:
    """Attend in two heads of eight; x is [batch, rows, 48]."""
    query, key, value = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in x.chunk(3, 2))
    settings.setdefault("is_causal", mask is None)
    y = F.scaled_dot_product_attention(query, key, value, mask, **settings)
    return y.transpose(1, 2).flatten(2)


def inputs(
    requires_grad: bool = True, batch: int = 2, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    x = torch.randn(batch, 16, 48, device="cuda", dtype=dtype)
    return x.requires_grad_(requires_grad)


def kernels(call: Callable[..., Any], *args: Any) -> list[str]:
    """Name the kernels of attention in the graphs that a call compiles, in their order."""
    with watchers.watching() as programs:
        result = call(*args)
    if result.requires_grad:
        result.float().square().sum().backward()
    ops = [op for program in programs for _, op, *_ in program.session.steps()]
    start, end = "aten::_scaled_dot_product_", "_attention"
    return [op.removeprefix(start).replace(end, "") for op in ops if op.startswith(start)]


def plant(folder: Path, kernel: str, name: str = INFERENCE) -> dict:
    """Let all choices of the process be for one kernel in a file; forget them, and give those."""
    choices = {
        text: {"kernel": kernel, "us": {"flash": 2, "efficient": 1.5}}
        for text in attention.choices()
    }
    results = [{
        "ep": "torch_ort", "validators": tuning.machine(),
        "results": {"Product": {}, "Attention": choices},
    }]  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(results))
    tuning.forget()
    torch_ort.reset_counters()
    return choices


def in_file(folder: Path, name: str) -> dict:
    (result,) = json.loads((folder / name).read_text())
    return result["results"]["Attention"]


def kind() -> Call:
    """Give the kind of a call with dropout and gradients."""
    layout = Layout((2, 2, 16, 8), (768, 8, 48, 1), torch.bfloat16)
    return Call(layout, layout, layout, None, True, True, False, ("query", "key", "value"))


def in_threads(functions: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fail(monkeypatch: pytest.MonkeyPatch, kernel: str, error: Exception, runs: int = 0) -> None:
    """Let a kernel fail where it is measured, after so many runs."""
    run, left = Run.__call__, [runs]

    def failing(self: Run) -> torch.Tensor:
        if self.kernel == kernel:
            left[0] -= 1
            if left[0] < 0:
                raise error
        return run(self)

    monkeypatch.setattr(Run, "__call__", failing)


class Clock:
    """A clock that runs move, in microseconds."""

    def __init__(self, *runs: tuple[str, list[float]]) -> None:
        self.time = 5.0
        self.order = ""
        self.left = dict(runs)
        self.runs = [Run(kernel, None) for kernel in self.left]

    def now(self) -> float:
        return self.time

    def microseconds(self, run: Run) -> float:
        times = self.left[run.kernel]
        self.order += run.kernel[0]
        us = times.pop(0) if len(times) > 1 else times[0]
        if us < 0:
            raise RuntimeError("it failed")
        self.time += us
        return us

    def in_turns(self, most_ms: float = 0) -> dict[str, float]:
        return time_in_turns(self.runs, most_ms, self.microseconds, self.now)


class TestTimes:
    @pytest.mark.parametrize(
        ("times", "most_ms", "rounds"),
        [
            ((1, 1), 0, 200),
            ((500, 500), 0, 30),  # 30 ms
            ((1e6, 1e6), 0, 6),
            ((10, 10), 1, 50),  # 1 ms
            ((200, 400), 1, 1),  # a second round would end after 1.2 ms
            ((200, 300), 1, 2),
            ((1e6, 1e6), 1, 1),
        ],
    )
    def test_rounds(self, times, most_ms, rounds):
        clock = Clock(("flash", [times[0]]), ("cudnn", [times[1]]))
        assert clock.in_turns(most_ms) == {"flash": times[0], "cudnn": times[1]}
        assert clock.order == "fc" * rounds

    def test_the_fastest_run_counts(self):
        clock = Clock(("flash", [9e3, 7e3, 8e3]), ("cudnn", [5e3, 6e3, 4e3, 5e3]))
        assert clock.in_turns() == {"flash": 7e3, "cudnn": 4e3}
        assert clock.order == "fc" * 8  # five rounds have not been faster than the third

    def test_one_that_fails_is_left_out(self):
        clock = Clock(("flash", [9e3]), ("cudnn", [5e3, -1]), ("efficient", [8e3]))
        assert clock.in_turns() == {"flash": 9e3, "efficient": 8e3}
        assert clock.order == "fce" * 2 + "fe" * 4
        clock = Clock(("flash", [9e3, 9e3, -1]), ("cudnn", [5e3]))
        assert clock.in_turns() == {"cudnn": 5e3}
        assert clock.order == "fc" * 3


@pytest.mark.cuda
class TestChoice:
    @pytest.mark.parametrize("road", ["", "recorder"], ids=["recorder", "aot"])
    @pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
    @pytest.mark.parametrize(
        ("us", "want"),
        [
            ({"flash": 30, "cudnn": 25, "efficient": 20}, "efficient"),
            ({"flash": 30, "cudnn": 20, "efficient": 25}, "cudnn"),
            ({"flash": 20, "cudnn": 25, "efficient": 30}, "flash"),
            ({"flash": 100, "cudnn": 99, "efficient": 98}, "flash"),  # PyTorch's choice
            ({"flash": 100, "cudnn": 96, "efficient": 98}, "cudnn"),
        ],
    )
    def test_the_fastest_runs(self, us, want, grad, road, times):
        times.us = us
        x = inputs(grad)
        call = tuned(attend, disable=road)
        assert kernels(call, x) == ([want, f"{want}_backward"] if grad else [want])
        assert count("attentions_tuned") == 1
        assert count("fallbacks") == 0
        assert count("graphs_recorded") == (not road)
        ((text, choice),) = attention.choices().items()
        assert choice == Choice(want, us)
        assert ("gradients of query key value" in text) is grad
        runs = len(times.runs)
        assert times.runs == ["flash", "cudnn", "efficient"] * (runs // 3)
        # The same kind in another graph.
        assert kernels(tuned(lambda x: attend(x) + 1, disable=road), x)[:1] == [want]
        assert count("attentions_tuned") == 1
        assert len(times.runs) == runs

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("want", ["flash", "cudnn", "efficient"])
    def test_values_and_gradients(self, want, dtype, times):
        times.us[want] = 1
        x = inputs(dtype=dtype)
        call = tuned(attend)
        assert kernels(call, x) == [want, f"{want}_backward"]
        y = call(x)
        x.grad = None
        gradient = torch.randn_like(y)
        y.backward(gradient)
        exact = x.detach().cpu().double().requires_grad_()
        exact_y = attend(exact)
        exact_y.backward(gradient.cpu().double())
        tolerance = 8 * torch.finfo(dtype).eps
        for got, wanted in ((y, exact_y), (x.grad, exact.grad)):
            torch.testing.assert_close(
                got.cpu().double(), wanted, rtol=tolerance, atol=tolerance
            )  # fmt: skip

    def test_by_the_gpus_own_clock(self, caplog):
        caplog.set_level(logging.INFO, "torch_ort.attention")
        kernel, _ = kernels(tuned(attend, max_tuning_duration_ms=1), inputs())
        (choice,) = attention.choices().values()
        assert choice.kernel == kernel
        assert choice.us.keys() == {"flash", "cudnn", "efficient"}
        assert all(us > 0 for us in choice.us.values())
        assert f": {kernel} is used: flash " in caplog.text

    def test_kinds(self, times):
        kernels(tuned(attend), inputs())
        kernels(tuned(attend), inputs(False))
        kernels(tuned(attend), inputs(batch=3))
        kernels(tuned(attend), inputs(dtype=torch.float16))
        kernels(tuned(lambda x: attend(x, is_causal=False)), inputs())
        kernels(tuned(lambda x: attend(x, scale=0.3)), inputs())  # is none
        assert count("attentions_tuned") == 5
        layout = "bfloat16 2x2x16x8 (768,8,48,1)"
        want = f"query {layout}, key {layout}, value {layout}, "
        rest = f"{torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}"
        texts = list(attention.choices())
        assert texts[0] == f"{want}causal, gradients of query key value, {rest}"
        assert texts[1] == f"{want}causal, {rest}"
        assert texts[4] == f"{want}gradients of query key value, {rest}"

    def test_all_that_is_in_a_text(self):
        tensor = Layout((1, 2, 3, 8), (48, 24, 8, 1), torch.float16)
        mask = Layout((3, 3), (0, 1), torch.bool)
        call = Call(tensor, tensor, tensor, mask, True, False, True, ("query",))
        torch.backends.cuda.enable_flash_sdp(False)
        try:
            text = call.text(torch.device("cuda", 0))
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
        assert (
            ", mask bool 3x3 (0,1), dropout, grouped heads, gradients of query, without flash, "
            in text
        )

    @pytest.mark.parametrize("road", ROADS)
    def test_layers_share_a_measuring(self, road, times, monkeypatch):
        monkeypatch.setenv("ORTMODULE_ENABLE_TUNING", "1")

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

            def forward(self, x):
                return x + self.out(attend(self.into(x)))

        model = nn.Sequential(*(Layer() for _ in range(5))).to("cuda", torch.bfloat16)
        x = torch.randn(2, 16, 16, device="cuda", dtype=torch.bfloat16)
        assert kernels(ROADS[road](model), x) == 5 * ["efficient"] + 5 * ["efficient_backward"]
        assert count("attentions_tuned") == count("graphs_recorded") == 1
        assert times.runs.count("flash") < 250

    def test_attention_that_python_of_pytorch_calls(self, times):
        model = nn.MultiheadAttention(16, 2, batch_first=True, device="cuda", dtype=torch.bfloat16)
        config = {"enable_tuning": True, "strict": True}
        ours = ORTModule(model, DebugOptions(config=config))
        # With more in a batch, the layouts of results differ.
        x = torch.randn(1, 16, 16, device="cuda", dtype=torch.bfloat16)
        assert kernels(lambda: ours(x, x, x, need_weights=False)[0])[:1] == ["efficient"]

    def test_under_autocast(self, times):
        x = inputs(dtype=torch.float32)
        call = tuned(attend)
        with torch.autocast("cuda", torch.bfloat16):
            assert kernels(call, x) == ["efficient", "efficient_backward"]
        (text,) = attention.choices()
        assert text.startswith("query bfloat16 ")

    @pytest.mark.parametrize("state", [torch.no_grad, torch.inference_mode])
    def test_without_gradients(self, state, times):
        with state():
            assert kernels(tuned(attend), inputs()) == ["efficient"]

    @pytest.mark.hands_over("Dynamo makes an operator of checkpoint that takes a graph")
    @pytest.mark.parametrize("road", ROADS)
    def test_recomputed_in_backward(self, road, times, monkeypatch):
        monkeypatch.setenv("ORTMODULE_ENABLE_TUNING", "1")

        def call(x):
            return torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=False)

        got = kernels(ROADS[road](Applies(call)), inputs())
        assert {*got} == {"efficient", "efficient_backward"}
        assert count("attentions_tuned") == 1

    @pytest.mark.parametrize("road", ["", "recorder"], ids=["recorder", "aot"])
    def test_dynamic_sizes(self, road, times):
        call = tuned(attend, disable=road)
        for batch in (2, 5, 3):
            x = inputs(batch=batch)
            torch._dynamo.mark_dynamic(x, 0)
            got = call(x)
            got.sum().backward()
            torch.testing.assert_close(got, attend(x), rtol=2e-2, atol=2e-2)
        assert count("graphs_captured") == count("attentions_tuned") == 1
        ((text, choice),) = attention.choices().items()
        assert text.startswith("query bfloat16 2x2x16x8 ")
        assert choice.kernel == "efficient"

    def test_masks(self, times):
        """Flash takes none: without cuDNN there is nothing to choose from."""
        mask = torch.ones(16, 16, dtype=torch.bool, device="cuda").tril()
        bias = torch.randn(16, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            for each in (mask, bias):
                got = kernels(tuned(attend), inputs(), each)
                assert got == ["efficient", "efficient_backward"]
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)
        assert count("attentions_tuned") == 0
        assert attention.choices() == {}
        assert times.runs == []

    def test_one_kernel_can_run(self, times):
        assert kernels(tuned(attend), inputs(dtype=torch.float32))[:1] == ["efficient"]
        assert kernels(tuned(attend), inputs(dtype=torch.float64)) == []
        assert count("attentions_tuned") == 0
        assert times.runs == []

    def test_empty_tensors_and_other_dims(self, times):
        def three(q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

        x = torch.randn(4, 16, 8, device="cuda", dtype=torch.bfloat16)
        tuned(three)(x, x, x)
        tuned(three)(*3 * [x[None, :, :0]])
        assert count("attentions_tuned") == 0

    def test_one_whose_result_lies_otherwise_is_left_out(self, times, caplog):
        caplog.set_level(logging.INFO, "torch_ort.attention")

        def view(q, k, v):
            return F.scaled_dot_product_attention(q, k, v).view(2, -1)

        qkv = [torch.randn(2, 2, 16, 8, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        assert kernels(tuned(view), *qkv) == ["flash"]
        got = "got (256, 8, 16, 1), want (256, 128, 8, 1)"
        assert f"efficient is left out: strides of its result: {got}" in caplog.text
        assert "efficient" not in times.runs

    def test_threads_that_meet_at_one_kind(self, times):
        together, got = threading.Barrier(3), []

        def run() -> None:
            together.wait()
            got.append(attention.kernel_for(kind(), torch.device("cuda", 0), 0))

        in_threads(3 * [run])
        assert got == 3 * ["efficient"]
        assert count("attentions_tuned") == 1

    def test_threads_that_capture(self, times):
        calls = [tuned(attend, opset=17 + i) for i in range(3)]
        x, results = inputs(False), []
        in_threads([lambda call=call: results.append(call(x)) for call in calls])
        assert count("attentions_tuned") == 1
        assert len(results) == 3
        assert all(torch.equal(each, results[0]) for each in results)

    def test_explain(self, times):
        options = {"enable_tuning": True, "strict": True}
        text = str(torch_ort.explain(attend, inputs(False), options=options))
        assert "kernels of attention: 1 kinds of attention were timed, for 0 a file names" in text


@pytest.mark.cuda
class TestSettings:
    def test_tuning_is_off(self, times, tmp_path):
        call = compiled(attend, tuning_results_path=str(tmp_path))
        assert kernels(call, inputs()) == ["flash", "flash_backward"]
        assert attention.choices() == {}
        assert times.runs == []
        assert count("attentions_tuned") == count("attentions_loaded") == 0
        assert list(tmp_path.iterdir()) == []

    def test_what_the_process_has_chosen(self, times):
        kernels(tuned(attend), inputs())
        assert kernels(compiled(attend), inputs()) == ["efficient", "efficient_backward"]
        assert kernels(compiled(attend), inputs(batch=3)) == ["flash", "flash_backward"]
        assert count("attentions_tuned") == 1

    def test_kernels_that_are_not_allowed(self, times):
        times.us = {"flash": 1, "cudnn": 2, "efficient": 3}
        torch.backends.cuda.enable_flash_sdp(False)
        try:
            assert kernels(tuned(attend), inputs())[:1] == ["cudnn"]
            torch.backends.cuda.enable_cudnn_sdp(False)
            assert kernels(tuned(attend), inputs())[:1] == ["efficient"]
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
            torch.backends.cuda.enable_cudnn_sdp(True)
        assert "flash" not in times.runs
        assert kernels(tuned(attend), inputs())[:1] == ["flash"]
        assert count("attentions_tuned") == 2  # with one kernel there was nothing to time

    @pytest.mark.parametrize(
        ("backend", "want"),
        [
            (SDPBackend.CUDNN_ATTENTION, ["cudnn"]),
            (SDPBackend.FLASH_ATTENTION, ["flash"]),
            (SDPBackend.EFFICIENT_ATTENTION, ["efficient"]),
            (SDPBackend.MATH, []),
        ],
    )
    def test_a_context_around_the_call(self, backend, want, times):
        def inside(x):
            with sdpa_kernel(backend):
                return attend(x)

        x = inputs(False)
        for us in (1, 1000):
            tuning.forget()
            times.us["flash"] = us
            kernels(tuned(attend), x)
            with sdpa_kernel(backend):
                assert kernels(tuned(attend), x) == want
            assert kernels(tuned(inside), x) == want

    def test_the_users_order(self, times):
        """It says which kernel stays where no other is clearly faster."""
        times.us = {"flash": 99, "cudnn": 99, "efficient": 100}
        backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
        with sdpa_kernel(backends, set_priority=True):
            order = torch._C._get_sdp_priority_order()
            assert kernels(tuned(attend), inputs(False)) == ["efficient"]
            assert torch._C._get_sdp_priority_order() == order
        assert times.runs[:2] == ["efficient", "flash"]  # cuDNN is not allowed

    @pytest.mark.parametrize(
        "options", [{"disable": "choose_attention"}, {"disable": "own_kernels"},
                    {"enable_compute_optimizer": False}], ids=str
    )  # fmt: skip
    def test_the_bits_of_eager_pytorch(self, options, times):
        kernels(tuned(attend), inputs(False))
        assert kernels(tuned(attend, **options), inputs(False)) == ["flash"]

    def test_deterministic_algorithms(self, times):
        torch.use_deterministic_algorithms(True)
        try:
            assert kernels(tuned(attend), inputs(False)) == ["flash"]
        finally:
            torch.use_deterministic_algorithms(False)
        assert times.runs == []

    @pytest.mark.parametrize("exact", [False, True])
    def test_dropout(self, exact, times):
        def drop(x):
            return attend(x, dropout_p=0.5)

        got = kernels(tuned(drop, exact_random=exact), inputs())
        assert got[:1] == (["flash"] if exact else ["efficient"])
        assert count("attentions_tuned") == (not exact)
        # Without dropout no numbers are drawn.
        assert kernels(tuned(attend, exact_random=exact), inputs())[:1] == ["efficient"]

    @pytest.mark.parametrize("fastest", ["flash", "cudnn", "efficient"])
    def test_all_kernels_drop(self, fastest, times):
        times.us[fastest] = 1
        got = kernels(tuned(lambda x: attend(x, dropout_p=0.5), exact_random=False), inputs())
        assert got == [fastest, f"{fastest}_backward"]
        assert count("graphs_recorded") == 1

    @pytest.mark.parametrize("road", ROADS)
    @pytest.mark.parametrize("dropout_p", [0.0, 0.5])
    def test_random_streams_go_on(self, dropout_p, road, times, monkeypatch):
        def drop(x):
            return attend(x, dropout_p=dropout_p)

        def numbers() -> list[list[float]]:
            return [torch.rand(5, device=device).tolist() for device in ("cpu", "cuda")]

        x = inputs()
        times.us["flash"] = 1
        results = []
        for tuning_is_on in "01":
            monkeypatch.setenv("ORTMODULE_ENABLE_TUNING", tuning_is_on)
            torch.compiler.reset()
            torch.manual_seed(3)
            y = ROADS[road](Applies(drop))(x)
            results.append((y.tolist(), numbers()))
        assert count("attentions_tuned") == 1
        assert results[0] == results[1]

    def test_memory_is_given_back(self, times):
        before = settled()
        assert attention.kernel_for(kind(), torch.device("cuda", 0), 0) == "efficient"
        assert settled() == before


@pytest.mark.cuda
class TestFailures:
    @pytest.mark.parametrize("runs", [0, 3], ids=["at first", "later"])
    @pytest.mark.parametrize(
        "error", [RuntimeError("no kernel image"), torch.OutOfMemoryError("out of memory")],
        ids=["error", "memory"],
    )  # fmt: skip
    def test_one_that_fails_is_left_out(self, error, runs, times, monkeypatch, caplog):
        caplog.set_level(logging.INFO, "torch_ort.attention")
        fail(monkeypatch, "efficient", error, runs)
        assert kernels(tuned(attend), inputs()) == ["flash", "flash_backward"]
        words = f"attention: efficient is left out: {type(error).__name__}: {error}"
        assert words in caplog.text
        assert count("fallbacks") == 0

    @pytest.mark.parametrize("runs", [0, 3], ids=["at first", "later"])
    def test_what_pytorch_chooses_fails(self, runs, times, monkeypatch, caplog):
        caplog.set_level(logging.INFO, "torch_ort.attention")
        fail(monkeypatch, "flash", RuntimeError("no kernel image"), runs)
        assert kernels(tuned(attend), inputs()) == ["flash", "flash_backward"]
        assert "RuntimeError: no kernel image" in caplog.text
        assert attention.choices() == {}
        assert count("attentions_tuned") == count("fallbacks") == 0

    def test_no_memory_to_try(self, monkeypatch, caplog):
        caplog.set_level(logging.INFO, "torch_ort.attention")
        monkeypatch.setattr(attention_times, "_HEAD_START_BYTES", 1 << 55)
        before = torch._C._get_sdp_priority_order()
        assert kernels(tuned(attend), inputs())[:1] == ["flash"]
        assert "attention: nothing is measured: OutOfMemoryError: " in caplog.text
        assert torch._C._get_sdp_priority_order() == before


@pytest.mark.cuda
class TestFiles:
    @pytest.mark.parametrize("road", ["", "recorder"], ids=["recorder", "aot"])
    @pytest.mark.parametrize("name", [TRAINING, INFERENCE])
    @pytest.mark.parametrize("enable_tuning", [False, True])
    @pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
    def test_what_a_file_says_is_done(self, kernel, enable_tuning, name, road, tmp_path, times):
        x = inputs()
        kernels(tuned(attend), x)
        plant(tmp_path, kernel, name)
        settings = {"tuning_results_path": str(tmp_path), "enable_tuning": enable_tuning}
        got = kernels(compiled(attend, disable=road, **settings), x)
        assert got == [kernel, f"{kernel}_backward"]
        assert count("attentions_loaded") == 1
        assert count("attentions_tuned") == count("fallbacks") == 0

    def test_a_kernel_that_cannot_run_is_not_used(self, tmp_path, times):
        """Flash takes no float32, whatever was loaded."""
        x = inputs(dtype=torch.float32)
        layout = Layout((2, 2, 16, 8), (768, 8, 48, 1), x.dtype)
        call = Call(layout, layout, layout, None, False, True, False, ())
        attention.load_choices({call.text(x.device): Choice("flash", {})})
        assert kernels(compiled(attend), x.detach()) == ["efficient"]
        assert count("attentions_loaded") == 1

    def test_pytorch_sets_its_order_first(self, times, monkeypatch):
        asked = []

        def kernel_of(*args, **kwargs):
            asked.append(torch._C._get_sdp_priority_order())

        monkeypatch.setattr(attention_times, "kernel_of", kernel_of)
        monkeypatch.setattr(attention, "_is_order_set", False)
        order, device = torch._C._get_sdp_priority_order(), torch.device("cuda", 0)
        attention.load_choices({kind().text(device): Choice("efficient", {})})
        for _ in range(2):
            assert attention.kernel_for(kind(), device, None) == "efficient"
        assert asked == [order]

    @pytest.mark.parametrize(("grad", "name"), [(True, TRAINING), (False, INFERENCE)])
    def test_written_after_the_first_run(self, grad, name, tmp_path, times):
        folder = tmp_path / "not" / "there"
        kernels(tuned(attend, tuning_results_path=str(folder)), inputs(grad))
        want = {"kernel": "efficient", "us": {"flash": 30, "cudnn": 40, "efficient": 20}}
        assert in_file(folder, name) == dict.fromkeys(attention.choices(), want)
        torch_ort.reset_counters()
        tuning.forget()
        kernels(tuned(attend, tuning_results_path=str(folder)), inputs(grad))
        assert count("attentions_tuned") == 0
        assert count("attentions_loaded") == 1

    def test_other_choices_stay(self, tmp_path, times):
        kernels(tuned(attend), inputs(False))
        before = plant(tmp_path, "flash")
        kernels(tuned(attend, tuning_results_path=str(tmp_path)), inputs(False, batch=3))
        after = in_file(tmp_path, INFERENCE)
        assert len(after) == 2
        assert before.items() <= after.items()

    def test_a_file_without_attention(self, tmp_path, times):
        result = {"ep": "torch_ort", "validators": tuning.machine(), "results": {"Product": {}}}
        (tmp_path / INFERENCE).write_text(json.dumps([result]))
        call = tuned(attend, tuning_results_path=str(tmp_path))
        assert kernels(call, inputs(False)) == ["efficient"]
        assert len(in_file(tmp_path, INFERENCE)) == 1

    @pytest.mark.hands_over("one of the roads is AOTAutograd's")
    @pytest.mark.parametrize("strict", [True, False])
    def test_a_wrong_file(self, strict, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", str(int(strict)))
        (tmp_path / INFERENCE).write_text("")
        words = f"tuning_results_path: .*{INFERENCE}: no JSON: .*; delete the file, or name another"
        inputs()  # CUDA is in use
        for road in ("", "recorder"):
            settings = {"tuning_results_path": str(tmp_path), "strict": strict, "disable": road}
            with pytest.raises(Exception, match=words):
                compiled(attend, **settings)(inputs())
            module = ORTModule(nn.Linear(8, 8).cuda(), DebugOptions(config=settings))
            with pytest.raises(UserError, match=words):
                module(torch.randn(2, 8, device="cuda"))
        assert count("fallbacks") == count("recordings_handed_over") == 0


PROCESS = """
    import os
    import sys

    if sys.argv[2] == "emulated":
        from emulated import cuda_device

        cuda_device.activate()
        cuda_device.use_driver()
    import torch
    import torch.nn.functional as F
    import torch_ort
    from torch_ort.engine import attention_times

    times = {"flash": 30, "cudnn": 40, "efficient": 20}
    attention_times.Stopwatch.microseconds = lambda self, run: (run(), times[run.kernel])[1]
    attention_times._HEAD_START_BYTES = 1
    x = torch.randn(2, 16, 2, 8, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    torch.compile(F.scaled_dot_product_attention, backend="ort")(x, x, x)
    counters = torch_ort.counters()
    print(*(counters[name] for name in ("attentions_tuned", "attentions_loaded", "fallbacks")))
"""


def in_process(folder: Path, enable_tuning: bool) -> list[int]:
    """Give attentions tuned, attentions loaded, and fallbacks."""
    environment = {
        **os.environ,
        "ORTMODULE_ENABLE_TUNING": str(int(enable_tuning)),
        "ORTMODULE_TUNING_RESULTS_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
    }
    device = "emulated" if cuda_device.is_active() else "gpu"
    done = run_python("-c", textwrap.dedent(PROCESS), folder, device, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [int(each) for each in done.stdout.split()]


@pytest.mark.cuda
def test_processes(tmp_path):
    assert in_process(tmp_path, True) == [1, 0, 0]
    (choice,) = in_file(tmp_path, INFERENCE).values()
    assert choice == {"kernel": "efficient", "us": {"flash": 30, "cudnn": 40, "efficient": 20}}
    assert in_process(tmp_path, False) == [0, 1, 0]
    assert in_process(tmp_path, True) == [0, 1, 0]


def choice_of(kernel: object = "flash", us: object = None) -> dict:
    return {"x": {"kernel": kernel, "us": {"flash": 1} if us is None else us}}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], "results: want an object 'Attention'"),
        ({"x": 3}, "'x': got 3, want kernel, us"),
        ({"x": {"kernel": "flash"}}, "'x': got .*, want kernel, us"),
        (choice_of("math"), "'x': kernel: got 'math', want cudnn, efficient or flash"),
        (choice_of([]), r"'x': kernel: got \[\], want cudnn, efficient or flash"),
        (choice_of(us={"mine": 3}), "'x': kernel: got 'mine', want cudnn, efficient or flash"),
        (choice_of(us=3), "'x': got 3, want microseconds by kernel"),
        (choice_of(us={"flash": "1"}), "'x': got '1', want microseconds"),
        (choice_of(us={"flash": True}), "'x': got True, want microseconds"),
        (choice_of(us={"flash": -1}), "'x': got -1, want microseconds"),
    ],
)
def test_what_is_no_choice(found, words, tmp_path):
    results = {"Product": {}, "Attention": found}
    result = {"ep": "torch_ort", "validators": tuning.machine(), "results": results}
    (tmp_path / TRAINING).write_text(json.dumps([result]))
    whole = f"tuning_results_path: .*{TRAINING}: {words}.*; delete the file, or name another folder"
    with pytest.raises(UserError, match=whole):
        tuning.read(str(tmp_path))
    assert attention.choices() == {}
