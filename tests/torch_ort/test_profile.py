"""`torch_ort.profile`: the table, the trace, the page, and that the model comes out unchanged."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from late_group import NAME, late_group, start, wait
from models import module_with
from torch import nn

import torch_ort
from torch_ort import _C
from torch_ort.engine import watchers
from torch_ort.fallback import FallbackWarning
from torch_ort.pytorch import dynamo_compat
from torch_ort.read.fx_reader import FxReader
from torch_ort.reports.profile_rows import hidden_part
from torch_ort.reports.tables import time_text

pytestmark = pytest.mark.ort_only

BROWSERS = (
    "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome",
)  # fmt: skip
VOID_TAGS = {"meta", "link", "img", "br", "input", "rect"}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.project = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(self.norm(x)).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(2, 5, 16))


def profile(model, *inputs, steps=2, **settings) -> torch_ort.Profile:
    return torch_ort.profile(model, *inputs, steps=steps, **settings)


def step_named(result: torch_ort.Profile, name: str):
    (step,) = [step for step in result.steps if step.name == name]
    return step


class Page(HTMLParser):
    """Reads a page; its tags must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.text, self.attributes, self.tags = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


class TestTable:
    def test_each_step_of_a_training_step_has_a_row(self):
        model = mlp()
        result = profile(model, torch.randn(4, 6), steps=3)
        (graph,) = result.graphs
        assert graph.is_training
        assert len(result.wall) == 3
        assert not result.fallbacks
        counts = {step.name: len(step.microseconds) for step in result.steps}
        assert set(counts.values()) <= {0, 3}
        # What the plan runs has been timed; the rest are views that were made with the plan.
        plan = graph.plan
        timed = sum(count > 0 for count in counts.values())
        assert timed == plan["steps_forward"] + plan["steps_backward"]
        assert {step.kind for step in result.steps if not step.microseconds} <= {"views"}
        lines = str(result).splitlines()
        for name, count in counts.items():
            assert sum(f" {name} " in line for line in lines) == (count > 0), name
        words = f"and {len(counts) - timed} views that cost nothing: they were made once, with the"
        assert any(line.startswith(words) for line in lines)

    def test_what_a_row_says(self):
        result = profile(mlp(), torch.randn(4, 6))
        product = step_named(result, "addmm")
        assert (product.kind, product.where, product.half) == ("products", "native", "forward")
        assert product.read_bytes == 4 * (4 * 6 + 6 * 8 + 8)
        assert product.written_bytes == 4 * 4 * 8
        assert product.flops == 2 * 4 * 6 * 8
        rate, unit = product.rate
        assert unit == "GFLOP/s"
        assert rate == pytest.approx(product.flops / product.median / 1e3)
        assert 0 < product.min <= product.median

        region = next(step for step in result.steps if step.name.startswith("gelu_to_native"))
        assert (region.kind, region.where) == ("regions", "region")
        assert region.read_bytes == 4 * (4 * 8 + 8 + 8)
        assert region.rate[1] == "GB/s"
        assert step_named(result, "mm").half == "backward"
        head = next(line for line in str(result).splitlines() if line.startswith("graph"))
        assert re.split(r"\s{2,}", head) == [
            "graph", "half", "step", "kind", "where", "op", "count", "min", "median",
            "share", "read", "written", "rate", "of peak", "product", "origin",
        ]  # fmt: skip

    def test_products_are_held_against_the_peak(self, monkeypatch):
        monkeypatch.setattr(_C, "measure_peak", lambda dtype, isa: 1e9)
        result = profile(mlp(), torch.randn(4, 6))
        product = step_named(result, "addmm")
        assert product.sizes == "4×6×8"
        assert product.of_peak == pytest.approx(product.flops / 1e9 / (product.median / 1e6))
        judged = [step for step in result.steps if step.of_peak is not None]
        assert {step.kind for step in judged} == {"products"}
        least = sum(step.flops for step in judged) / 1e9
        assert result.of_peak == pytest.approx(least / sum(step.median / 1e6 for step in judged))
        line = str(result).splitlines()[1]
        assert re.fullmatch(
            r"products at [\d.]+% of the peak: 1\.0 GFLOP/s of float32 \(\w+, \d threads?\)", line
        )
        (row,) = [line for line in str(result).splitlines() if " addmm " in line]
        assert f"{product.of_peak:.1%}  4×6×8" in row

    def test_open_sizes_are_those_of_the_run(self):
        x = torch.randn(4, 6)
        torch._dynamo.mark_dynamic(x, 0)
        assert step_named(profile(mlp(), x), "addmm").sizes == "4×6×8"

    def test_convolutions_are_products(self):
        model = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        result = profile(model, torch.randn(3, 4, 8, 8, requires_grad=True))
        one = 2 * 3 * 8 * 8 * 9 * 4 * 8
        assert step_named(result, "convolution").flops == one
        assert step_named(result, "convolution_backward").flops == 2 * one
        assert step_named(result, "convolution_backward").sizes == "2 of 192×36×8"

    def test_without_products_no_peak_is_measured(self, monkeypatch):
        monkeypatch.delattr(_C, "measure_peak")
        result = profile(nn.Tanh(), torch.randn(4))
        assert result.of_peak is None
        assert "of the peak" not in str(result)

    def test_a_copy_moves_bytes_and_a_view_none(self):
        result = profile(lambda x: x.t().reshape(24) + 1, torch.randn(4, 6))
        view, copy = step_named(result, "t"), step_named(result, "clone")
        assert (view.kind, view.read_bytes, view.written_bytes) == ("views", 0, 0)
        assert (copy.kind, copy.read_bytes, copy.written_bytes) == ("other", 4 * 24, 4 * 24)

    def test_shares_and_sums_make_up_the_whole(self):
        result = profile(mlp(), torch.randn(4, 6))
        assert sum(result.kinds.values()) + sum(result.outside.values()) == pytest.approx(
            sum(result.wall)
        )
        assert sum(result.kinds.values()) == pytest.approx(sum(s.total for s in result.steps))
        assert 0 < sum(map(result.share, result.kinds.values())) < 1

    def test_origins_are_lines_of_the_model(self):
        result = profile(Attention(), torch.randn(2, 5, 16))
        lines = {step.origin for step in result.steps if step.origin.startswith("test_profile.py:")}
        assert len(lines) == 3  # of forward
        for step in result.steps:
            assert step.origin in lines, step.name

    @pytest.mark.parametrize("wrap", [torch_ort.profile, torch_ort.ORTModule])
    def test_a_gradient_has_the_line_that_it_is_of(self, wrap):
        class TwoLines(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 5)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                return self.second(x)

        with watchers.watching() as programs:
            if wrap is torch_ort.profile:
                wrap(TwoLines(), torch.randn(4, 6), steps=1)
            else:
                wrap(TwoLines())(torch.randn(4, 6)).sum().backward()
        start = TwoLines.forward.__code__.co_firstlineno
        steps = programs[0].session.steps()
        products = [
            (backward, origin) for _, op, _, backward, origin in steps
            if op in ("aten::addmm.out", "aten::mm.out")
        ]  # fmt: skip
        first, second = (f"test_profile.py:{start + line}" for line in (1, 2))
        assert products == [(False, first), (False, second)] + 2 * [(True, second)] + [
            (True, first)
        ]

    def test_a_transformer(self):
        result = profile(Attention(), torch.randn(2, 5, 16))
        kinds = {step.kind for step in result.steps if step.microseconds}
        assert kinds >= {"products", "attention", "regions"}
        attention = [step for step in result.steps if step.kind == "attention"]
        assert {step.half for step in attention} == {"forward", "backward"}
        assert {step.where for step in attention} <= {"native", "ATen"}
        assert all(step.written_bytes > 0 for step in attention)
        # Two products of 5 by 5 by 8 for each of four heads, and four backward; half is masked.
        one = 2 * 4 * 5 * 5 * 8
        assert {step.half: step.flops for step in attention} == {
            "forward": 2 * one // 2, "backward": 4 * one // 2
        }  # fmt: skip
        assert step_named(result, "attention").sizes == "8 of 5×8×5"

    @pytest.mark.usefixtures("few_registers")
    def test_gradients_of_the_weights_of_convolutions(self):
        layers = [(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(3)]
        wide = nn.Conv2d(16, 16, 7, padding=3, groups=16)
        model = nn.Sequential(*itertools.chain(*layers), wide, nn.Conv2d(16, 16, 3, padding=1))
        result = profile(model, torch.randn(2, 16, 9, 8))
        places = 2 * 9 * 8
        dense = [each for each in result.steps if "ConvolutionWeightGrad" in each.op]
        assert len(dense) == 4
        assert {each.sizes for each in dense} == {f"{places}×{16 * 9}×16"}
        (depthwise,) = [each for each in result.steps if "DepthwiseWeightGrad" in each.op]
        assert depthwise.sizes == f"16 of {places}×49×1"
        for each in (*dense, depthwise):
            assert (each.kind, each.where, each.half) == ("products", "native", "backward")
        assert {each.flops for each in dense} == {2 * places * 16 * 9 * 16}
        assert depthwise.flops == 2 * places * 16 * 49

    @pytest.mark.usefixtures("few_registers")
    def test_convolutions_of_each_channel(self):
        each = nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16)
        model = nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), each, nn.Conv2d(16, 16, 1))
        result = profile(model, torch.randn(2, 16, 9, 8))
        places = 2 * 5 * 4
        found = [each for each in result.steps if "DepthwiseConvolution" in each.op]
        assert [each.half for each in found] == ["forward", "backward"]
        for each in found:
            assert (each.kind, each.where) == ("products", "native")
            assert each.sizes == f"16 of {places}×9×1"
            assert each.flops == 2 * places * 16 * 9

    @pytest.mark.usefixtures("few_registers")
    def test_other_convolutions(self):
        halved = nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=2)
        doubled = nn.ConvTranspose2d(32, 16, 2, stride=2)
        model = nn.Sequential(
            nn.Conv2d(16, 32, 1), nn.ReLU(), halved, nn.ReLU(), doubled, nn.ReLU(),
            nn.Conv2d(16, 16, 1),
        )  # fmt: skip
        result = profile(model, torch.randn(2, 16, 9, 8))
        places = 2 * 5 * 4
        found = [each for each in result.steps if "torch_ort.Convolution" in each.op]
        found = [each for each in found if "Weight" not in each.op]
        assert [each.half for each in found] == ["forward", "forward", "backward", "backward"]
        for each, sizes in zip(found, ["2 of {}×144×16", "{}×64×32", "{}×64×32", "2 of {}×144×16"],
                               strict=True):  # fmt: skip
            assert (each.kind, each.where) == ("products", "native")
            assert each.sizes == sizes.format(places)
            assert each.flops == 2 * places * (2 * 144 * 16 if "144" in sizes else 64 * 32)

    def test_convolutions_that_multiply_less(self):
        layers = [(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(3)]
        result = profile(nn.Sequential(*itertools.chain(*layers)), torch.randn(3, 32, 9, 8))
        tiles = 3 * 5 * 4
        both = [each for each in result.steps if "WinogradConvolution" in each.op]
        gradients = [each for each in result.steps if "WinogradWeightGrad" in each.op]
        # The image that is given needs no gradient.
        assert [len(both), len(gradients)] == [5, 3]
        assert {each.sizes for each in both} == {f"16 of {tiles}×32×32"}
        assert {each.sizes for each in gradients} == {f"16 of 32×{tiles}×32"}
        for each in (*both, *gradients):
            assert (each.kind, each.where) == ("products", "native")
            assert each.flops == 2 * 16 * tiles * 32 * 32

    def test_inference(self):
        with torch.no_grad():
            result = profile(mlp(), torch.randn(4, 6))
        assert not result.graphs[0].is_training
        assert {step.half for step in result.steps} == {"forward"}
        assert all(step.total > 0 for step in result.steps if step.kind == "products")

    def test_a_function_whose_input_asks_for_a_gradient(self):
        x = torch.randn(4, 6, requires_grad=True)
        result = profile(lambda x: x.sin().mm(x.t()).cos(), x)
        assert {step.half for step in result.steps if step.microseconds} == {"forward", "backward"}
        assert x.grad is None

    def test_graphs_with_steps_of_equal_names_are_told_apart(self):
        class Broken(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 600)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                torch._dynamo.graph_break()
                return self.second(x)

        result = profile(Broken(), torch.randn(4, 6))
        products = [step for step in result.steps if step.name == "addmm"]
        assert sorted(step.flops for step in products) == [2 * 4 * 6 * 8, 2 * 4 * 8 * 600]
        assert [len(step.microseconds) for step in products] == [2, 2]
        backward = [step for step in result.steps if step.name == "mm"]
        assert [len(step.microseconds) for step in backward] == [2, 2]

    def test_autocast_is_around_the_model_alone(self):
        class Tagger(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.recurrent = nn.LSTM(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.recurrent(x)[0].float().sum()

        # Of such a graph only a backward outside of autocast is known.
        with torch.autocast("cpu", torch.bfloat16):
            profile = torch_ort.profile(Tagger(), torch.randn(5, 2, 8), steps=1)
        assert "torch_ort::recurrent_backward" in {step.op for step in profile.steps}

    def test_a_model_that_is_compiled_already(self):
        model = torch.compile(mlp(), backend="ort")
        assert step_named(profile(model, torch.randn(4, 6)), "addmm").microseconds

    @pytest.mark.skipif(
        not dynamo_compat.COMPILED_APART,
        reason="torch.compile counts all that is compiled of a function",
    )
    def test_often(self):
        model, x = mlp(), torch.randn(4, 6)
        limit = torch._dynamo.config.recompile_limit
        for _ in range(limit + 1):
            assert profile(model, x, steps=1).graphs
        torch.compile(model, backend="ort")(x)  # has the whole limit to itself

    def test_many_steps_are_summed_up(self):
        layers = [layer for _ in range(12) for layer in (nn.Linear(6, 6), nn.GELU())]
        text = str(profile(nn.Sequential(*layers), torch.randn(4, 6), steps=1))
        assert re.search(
            r"^and \d+ more steps: [\d.]+ (µs|ms) per step, \d+\.\d%$", text, re.MULTILINE
        )


class Split(nn.Module):
    """A layer whose result is summed over ranks while another one computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flying = start("all_reduce", self.first(x), "sum")
        return self.second(x).tanh() + wait(flying)


def gathered(x: torch.Tensor) -> torch.Tensor:
    return sum(wait(each) for each in start("all_gather_into_tensor_coalesced", [x + 1, x * x], 2))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
class TestCollectives:
    @pytest.fixture(autouse=True)
    def group(self):
        with late_group():
            yield

    def test_what_is_hidden_behind_other_work(self):
        result = profile(Split(), torch.randn(8, 16), steps=3)
        it, gradient = result.collectives
        assert gradient.start.half == "backward"
        assert (it.start.kind, it.start.half, it.group) == ("collectives", "forward", NAME)
        assert [each.kind for each in it.waits] == ["collectives"]
        assert it.num_bytes == 8 * 16 * 4
        assert [each.run for each in it.flights] == [0, 1, 2]
        for each in it.flights:
            assert 0 < each.beside_products <= each.length - each.waited
            assert each.waited > 0
            assert 0 < each.begin < each.begin + each.length < result.wall[each.run]
        whole, waited = (
            sum(getattr(flight, name) for flight in it.flights) for name in ("length", "waited")
        )
        assert it.hidden == pytest.approx(1 - waited / whole)
        of_both = hidden_part(it.flights + gradient.flights)
        lines = str(result).splitlines()
        assert lines[2].startswith("2 collective(s), ")
        assert lines[2].endswith(f"of which {of_both:.1%} are hidden behind other work")
        (row,) = [line for line in lines if line.startswith(f"{it.start.name} ") and NAME in line]
        assert f"{it.hidden:.1%}" in row
        assert "512 B" in row

    def test_one_with_several_results_is_in_flight_until_the_last_wait(self):
        result = profile(gathered, torch.randn(8, 16))
        (it,) = result.collectives
        assert len(it.waits) == 2
        assert it.num_bytes == 2 * 2 * 8 * 16 * 4
        for each in it.flights:
            waits = [bar for bar in result.bars if any(bar.step is wait for wait in it.waits)]
            if each.run == result.bars_of:
                end = max(bar.start + bar.length for bar in waits)
                assert each.begin + each.length == pytest.approx(end)
                assert each.waited == pytest.approx(sum(bar.length for bar in waits))

    def test_many_are_cut_short(self):
        def function(x: torch.Tensor) -> torch.Tensor:
            for _ in range(42):
                x = wait(start("all_reduce", x * 2, "sum")) / 6
            return x

        lines = str(profile(function, torch.randn(4), steps=1)).splitlines()
        (last,) = [i for i, line in enumerate(lines) if line == "and 2 more collectives"]
        assert lines[last - 41].split()[:2] == ["collective", "graph"]

    def test_the_trace_and_the_page_show_them(self, tmp_path):
        with torch.no_grad():
            result = profile(Split(), torch.randn(8, 16), path=tmp_path / "step")
        (it,) = result.collectives
        events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
        flights = [event for event in events if event.get("cat") == "collective"]
        assert [event["ph"] for event in flights] == ["b", "e", "b", "e"]
        for begin, end in zip(flights[::2], flights[1::2], strict=True):
            assert begin["id"] == end["id"]
            assert begin["args"]["bytes"] == it.num_bytes
            for step, at in ((it.start, begin), (it.waits[0], end)):
                named = [each for each in events if each.get("name") == step.name and "dur" in each]
                ends = [each["ts"] + each["dur"] for each in named]
                assert min(abs(each - at["ts"]) for each in ends) < 1
        page = Page((tmp_path / "step.html").read_text())
        text = " ".join(page.text)
        assert "in flight" in text
        assert "beside products" in text
        assert [value for name, value in page.attributes if value == "flight"] == ["flight"]

    def test_without_ranks_nothing_is_told_of_them(self, tmp_path):
        result = profile(mlp(), torch.randn(4, 6), path=tmp_path / "step")
        assert not result.collectives
        assert "in flight" not in str(result)
        page = Page((tmp_path / "step.html").read_text())
        assert "in flight" not in " ".join(page.text)


@pytest.mark.parametrize(
    ("microseconds", "words"),
    [
        (0, "0 µs"), (0.25, "0.25 µs"), (4.5, "4.50 µs"), (45, "45.0 µs"), (450, "450 µs"),
        (999.4, "999 µs"), (999.7, "1.00 ms"), (12_345, "12.3 ms"), (999_600, "1.00 s"),
        (1_000_263, "1.00 s"), (75e6, "75.0 s"),
    ],
)  # fmt: skip
def test_times_have_three_digits_in_their_unit(microseconds, words):
    assert time_text(microseconds) == words


class TestTheModelIsUntouched:
    def test_parameters_buffers_gradients_and_random_state(self):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        x = torch.randn(4, 6)
        model(x).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        tensors = [*model.parameters(), *model.buffers(), *gradients]
        before = [tensor.detach().clone() for tensor in tensors]
        random = torch.get_rng_state()
        profile(model, x)
        assert all(map(torch.equal, before, tensors))
        after = [*model.parameters(), *model.buffers()]
        after += [parameter.grad for parameter in model.parameters()]
        assert all(a is b for a, b in zip(after, tensors, strict=True))
        assert torch.equal(random, torch.get_rng_state())
        assert model.training

    def test_own_random_masks_leave_the_random_state_alone(self, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "0")
        model, x = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5)), torch.randn(4, 6)
        random = torch.get_rng_state()
        profile(model, x)
        assert torch.equal(random, torch.get_rng_state())

    @pytest.mark.hands_over("an input of the caller's is written into")
    def test_a_buffer_that_forward_replaces_and_an_input_that_it_writes(self):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            x.add_(1)
            return x * self.calls

        model, x = module_with(forward, calls=torch.zeros(1)), torch.zeros(3)
        calls = model.calls
        profile(model, x)
        assert model.calls is calls
        assert calls.tolist() == [0]
        assert x.tolist() == [0, 0, 0]

    def test_a_graph_that_waits_for_its_backward(self):
        model, x = mlp(), torch.randn(4, 6)
        loss = model(x).sum()
        profile(model, x)
        loss.backward()  # no saved tensor counts as written

    def test_after_an_error_of_the_model(self):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            torch._dynamo.graph_break()
            return x @ x

        model = module_with(forward, calls=torch.zeros(1))
        with pytest.raises(Exception, match=r"size|shape"):
            profile(model, torch.randn(2, 3))
        assert model.calls.tolist() == [0]


class TestTrace:
    def test_each_step_lies_in_its_half(self, tmp_path):
        result = profile(mlp(), torch.randn(4, 6))
        path = tmp_path / "trace.json"
        result.save_trace(path)
        result.save_trace(path)  # the profiler writes its own only once
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]

        def lies_in(inner, outer):
            starts = outer["ts"] <= inner["ts"]
            return starts and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3

        for half in ("forward", "backward"):
            runs = [e for e in events if e["name"] == f"torch_ort::run_{half}"]
            assert len(runs) == len(result.wall)
            for step in result.steps:
                if step.half != half or not step.microseconds:
                    continue
                found = [
                    event for event in events if event["name"] == step.name
                    and any(event["tid"] == run["tid"] and lies_in(event, run) for run in runs)
                ]  # fmt: skip
                assert len(found) == len(step.microseconds), step.name

    def test_a_path_that_cannot_be_written(self, tmp_path):
        result = profile(mlp(), torch.randn(4, 6))
        for save in (result.save_trace, result.save_html):
            with pytest.raises(torch_ort.UserError, match=r"profile: cannot write '.*': Is a dir"):
                save(tmp_path)


class TestPage:
    def page_of(self, model: nn.Module, x: torch.Tensor, folder: Path) -> tuple[Path, str]:
        result = profile(model, x)
        result.save_html(folder / "page.html")
        return folder / "page.html", (folder / "page.html").read_text(encoding="utf-8")

    def test_it_loads_nothing(self, tmp_path):
        _, text = self.page_of(mlp(), torch.randn(4, 6), tmp_path)
        assert not re.search(r"https?://|@import|url\(", text)
        page = Page(text)
        assert not {"src", "href"} & {name for name, _ in page.attributes}
        assert "link" not in page.tags
        policy = next(value for _, value in page.attributes if value and "default-src" in value)
        assert policy.startswith("default-src 'none'")

    def test_it_shows_steps_memory_and_regions(self, tmp_path):
        result = profile(mlp(), torch.randn(512, 6))
        result.save_html(tmp_path / "page.html")
        page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
        text = "\n".join(map(str.strip, page.text))
        assert all(f"\n{step.name}\n" in text for step in result.steps)
        by_cost = [text.index(f"\n{step.name}\n{step.op}") for step in result.ranked]
        assert by_cost == sorted(by_cost)
        # What costs nothing stands behind them, folded away.
        words = f"{len(result.free)} views that cost nothing: made once, with the plan"
        assert result.free
        assert text.index(words) > by_cost[-1]
        shown = ("Timeline: step", "context, ", "Body", "Tile program", "phase 0")
        for words in (*shown, "of the peak: "):
            assert words in text
        tips = [value for name, value in page.attributes if name == "data-tip"]
        timed = [step.name for step in result.steps if step.microseconds]
        assert all(any(tip.startswith(f"{name}\n") for tip in tips) for name in timed)
        (graph,) = result.graphs
        assert sum(" in use by graph 0" in tip for tip in tips) > 0
        most = max(graph.in_use.values())
        assert 0.9 * graph.plan["peak_bytes"] <= most <= graph.plan["peak_bytes"]

    def test_the_timeline_has_an_axis_of_time(self, tmp_path):
        result = profile(mlp(), torch.randn(4, 6))
        result.wall[result.bars_of] = 12_345.0
        result.save_html(tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        (axis,) = re.findall(r'<div class="axis" data-unit="time">(.*?)</div>', text)
        ticks = re.findall(r'<span style="left:([\d.]+)%">(.*?)</span>', axis)
        assert [words for _, words in ticks] == ["0", "2 ms", "4 ms", "6 ms", "8 ms", "10 ms"]
        assert float(ticks[-1][0]) == pytest.approx(100 * 10_000 / 12_345, abs=1e-3)

    def test_it_says_where_and_why_a_graph_broke(self, tmp_path):
        class Talks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                print("here")
                return self.second(x)

        result = profile(Talks(), torch.randn(4, 6), path=tmp_path / "step")
        (found,) = result.breaks
        line = Talks.forward.__code__.co_firstlineno + 2
        assert str(found.line) == f"test_profile.py:{line}"
        assert "builtin operator `print`" in found.reason
        page = (tmp_path / "step.html").read_text(encoding="utf-8")
        for text in (str(result), page):
            assert str(found.line) in text
            assert "Dynamo does not know how to trace builtin operator `print`" in text
        assert "Graph breaks" in page

    def test_without_a_break_none_is_told_of(self, tmp_path):
        _, text = self.page_of(mlp(), torch.randn(4, 6), tmp_path)
        assert "Graph breaks" not in text

    def test_names_are_escaped(self, tmp_path):
        result = profile(mlp(), torch.randn(4, 6))
        result.ranked[0].origin = "<script>$summary & '\"\udc80"
        result.save_html(tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert "&lt;script&gt;$summary &amp;" in text
        assert text.count("<script>") == 1

    def test_it_works_in_a_browser(self, tmp_path):
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            pytest.skip(f"needs a browser on the PATH: one of {', '.join(BROWSERS)}")
        path, text = self.page_of(Attention(), torch.randn(2, 5, 16), tmp_path)
        # Sorts by a column, zooms, and points at a bar, as a user does.
        path.write_text(
            text.replace(
                "</body>",
                """<script>
            const heads = [...table.tHead.rows[0].cells];
            heads.find((head) => head.textContent === "moved").click();
            const svg = document.querySelector("svg"), bar = svg.querySelector("rect");
            const width = svg.viewBox.baseVal.width;
            svg.dispatchEvent(new WheelEvent("wheel", {deltaY: -200, clientX: 50}));
            bar.dispatchEvent(new MouseEvent("mousemove", {bubbles: true}));
            const moved = [...table.tBodies[0].rows].map((row) => +row.cells[11].dataset.value);
            const ticks = [...svg.nextElementSibling.children].map((tick) => tick.textContent);
            const box = document.getElementById("steps");
            document.title = JSON.stringify({
              moved, zoomed: svg.viewBox.baseVal.width < width, tip: tip.textContent, ticks,
              fits: innerWidth === 1400 && box.scrollWidth <= box.clientWidth});
            </script></body>""",
            )
        )
        run = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
             "--log-level=0", f"--user-data-dir={tmp_path / 'user'}", "--virtual-time-budget=2000",
             "--window-size=1400,900", "--dump-dom", path.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert not [line for line in run.stderr.splitlines() if ":CONSOLE" in line]
        seen = json.loads(re.search("<title>(.*?)</title>", run.stdout, re.DOTALL)[1])
        assert seen["moved"] == sorted(seen["moved"], reverse=True)
        assert len(set(seen["moved"])) > 2
        assert seen["zoomed"]
        assert len(seen["ticks"]) > 2
        assert all(re.fullmatch(r"0|[\d.]+ (µs|ms|s)", tick) for tick in seen["ticks"])
        assert seen["fits"]
        assert seen["tip"].startswith("forward half of a graph")


class TestPath:
    def test_both_files_are_written(self, tmp_path):
        profile(mlp(), torch.randn(4, 6), path=tmp_path / "step")
        assert {path.name for path in tmp_path.iterdir()} == {"step.html", "step.json"}


class TestWrongArguments:
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"steps": 0}, "profile: steps: got 0, want an integer of at least 1"),
            ({"steps": 2.5}, "profile: steps: got 2.5, want an integer"),
            ({"steps": True}, "profile: steps: got True, want an integer"),
            ({"path": 7}, "profile: path: got 7, want the start of two file names"),
            (
                {"path": "no/such/page"},
                "profile: path: got 'no/such/page', want a name in a folder",
            ),
            ({"options": {"save_onx": True}}, "unknown option: got 'save_onx'"),
        ],
    )
    def test_of_profile(self, settings, words):
        with pytest.raises(torch_ort.UserError, match=words):
            torch_ort.profile(mlp(), torch.randn(4, 6), **settings)

    def test_a_model_that_cannot_be_called(self):
        with pytest.raises(torch_ort.UserError, match="profile: model: got 3, want a module or a"):
            torch_ort.profile(3)

    def test_nothing_to_measure(self):
        with pytest.raises(torch_ort.UserError, match="the model has no step to measure"):
            profile(lambda: 3)


def no_tangents(self: FxReader, nodes: list) -> None:
    if any("tan" in node.name for node in nodes):
        raise torch_ort.Unsupported("tan: want another function")
    add_nodes(self, nodes)


add_nodes = FxReader.add_nodes


@pytest.mark.hands_over("graphs are made to fail")
class TestFallback:
    @pytest.fixture(autouse=True)
    def some_graphs_fall_back(self, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        monkeypatch.setattr(FxReader, "add_nodes", no_tangents)

    def test_all_of_the_model(self):
        words = (
            "profile: nothing of the model runs in the engine: torch_ort: convert: "
            r"tan: want another function \(test_profile.py:\d+\); this graph runs in eager PyTorch"
        )
        with pytest.warns(FallbackWarning), pytest.raises(torch_ort.Unsupported, match=words):
            profile(torch.tan, torch.randn(3))

    def test_a_part_of_the_model(self, tmp_path):
        def both(x):
            x = x.sin() @ x.cos()
            torch._dynamo.graph_break()
            return x.tan()

        with pytest.warns(FallbackWarning, match="tan: want another function"):
            result = profile(both, torch.randn(3, 3), path=tmp_path / "step")
        (reason,) = result.fallbacks
        assert f"fell back: {reason}" in str(result)
        assert "Fell back: torch_ort: convert: tan" in (tmp_path / "step.html").read_text()
        assert any(step.microseconds for step in result.steps)

    def test_strict_raises_what_the_engine_says(self, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "1")
        with pytest.raises(Exception, match="tan: want another function"):
            profile(torch.tan, torch.randn(3))
