"""How far a step is from the least possible time, and its products from the machine's peak."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import torch_ort
from torch_ort import _C
from torch_ort.reports.peaks import Peaks
from torch_ort.reports.products import Product, product
from torch_ort.reports.profile_rows import StepTimes
from torch_ort.reports.roofline import Roofline, count_flops

pytestmark = pytest.mark.ort_only

PEAKS = Peaks({"float32": 4e9, "bfloat16": 8e9}, "avx2, 2 threads")


@pytest.fixture
def given_peaks(monkeypatch) -> list[tuple]:
    """Let the machine have 1 GFLOP/s and copy 2 GB/s, and list what is measured."""
    asked: list[tuple] = []

    def measure_peak(dtype: str, isa: str) -> float:
        asked.append((dtype, isa))
        return 1e9

    def measure_copy(num_bytes: int) -> float:
        asked.append((num_bytes,))
        return 2e9

    monkeypatch.setattr(_C, "measure_peak", measure_peak)
    monkeypatch.setattr(_C, "measure_copy", measure_copy)
    return asked


def step(name: str, microseconds: list[float], *flops: int, calls: int = 1) -> StepTimes:
    products = [Product(1, 10, 20, 30, each) for each in flops]
    return StepTimes(
        0, name, "aten::mm.out", "products", "ATen", False, "model.py:7", 600, 400, "float32",
        products, calls, 4e9, microseconds,
    )  # fmt: skip


class TestArithmetic:
    def test_of_a_step(self):
        one = step("mm", [3.0, 4.0, 50.0], 8000)
        assert one.rate == (pytest.approx(2.0), "GFLOP/s")  # 8,000 in 4 us
        assert one.of_peak == pytest.approx(0.5)
        assert one.lost == pytest.approx(2.0)
        assert one.sizes == "10×20×30"

    def test_of_a_step_with_several_calls_in_a_run(self):
        # A product and what multiplies it by a number; the run in the middle takes 4 us.
        two = step("gemm", [3.0, 1.0, 2.0, 1.0, 30.0, 10.0], 8000, calls=2)
        assert two.per_run == pytest.approx(4.0)
        assert two.of_peak == pytest.approx(0.5)

    def test_of_a_step_without_products(self):
        other = step("add", [1.0])
        assert other.rate == (pytest.approx(1.0), "GB/s")
        assert other.of_peak is None

    def test_of_a_step_that_never_ran(self):
        assert step("mm", [], 8000).of_peak is None

    def test_of_the_whole(self):
        flops = {"float32": 8_000_000, "bfloat16": 4_000_000}
        roofline = Roofline(flops, PEAKS, 3_000_000, 2e9, 0.012, [])
        assert roofline.product_seconds == pytest.approx(0.002 + 0.0005)
        assert roofline.memory_seconds == pytest.approx(0.0015)
        assert roofline.seconds == pytest.approx(0.004)
        assert roofline.ratio == pytest.approx(3.0)

    def test_of_nothing(self):
        assert Roofline({}, Peaks({}, ""), 0, 2e9, 0.012, []).ratio == float("inf")


def test_words():
    slow, fast = step("mm_3", [8000.0], 8_000_000), step("mm", [2.5], 8000)
    flops = {"float32": 8_000_000, "bfloat16": 4_000_000}
    text = str(Roofline(flops, PEAKS, 3 << 20, 2e9, 0.012, [slow, fast]))
    assert text.splitlines() == [
        "roofline: a step took 12.0 ms, 2.95 of the least: 2.50 ms for products (0.01 GFLOP) and "
        "1.57 ms for 3.0 MiB at 2.0 GB/s",
        "  peak of products: 4.0 GFLOP/s of float32 and 8.0 GFLOP/s of bfloat16 (avx2, 2 threads)",
        "  products that lose most against it:",
        "    step  op            product      time  GFLOP/s  of peak     lost  origin",
        "    mm_3  aten::mm.out  10×20×30  8.00 ms      1.0    25.0%  6.00 ms  model.py:7",
        "    mm    aten::mm.out  10×20×30  2.50 µs      3.2    80.0%  0.50 µs  model.py:7",
    ]


def convolution(transposed: bool, groups: int, dims: int = 2) -> tuple[nn.Module, torch.Tensor]:
    kinds = {(False, 2): nn.Conv2d, (True, 2): nn.ConvTranspose2d, (False, 1): nn.Conv1d}
    made = kinds[transposed, dims](4, 8, 3, stride=2, padding=1, groups=groups)
    return made, torch.randn(3, 4, *(11, 9)[:dims], requires_grad=True)


class TestCount:
    """By PyTorch's own formulas, but for what they count twice or not at all."""

    def check(self, run) -> int:
        counter = FlopCounterMode(display=False)
        with counter:
            run()
        ours = count_flops(run)
        assert ours == {"float32": counter.get_total_flops()}
        return ours["float32"]

    def test_matrices(self):
        a, b = torch.randn(4, 5, 6, requires_grad=True), torch.randn(6, 7, requires_grad=True)
        bias = torch.randn(7)
        flat = a.detach().flatten(0, 1)
        assert self.check(lambda: (a @ b).sum().backward()) == 3 * 2 * 4 * 5 * 6 * 7
        assert self.check(lambda: torch.addmm(bias, flat, b)) == 2 * 4 * 5 * 6 * 7
        assert self.check(lambda: torch.bmm(a, a.mT)) == 2 * 4 * 5 * 6 * 5
        assert self.check(lambda: torch.baddbmm(a, a @ a.mT, a)) == 2 * 2 * 4 * 5 * 6 * 5

    @pytest.mark.parametrize("transposed", [False, True])
    def test_convolutions(self, transposed):
        model, x = convolution(transposed, groups=1)
        self.check(lambda: model(x))
        self.check(lambda: model(x).sum().backward())
        self.check(lambda: model(x.detach()).sum().backward())

    def test_a_convolution_of_one_dimension(self):
        model, x = convolution(False, groups=1, dims=1)
        self.check(lambda: model(x).sum().backward())

    @pytest.mark.parametrize("transposed", [False, True])
    def test_groups_of_channels(self, transposed):
        model, x = convolution(transposed, groups=2)
        forward = self.check(lambda: model(x))
        # Each gradient multiplies as many numbers as forward does.
        assert count_flops(lambda: model(x).sum().backward()) == {"float32": 3 * forward}

    @pytest.mark.parametrize("causal", [False, True])
    def test_attention(self, causal):
        query = torch.randn(2, 3, 16, 8, requires_grad=True)

        def run():
            functional.scaled_dot_product_attention(query, query, query, is_causal=causal)

        one = 2 * 2 * 3 * 16 * 16 * 8
        assert count_flops(run) == {"float32": 2 * one // (1 + causal)}

        def train():
            functional.scaled_dot_product_attention(
                query, query, query, is_causal=causal
            ).sum().backward()

        assert count_flops(train) == {"float32": 6 * one // (1 + causal)}

    @pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
    def test_recurrent_layers(self, kind, gates):
        layer = kind(5, 7, num_layers=2, bidirectional=True)
        x, h = torch.randn(6, 2, 5, requires_grad=True), torch.randn(4, 2, 7, requires_grad=True)
        state = (h, torch.randn(4, 2, 7)) if kind is nn.LSTM else h
        widths = (5 + 7) + (14 + 7)  # of inputs and states, by layer
        forward = 2 * 6 * 2 * gates * 7 * 2 * widths
        assert count_flops(lambda: layer(x, state)) == {"float32": forward}
        assert count_flops(lambda: layer(x, state)[0].sum().backward()) == {"float32": 3 * forward}

    def test_dtypes(self):
        a = torch.randn(4, 5)
        with torch.autocast("cpu", torch.bfloat16):
            assert count_flops(lambda: a @ a.mT) == {"bfloat16": 2 * 4 * 5 * 4}
        integers = a.long()
        assert count_flops(lambda: integers @ integers.mT) == {}

    def test_what_is_no_product(self):
        assert count_flops(lambda: torch.randn(4) + 1) == {}
        assert product("mv", [(4, 5), (5,)]) is None

    def test_sizes(self):
        assert product("mm", [(4, 5), (5, 6)]).sizes == "4×5×6"
        assert product("bmm", [(3, 4, 5), (3, 5, 6)]).sizes == "3 of 4×5×6"
        args = [(2, 4, 8, 8), (6, 4, 3, 3), None, [1], [1], [1], False, [0], 1]
        assert product("convolution", args).sizes == "128×36×6"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.BatchNorm1d(256), nn.Linear(256, 64))


class TestExplain:
    def test_a_training_step(self, given_peaks):
        model, x = mlp(), torch.randn(128, 64)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        random = torch.get_rng_state()
        report = torch_ort.explain(model.eval(), x, roofline=True)
        roofline = report.roofline
        assert roofline is not None
        # Two products of 128 x 64 x 256, and two more for each one in backward; not for the input.
        one = 2 * 128 * 64 * 256
        assert roofline.flops == {"float32": 5 * one}
        parameters = sum(p.numel() for p in model.parameters())
        saved = report.graphs[0].plan["saved_bytes"]
        assert roofline.memory_bytes == 4 * (2 * parameters + x.numel()) + saved
        assert roofline.seconds == 5 * one / 1e9 + roofline.memory_bytes / 2e9
        assert roofline.ratio == pytest.approx(roofline.step_seconds / roofline.seconds)
        assert given_peaks == [("float32", ""), (roofline.memory_bytes,)]

        assert {each.flops for each in roofline.products} == {one}
        sizes = ["128×64×256", "128×256×64", "128×64×256", "64×128×256", "256×128×64"]
        assert sorted(each.sizes for each in roofline.products) == sorted(sizes)
        lost = [each.lost for each in roofline.products]
        assert lost == sorted(lost, reverse=True)
        for each in roofline.products:
            assert each.of_peak == pytest.approx(one / 1e9 / (each.per_run / 1e6))

        text = str(report)
        assert re.search(r"roofline: a step took [\d.]+ (s|ms|µs), [\d.]+ of the least: ", text)
        assert "  peak of products: 1.0 GFLOP/s of float32 (" in text
        row = r" 64×128×256 +[\d.]+ (ms|µs) +[\d.]+ +[\d.]+% +-?[\d.]+ (ms|µs)$"
        assert re.search(row, text, re.MULTILINE)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), random)
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_inference(self, given_peaks):
        model, x = nn.Linear(64, 32), torch.randn(16, 64)
        with torch.no_grad():
            report = torch_ort.explain(model, x, roofline=True)
        assert report.roofline is not None
        assert report.roofline.flops == {"float32": 2 * 16 * 64 * 32}
        assert report.roofline.memory_bytes == 4 * (64 * 32 + 32 + 16 * 64)

    def test_what_the_machine_can_do_is_measured(self):
        threads = torch.get_num_threads()
        report = torch_ort.explain(mlp(), torch.randn(32, 64), roofline=True)
        assert report.roofline.peaks.flops["float32"] > 0
        assert report.roofline.bytes_per_second > 0
        assert torch.get_num_threads() == threads

    def test_autocast(self, given_peaks):
        model, x = nn.Linear(64, 32), torch.randn(16, 64)
        with torch.autocast("cpu", torch.bfloat16):
            roofline = torch_ort.explain(model, x, roofline=True).roofline
        assert roofline.flops == {"bfloat16": 2 * 2 * 16 * 64 * 32}
        assert given_peaks[0] == ("bfloat16", "")

    def test_recurrent_layers(self, given_peaks):
        """There is a product for each position, forward and backward."""
        layer = nn.GRU(6, 8)
        report = torch_ort.explain(layer, torch.randn(5, 3, 6), roofline=True)
        sizes = {(each.op, each.sizes) for each in report.roofline.products}
        assert ("torch_ort::recurrent", "5 of 3×8×24") in sizes
        assert ("torch_ort::recurrent_backward", "5 of 3×24×8") in sizes

    def test_no_products(self, given_peaks):
        report = torch_ort.explain(nn.Tanh(), torch.randn(4), roofline=True)
        assert report.roofline.flops == {}
        assert given_peaks == [(16,)]
        assert "peak of products" not in str(report)

    def test_the_instruction_set_that_is_asked_for(self, given_peaks, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_ISA", "portable")
        model, x = nn.Linear(8, 4), torch.randn(2, 8)
        assert "(portable, " in str(torch_ort.explain(model, x, roofline=True))
        assert given_peaks[0] == ("float32", "portable")
        widest = _C.isa_names()[-1]
        text = str(torch_ort.explain(model, x, roofline=True, options={"isa": widest}))
        assert f"({widest}, " in text

    def test_an_unknown_instruction_set(self):
        with pytest.raises(torch_ort.UserError, match="isa: got 'sse9', want one of portable"):
            torch_ort.explain(mlp(), torch.randn(4, 64), roofline=True, options={"isa": "sse9"})

    def test_nothing_is_measured_unless_asked_for(self, given_peaks):
        torch_ort.explain(mlp(), torch.randn(4, 64))
        assert given_peaks == []


def test_steps_for_the_roofline_leave_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    x = torch.randn(4, 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    results = []
    for roofline in (False, True):
        model.load_state_dict(state)
        torch.manual_seed(1)
        torch_ort.explain(model, x, roofline=roofline)
        results.append((model[1].running_mean.clone(), torch.get_rng_state()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
