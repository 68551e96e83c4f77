"""What the switches of ONNX Runtime Training do under torch.compile, and what is said of them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from injection import at_place
from models import module_with
from torch import nn

import torch_ort
from torch_ort import ORTModule, options
from torch_ort.capture import logs
from torch_ort.engine import compiler
from torch_ort.fallback import FallbackWarning

pytestmark = [pytest.mark.ort_only, pytest.mark.compile_only("switches of both roads")]

X = torch.ones(2, 4)
NEVER_NEEDED = {
    "ORTMODULE_SKIPCHECK_POLICY": "SKIP_CHECK_DISABLED",
    "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT": "0",
    "ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT": "1",
    "ORTMODULE_CACHE_DIR": "somewhere",
    "ORTMODULE_USE_EFFICIENT_ATTENTION": "1",
    "ORTMODULE_ATEN_SDPA_FALLBACK": "1",
    "ORTMODULE_USE_FLASH_ATTENTION": "1",
}
# What asks for something, where "1" does not.
ASKING = {
    "ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE",
    "ORTMODULE_LOG_LEVEL": "ERROR",
    "ORTMODULE_SKIPCHECK_POLICY": "SKIP_CHECK_DISABLED",
}
OF_ORTMODULE = {
    "ORTMODULE_PRINT_MEMORY_STATS": "1",
    "ORTMODULE_ENABLE_ZERO_STAGE3": "1",
    "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": "1",
    "ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT": "1",
    "ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS": "package.Function",
    "ORTMODULE_JSON_CONFIG_PATH": "config.json",
}
ROADS = {"compile": lambda module: torch.compile(module, backend="ort"), "ortmodule": ORTModule}


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    """Give each test an environment without switches, and a log that has said nothing."""
    for row in options.ORTMODULE_TABLE:
        monkeypatch.delenv(row.variable, raising=False)
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    monkeypatch.setattr(logs, "_said", set())
    monkeypatch.setattr(compiler, "_sessions", {})


@pytest.fixture
def said(caplog) -> Callable[[], list[str]]:
    """Return a function that gives the messages of the log so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.name == "orttraining"]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(nn.functional.gelu(self.norm(self.linear(x))), -1)


def compiled(target: Callable, **settings) -> Callable:
    return torch.compile(target, backend="ort", **settings)


class TestFallbackPolicy:
    def fail_to_plan(self, monkeypatch) -> None:
        at_place("plan", lambda: torch_ort.Unsupported("on purpose"))

    def test_the_default_runs_in_eager(self, monkeypatch):
        self.fail_to_plan(monkeypatch)
        model = Norm()
        with pytest.warns(FallbackWarning, match="on purpose"):
            torch.testing.assert_close(compiled(model)(X), model(X))

    @pytest.mark.parametrize("policy", ["FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DEVICE"])
    def test_one_that_allows_no_graph_raises(self, policy, monkeypatch):
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy)
        self.fail_to_plan(monkeypatch)
        with pytest.raises(torch_ort.Unsupported, match="on purpose"):
            compiled(Norm())(X)

    def test_options_win(self, monkeypatch):
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
        self.fail_to_plan(monkeypatch)
        with pytest.warns(FallbackWarning, match="on purpose"):
            compiled(Norm(), options={"strict": False})(X)

    def test_what_dynamo_leaves_out_raises(self, monkeypatch):
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
        with pytest.raises(torch_ort.Unsupported, match="Dynamo cannot capture it"):
            compiled(
                module_with(lambda self, x: self.layer(x)[0], layer=nn.LSTM(4, 8, proj_size=4))
            )(X)

    def test_a_wrong_name(self, monkeypatch):
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "NEVER")
        with pytest.raises(Exception, match="ORTMODULE_FALLBACK_POLICY: got 'NEVER', want one of"):
            compiled(Norm())(X)


@pytest.mark.parametrize("retries", [False, True])
def test_retry(retries, monkeypatch):
    """The first run fails; only a retry brings the engine back."""
    monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", str(int(retries)))
    model, x = Norm(), X.clone().requires_grad_()
    run = compiled(model)
    at_place("memory", lambda: torch_ort.Unsupported("on purpose"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.testing.assert_close(run(x), model(x))
            torch_ort._C.set_failpoint(None)
    assert len([w for w in caught if issubclass(w.category, FallbackWarning)]) == 1
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 1
    assert counters["forward_runs"] == (2 if retries else 0)


class TestLogLevel:
    def test_info_tells_of_captures(self, monkeypatch, said):
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "INFO")
        model = compiled(Norm())
        for _ in range(2):
            model(X).sum().backward()
        title, table, line, graph = said()
        assert table.startswith("Memory Optimizer : OFF : ")
        assert title.startswith("torch.compile: forward and backward run as one graph in the")
        assert title.endswith("(ORTMODULE_FALLBACK_POLICY ON)")
        assert graph.startswith("traced graph ")
        assert line.startswith("captured a training graph in ")

    @pytest.mark.parametrize(("level", "is_heard"), [("INFO", False), ("DEVINFO", True)])
    def test_the_engine_speaks_to_developers(self, level, is_heard, monkeypatch, caplog):
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", level)
        compiled(Norm())(X).sum().backward()
        said = [r.getMessage() for r in caplog.records if r.name == "orttraining.engine"]
        assert any(text.startswith("pass fuse_regions: ") for text in said) == is_heard
        assert any(text.startswith("plan of graph ") for text in said) == is_heard

    def test_each_road_is_introduced(self, monkeypatch, said):
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "INFO")
        for road in (*ROADS.values(), *ROADS.values()):
            road(Norm())(X)
        titles = [text.partition(":")[0] for text in said() if "run as one graph" in text]
        assert titles == ["torch.compile", "ORTModule"]

    def test_the_default_is_silent(self, said):
        compiled(Norm())(X)
        assert said() == []

    def test_errors_alone(self, monkeypatch, said):
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "ERROR")
        monkeypatch.setenv("ORTMODULE_CACHE_DIR", "somewhere")
        compiled(Norm())(X)
        assert said() == []
        assert logging.getLogger("orttraining").level == logging.ERROR


class TestSavePath:
    @pytest.fixture(autouse=True)
    def saving(self, monkeypatch, tmp_path):
        (tmp_path / "files").mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("ORTMODULE_SAVE_ONNX", "1")
        monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path / "files"))

    @pytest.mark.parametrize("road", ROADS)
    def test_is_the_folder_of_the_prefix(self, road, monkeypatch, tmp_path):
        monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PREFIX", "net")
        ROADS[road](Norm())(X)
        names = [path.name.rpartition("_")[2] for path in (tmp_path / "files").glob("net_*.onnx")]
        assert sorted(names) == ["captured.onnx", "optimized.onnx"]
        assert list(tmp_path.glob("*.onnx")) == []

    def test_a_prefix_that_is_given_stands(self, tmp_path):
        compiled(Norm(), options={"onnx_prefix": str(tmp_path / "mine")})(X)
        assert len(list(tmp_path.glob("mine_*.onnx"))) == 2
        assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize("opset", [12, 13, 17, 20])
def test_opset_holds_for_every_file(opset, monkeypatch, tmp_path):
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", str(opset))
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX", "1")
    monkeypatch.chdir(tmp_path)
    ours = ORTModule(Norm(), torch_ort.DebugOptions(save_onnx=True, onnx_prefix="net"))
    for model in (compiled(Norm()), ours):
        model(X).sum().backward()
        with torch.no_grad():
            model(X)
    files = sorted(tmp_path.glob("*.onnx"))
    # Of each graph those of save_onnx, and of ORTModule's its own five.
    assert len(files) == 4 * 2 + 2 * 5
    for path in files:
        (stamped,) = [each.version for each in onnx.load(path).opset_import if not each.domain]
        assert stamped <= opset, path.name
        torch_ort._C.Graph.from_onnx(Path(path).read_bytes())


class TestWhatDoesNothing:
    @pytest.mark.parametrize("variable", NEVER_NEEDED)
    @pytest.mark.parametrize("road", ROADS)
    def test_never_needed_is_said_once(self, road, variable, monkeypatch, said):
        monkeypatch.setenv(variable, NEVER_NEEDED[variable])
        for _ in range(2):
            ROADS[road](Norm())(X)
        (line,) = said()
        assert line.startswith(f"{variable}: never needed, ignored: ")
        assert len(line) > len(f"{variable}: never needed, ignored: ") + 10

    def test_the_table_has_no_others(self):
        rows = [row for row in options.ORTMODULE_TABLE if row.never_needed]
        assert sorted(row.variable for row in rows) == sorted(NEVER_NEEDED)

    @pytest.mark.parametrize("row", options.ORTMODULE_TABLE, ids=lambda row: row.name)
    def test_each_row_has_an_effect_or_a_reason(self, row, monkeypatch, said):
        """Whatever is set, to its default as well, acts or is named, on either road."""
        monkeypatch.setenv(row.variable, ASKING.get(row.variable, "1"))
        acts = not row.never_needed
        named = {True: acts and row.is_for_both, False: acts}
        for by_torch_compile, is_silent in named.items():
            found = options.asked_in_vain(options.resolve_ortmodule(), by_torch_compile)
            assert [variable for variable, _ in found] == ([] if is_silent else [row.variable])

    @pytest.mark.parametrize("variable", OF_ORTMODULE)
    def test_of_ortmodule_alone(self, variable, monkeypatch, said, capsys):
        monkeypatch.setenv(variable, OF_ORTMODULE[variable])
        for _ in range(2):
            compiled(Norm())(X)
        assert said() == [f"{variable}: acts on ORTModule alone, ignored by torch.compile"]
        ORTModule(Norm())(X)
        assert len(said()) == 1

    @pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
    def test_mode(self, mode, said):
        for _ in range(2):
            compiled(Norm(), mode=mode)(X)
        (line,) = said()
        assert line == f"mode '{mode}': the same as 'default': {options.MODES[mode]}"
        assert "where ORTMODULE_ENABLE_TUNING=1 asks for it" in line

    @pytest.mark.parametrize(
        "settings", [{"mode": "reduce-overhead"}, {"options": {"cuda_graphs": True}}]
    )
    def test_cuda_graphs_on_the_cpu(self, settings, said):
        for _ in range(2):
            compiled(Norm(), **settings)(X)
        assert said() == ["cuda_graphs: does nothing on the CPU, where no kernels are queued"]

    def test_what_is_given_wins_over_the_mode(self):
        assert options.resolve(mode="reduce-overhead").cuda_graphs
        assert not options.resolve({"cuda_graphs": False}, "reduce-overhead").cuda_graphs
        assert not options.resolve(mode="max-autotune").cuda_graphs

    def test_the_default_mode(self, said):
        compiled(Norm(), mode="default")(X)
        assert said() == []
