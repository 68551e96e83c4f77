"""Training with layers or clusters made again: the same numbers, fewer bytes, and the table."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_ort
from torch_ort.capture import logs
from torch_ort.engine import watchers

WIDTH, LENGTH, BATCH, DEPTH = 32, 24, 4, 3


@pytest.fixture(autouse=True)
def masks_in_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "0")
    monkeypatch.setattr(logs, "_said", set())


class SquareNorm(nn.Module):
    """As Llama's is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        mean = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(mean + 1e-6)).to(hidden.dtype)


NORMS = {
    "layer": lambda: nn.LayerNorm(WIDTH),
    "square": SquareNorm,
    "rms": lambda: nn.RMSNorm(WIDTH),
}


class Block(nn.Module):
    def __init__(self, norm: str, is_behind: bool) -> None:
        super().__init__()
        self.is_behind = is_behind
        self.norm, self.norm_feed = NORMS[norm](), NORMS[norm]()
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.packed(hidden).unflatten(-1, (3, 2, WIDTH // 2))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.1, is_causal=True
        )
        return self.dropout(self.mixed(mixed.transpose(1, 2).flatten(2)))

    def feed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(functional.gelu(self.up(hidden))))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_behind:
            hidden = self.norm(hidden + self.attend(hidden))
            return self.norm_feed(hidden + self.feed(hidden))
        hidden = hidden + self.attend(self.norm(hidden))
        return hidden + self.feed(self.norm_feed(hidden))


class Transformer(nn.Module):
    def __init__(self, norm: str = "layer", is_behind: bool = False) -> None:
        super().__init__()
        self.first = NORMS[norm]() if is_behind else nn.Identity()
        self.blocks = nn.Sequential(*(Block(norm, is_behind) for _ in range(DEPTH)))
        self.last = nn.Identity() if is_behind else NORMS[norm]()
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.last(self.blocks(functional.dropout(self.first(x), 0.1)))
        return functional.cross_entropy(self.head(hidden[:, 0]), labels)


STYLES = {
    "norms in front": {},
    "norms behind": {"is_behind": True},
    "square norms": {"norm": "square"},
    "rms norms": {"norm": "rms"},
}


def make(
    dtype: torch.dtype = torch.float32, batch: int = BATCH, **style
) -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    model = Transformer(**style).to(dtype)
    return model, (torch.randn(batch, LENGTH, WIDTH, dtype=dtype), torch.randint(7, (batch,)))


def train(call: Callable, model: nn.Module, inputs: tuple, steps: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        loss = call(*inputs)
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def compiled(options: dict, dtype: torch.dtype = torch.float32, **style) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model, inputs = make(dtype, **style)
    return train(torch.compile(model, backend="ort", options=options), model, inputs)


def graph_of(options: dict, **style) -> torch_ort.GraphReport:
    torch._dynamo.reset()
    model, inputs = make(**style)
    (graph,) = torch_ort.explain(model, *inputs, options=options).graphs
    return graph


def assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, another in zip(got, want, strict=True):
        assert torch.equal(one, another)


def table_of(config: dict, caplog, dtype: torch.dtype = torch.float32, **style) -> list[str]:
    """Give the lines of the table that an ORTModule writes."""
    caplog.clear()
    logs._said.clear()
    model, inputs = make(dtype, **style)
    debug = torch_ort.DebugOptions(log_level=torch_ort.LogLevel.INFO, config=config)
    with caplog.at_level(logging.INFO, logger="orttraining"):
        torch_ort.ORTModule(model, debug)(*inputs).backward()
    (table,) = tables(caplog)
    return table.splitlines()


def tables(caplog) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if text.startswith("Memory Optimizer")]


PLAN = re.compile(r" - Plan (\d+) : (ON|OFF) : (\S+):(\d):(-?\d+) \| ([\d,]+) \| ([\d,]+) \| (.+)")


def plans(lines: list[str]) -> list[tuple[str, ...]]:
    return [match.groups() for line in lines if (match := PLAN.fullmatch(line))]


# The default run has each style with one dtype besides float32.
DTYPE_OF = {
    "norms in front": torch.bfloat16,
    "norms behind": torch.float64,
    "square norms": torch.float16,
    "rms norms": torch.bfloat16,
}


@pytest.mark.parametrize(
    ("style", "dtype"),
    [
        pytest.param(
            style, dtype, id=f"{style}-{dtype}",
            marks=() if dtype in (torch.float32, DTYPE_OF[style]) else pytest.mark.slow,
        )
        for style in STYLES
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    ],
)  # fmt: skip
def test_levels_give_the_same_bits(style, dtype):
    """With dropout: what is drawn again is what was drawn."""
    options = {"emulate_eager_casts": dtype.itemsize == 2}
    want = compiled(options, dtype, **STYLES[style])
    for level in (1, 2):
        got = compiled(options | {"memory_opt_level": level}, dtype, **STYLES[style])
        assert_same_bits(got, want)


@pytest.mark.parametrize("style", STYLES)
def test_levels_hold_what_was_planned(style):
    dense = graph_of({}, **STYLES[style])
    for level in (1, 2):
        graph = graph_of({"memory_opt_level": level}, **STYLES[style])
        planned = graph.recomputation.planned
        assert planned.num_layers == DEPTH
        assert planned.dense_held_bytes == dense.plan["saved_bytes"]
        assert planned.held_bytes == graph.plan["saved_bytes"]
        # The input of each layer, what attention and norms sum up, and what is no layer's.
        assert graph.plan["saved_bytes"] < 0.4 * dense.plan["saved_bytes"]
        # The first layer may have a name of its own: with norms behind, it holds a dropout.
        rows = [row for row in planned.clusters if row["is_on"]]
        saved = sum(row["saved_bytes"] for row in rows)
        assert saved == planned.dense_held_bytes - planned.held_bytes
        assert sum(row["frequency"] for row in rows) == DEPTH
        assert {(row["type"], row["count"]) for row in rows} == {(level, -1)}


def test_nothing_outside_of_layers_is_made_again():
    graph = graph_of({"memory_opt_level": 2})
    lines = {origin.rpartition(":")[2] for _, _, origin, *_ in graph.recomputation.planned.made}
    outside = {number for number, line in _lines_of_this_file() if "self.head(hidden" in line}
    assert lines
    assert not lines & outside


def _lines_of_this_file() -> list[tuple[str, str]]:
    with open(__file__, encoding="utf-8") as file:
        return [(str(number), line) for number, line in enumerate(file, 1)]


class Noisy(Block):
    """Draws a number for each sequence, which takes no part in any gradient."""

    def feed(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().feed(hidden + torch.randn(hidden.shape[0], 1, 1))


@pytest.mark.parametrize("exact", ["0", "1"])
def test_compromise_holds_a_part(exact, monkeypatch):
    """What is drawn cannot be drawn again: level 1 holds what is made of it, level 2 itself."""
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", exact)
    results, held = [], []
    for level in (0, 1, 2):
        options = {"memory_opt_level": level}
        for run in (torch_ort.explain, train):
            torch._dynamo.reset()
            model, inputs = make()
            model.blocks = nn.Sequential(*(Noisy("layer", False) for _ in range(DEPTH)))
            if run is train:
                call = torch.compile(model, backend="ort", options=options)
                results.append(train(call, model, inputs))
            else:
                (graph,) = torch_ort.explain(model, *inputs, options=options).graphs
                held.append(graph.plan["saved_bytes"])
    assert held[2] < held[1] < held[0]
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("switch", ["fuse_regions", "own_kernels", "rebuild_values", "recorder"])
def test_other_passes_are_not_needed(switch):
    options = {"disable": (switch,)}
    assert_same_bits(compiled(options | {"memory_opt_level": 1}), compiled(options))


@pytest.mark.hands_over
def test_other_sizes_hold_the_same():
    results = []
    for options in ({"memory_opt_level": 1}, {}):
        torch._dynamo.reset()
        model, inputs = make()
        call = torch.compile(model, backend="ort", options=options, dynamic=True)
        train(call, model, inputs)
        model.zero_grad()
        results.append(train(call, model, make(batch=7)[1]))
    for one, another in zip(*results, strict=True):  # regions may add rows up in another order
        torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-7)


def test_modules_of_ortmodule_take_it():
    results = []
    for config in ({"memory_opt_level": 1}, {}):
        model, inputs = make()
        module = torch_ort.ORTModule(model, torch_ort.DebugOptions(config=config))
        results.append(train(module, model, inputs))
    assert_same_bits(*results)


class Plain(nn.Module):
    """Softmax, norm and sums, but no layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.norm(x + functional.gelu(self.up(x))), -1).square().sum()


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_without_layers_is_told_of_once(level, caplog):
    module = torch_ort.ORTModule(
        Plain(), torch_ort.DebugOptions(config={"memory_opt_level": level})
    )
    with caplog.at_level(logging.WARNING, logger="orttraining"):
        for batch in (2, 3):
            module(torch.randn(batch, 5, WIDTH)).backward()
            module.recapture()
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith(f"ORTMODULE_MEMORY_OPT_LEVEL={level}: no layer of a transformer was rec")


class TestTable:
    def test_is_off(self, caplog):
        lines = table_of({}, caplog)
        assert lines[0].startswith("Memory Optimizer : OFF : ")
        assert "ORTMODULE_MEMORY_OPT_LEVEL to 1 or 2" in lines[0]
        rows = plans(lines)
        assert [row[0] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
        assert {row[1] for row in rows} == {"OFF"}
        saved = [int(row[6].replace(",", "")) for row in rows]
        assert saved == sorted(saved, reverse=True)
        assert all(number > 0 for number in saved)
        assert any("," in row[6] for row in rows)

    @pytest.mark.parametrize("level", [1, 2])
    def test_shows_layers_that_are_on(self, level, caplog):
        lines = table_of({"memory_opt_level": level}, caplog)
        name = [
            "TRANSFORMER_LAYERWISE_RECOMPUTE",
            "TRANSFORMER_LAYERWISE_RECOMPUTE_WITH_COMPROMISE",
        ]
        assert lines[0].startswith(f"Memory Optimizer : ON : [{name[level - 1]}], {DEPTH} layers: ")
        (row,) = [row for row in plans(lines) if row[1] == "ON"]
        assert "LayerNormalization+" in row[2]
        assert row[3:6] == (str(level), "-1", str(DEPTH))

    def test_symbols_are_named_after_inputs(self, caplog):
        """And say what the numbers say."""
        lines = table_of({}, caplog)
        for *_, saved, expression in plans(lines):
            values = {"inputs_x_dim0": BATCH, "inputs_x_dim1": LENGTH}
            found = eval(expression.replace(",", ""), values)
            assert found == int(saved.replace(",", ""))
        assert (
            lines[-1]
            == f"Sizes in the first call: inputs_x_dim0 = {BATCH}, inputs_x_dim1 = {LENGTH}."
        )

    def test_is_said_once(self, caplog):
        table_of({}, caplog)
        model, inputs = make()
        caplog.clear()
        debug = torch_ort.DebugOptions(log_level=torch_ort.LogLevel.INFO)
        with caplog.at_level(logging.INFO, logger="orttraining"):
            torch_ort.ORTModule(model, debug)(*inputs).backward()
        assert not tables(caplog)

    def test_is_not_said_below_info(self, caplog):
        model, inputs = make()
        torch_ort.ORTModule(model)(*inputs).backward()
        assert caplog.records == []

    @pytest.mark.parametrize(
        "style", ["norms in front", pytest.param("square norms", marks=pytest.mark.slow)]
    )
    def test_each_plan_saves_what_it_says(self, style, caplog, monkeypatch):
        """With the same bits, alone."""
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "INFO")
        options = {}
        with caplog.at_level(logging.INFO, logger="orttraining"):
            dense = graph_of(options, **STYLES[style]).plan["saved_bytes"]
        (table,) = tables(caplog)
        rows = plans(table.splitlines())
        want = compiled(options, **STYLES[style])
        assert len(rows) > 3
        for *_, name, kind, count, frequency, saved, _ in rows:
            config = f"{name}:{kind}:{count}"
            with watchers.watching() as programs:
                got = compiled({"memory_opt_config": config}, **STYLES[style])
            assert_same_bits(got, want)
            (program,) = programs
            held = program.session.plan_report()["saved_bytes"]
            assert dense - held == int(saved.replace(",", ""))
            (row,) = [row for row in program.recomputation.planned.clusters if row["is_on"]]
            assert row["name"] == name
            assert row["frequency"] == int(frequency)

    def test_search_level(self, caplog):
        """Level 0 has no product, norm, softmax or attention in any cluster but the layers."""
        rows = plans(table_of({"memory_opt_probe_config": "0"}, caplog))
        ops = {op for row in rows for op in row[2].split("+") if "LayerNorm" not in row[2]}
        assert ops
        assert not ops & {"Gemm", "MatMul", "_safe_softmax"}
        older = plans(table_of({"memory_opt_probe_recompute_level": "0"}, caplog))
        assert older == rows
        assert plans(table_of({"memory_opt_probe_recompute_level": "1"}, caplog)) != rows


@functools.cache
def name_of_layer() -> str:
    return graph_of({"memory_opt_level": 1}).recomputation.planned.clusters[0]["name"]


@functools.cache
def held_with(*entries: str, **options: int) -> int:
    return graph_of({"memory_opt_config": list(entries), **options}).plan["saved_bytes"]


class TestConfig:
    def test_counts_from_the_first(self):
        name = name_of_layer()
        held = [held_with(f"{name}:1:{count}") for count in range(DEPTH + 2)]
        assert held[0] > held[1] > held[2] > held[3] == held[4] == held_with(f"{name}:1:-1")
        want = compiled({})
        for count in (1, 2):
            assert_same_bits(compiled({"memory_opt_config": f"{name}:1:{count}"}), want)

    def test_the_last_entry_wins(self):
        name = name_of_layer()
        assert held_with(f"{name}:1:-1", f"{name}:0:-1") == held_with(f"{name}:0:-1")
        assert held_with(f"{name}:0:-1", f"{name}:1:-1") == held_with(f"{name}:1:-1")

    def test_levels_ignore_it(self):
        assert held_with(f"{name_of_layer()}:0:-1", memory_opt_level=1) == held_with(
            memory_opt_level=1
        )

    def test_unknown_clusters_stay_off(self, caplog):
        lines = table_of({"memory_opt_config": "Nothing+Of+That+:1:-1"}, caplog)
        assert " : OFF : Nothing+Of+That+:1:-1 | 0 | 0 | 0" in lines[-3] + lines[-2]
        assert lines[0].startswith("Memory Optimizer : OFF")

    def test_a_file(self, tmp_path):
        name = name_of_layer()
        path = tmp_path / "clusters.json"
        path.write_text(json.dumps([f"{name}:1:-1"]))
        graph = graph_of({"memory_opt_config": str(path)})
        assert graph.plan["saved_bytes"] == held_with(f"{name}:1:-1")

    def test_the_environment(self, monkeypatch):
        monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", "Gelu+:1:-1, Dropout+:2:3,Gelu+:0:-1")
        monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "2")
        got = torch_ort.options.resolve()
        assert got.memory_opt_config == ("Gelu+:0:-1", "Dropout+:2:3")
        assert got.memory_opt_level == 2

    @pytest.mark.parametrize(
        "entry",
        ["Gelu", "Gelu:1:-1", "Gelu+:3:-1", "Gelu+:1:-2", "Gelu+:1", "+:1:1", "Ge lu+:1:1", 5, [5]],
    )
    def test_wrong_entries(self, entry):
        with pytest.raises(
            torch_ort.UserError,
            match=r"memory_opt_config: got .*, want <Op\+Op\+>:<type>:<count>, with type 0, 1 or 2",
        ):
            torch_ort.options.resolve({"memory_opt_config": entry})

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("no json", "cannot be read as a JSON list: Expecting value"),
            ('{"a": 1}', "want a JSON list of strings"),
            ("[1]", "want a JSON list of strings"),
            ('["Gelu:1:-1"]', r"want <Op\+Op\+>:<type>:<count>.*'Gelu:1:-1' is none"),
            (None, "cannot be read as a JSON list: .*No such file"),
        ],
    )
    def test_wrong_files(self, text, words, tmp_path, monkeypatch):
        path = tmp_path / "clusters.json"
        if text is not None:
            path.write_text(text)
        monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", str(path))
        with pytest.raises(torch_ort.UserError, match=f"{re.escape(str(path))}: {words}"):
            torch_ort.ORTModule(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("memory_opt_level", 3, "got 3, want an integer from 0 to 2"),
        ("memory_opt_level", True, "got True, want an integer from 0 to 2"),
        ("memory_opt_probe_recompute_level", "2", "got '2', want 0 or 1"),
        ("memory_opt_probe_config", "1:2", "got '1:2', want <level>:<whether layers are bound"),
    ],
)
def test_wrong_values(name, value, words):
    with pytest.raises(torch_ort.UserError, match=re.escape(f"{name}: {words}")):
        torch_ort.options.resolve({name: value})


@pytest.mark.parametrize("other", [{"memory_opt_level": 1}, {"memory_opt_config": "Gelu+:1:-1"}])
def test_not_beside_a_budget(other):
    with pytest.raises(torch_ort.UserError, match="memory_budget: got a budget and memory_opt_lev"):
        torch_ort.options.resolve({"memory_budget": 0.5, **other})


def test_explain_tells():
    torch._dynamo.reset()
    model, inputs = make()
    text = str(torch_ort.explain(model, *inputs, options={"memory_opt_level": 1}))
    words = (
        "memory_opt_level 1, 3 layer(s): ", "saved for backward without recomputation",
        "recomputed by name: LayerNormalization+", ":1:-1, which occurs 3 times, ", "recomputed: ",
        "+0 B against the plan",
    )  # fmt: skip
    assert all(word in text for word in words)


def test_the_first_step_is_held_against_the_plan(caplog):
    with caplog.at_level(logging.INFO, logger="torch_ort.budget"):
        compiled({"memory_opt_level": 1})
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("memory_opt_level: ")
    assert "bytes are saved for backward, +0 against the plan" in text
