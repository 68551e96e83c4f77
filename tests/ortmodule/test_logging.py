"""What an ORTModule says: by level, by rank, and never on standard output."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from forked_process import run_forks
from own_process import run_python
from processes import LEAVE
from torch import nn

import torch_ort
from torch_ort import DebugOptions, LogLevel, ORTModule, options
from torch_ort.capture import logs

pytestmark = pytest.mark.ort_only

LEVELS = [level.name for level in LogLevel]
VALUES = {"VERBOSE": 0, "DEVINFO": 1, "INFO": 2, "WARNING": 3, "ERROR": 4, "FATAL": 5}
# The least that the log lets through.
SPEAKS = {
    "VERBOSE": logging.DEBUG, "DEVINFO": logging.INFO, "INFO": logging.INFO,
    "WARNING": logging.WARNING, "ERROR": logging.ERROR, "FATAL": logging.CRITICAL,
}  # fmt: skip
# The least that the engine's own log lets through, and whether the traced graph is written.
ENGINE_SPEAKS = {**SPEAKS, "INFO": logging.WARNING}
TRACED = ("VERBOSE", "DEVINFO", "INFO")
SILENT_ELSEWHERE = ("INFO", "WARNING", "ERROR", "FATAL")  # on other ranks than 0
X = torch.ones(2, 4)
TITLE = "ORTModule: forward and backward run as one graph in the engine"


@pytest.fixture(autouse=True)
def logger(monkeypatch) -> logging.Logger:
    """Give the log, of which the environment asks nothing."""
    monkeypatch.delenv("ORTMODULE_LOG_LEVEL", raising=False)
    monkeypatch.delenv("ORTMODULE_FALLBACK_POLICY", raising=False)
    monkeypatch.setattr(logs, "_said", set())
    return logging.getLogger("orttraining")


@pytest.fixture
def said(caplog):
    """Return a function that gives the messages so far, at the given level if any."""

    def messages(level: int | None = None) -> list[str]:
        ours = [r for r in caplog.records if r.name == "orttraining"]
        return [r.getMessage() for r in ours if level in (None, r.levelno)]

    return messages


@pytest.fixture
def said_by_engine(caplog):
    """Return a function that gives the messages of the engine at a level."""

    def messages(level: int) -> list[str]:
        ours = [r for r in caplog.records if r.name == "orttraining.engine"]
        return [r.getMessage() for r in ours if r.levelno == level]

    return messages


class Chooses(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y * 3, (y,))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = 2.0

    def forward(self, x, mask=None, double=False):
        y = self.linear(x.float()) * self.scale
        y = y if mask is None else y * mask
        return y * 2 if double else y


class Branches(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y * 3


def at(level: str, **settings) -> DebugOptions:
    return DebugOptions(log_level=LogLevel[level], **settings)


def run(module: nn.Module, level: str = "WARNING", times: int = 1) -> ORTModule:
    wrapped = ORTModule(module, at(level))
    for _ in range(times):
        wrapped(torch.ones(2, 4))
    return wrapped


def introductions(messages: list[str]) -> list[str]:
    return [message for message in messages if message.startswith(TITLE)]


@pytest.mark.parametrize("level", LEVELS)
class TestLevel:
    def test_number(self, level):
        assert LogLevel[level] == VALUES[level]
        assert len(LogLevel) == 6

    @pytest.mark.parametrize("by_environment", [False, True], ids=["argument", "environment"])
    def test_what_the_log_lets_through(self, level, by_environment, logger, monkeypatch):
        if by_environment:
            monkeypatch.setenv("ORTMODULE_LOG_LEVEL", level)
            ORTModule(Scaled())
        else:
            ORTModule(Scaled(), at(level))
        assert not logger.disabled
        assert logger.isEnabledFor(SPEAKS[level])
        if VALUES[level] >= LogLevel.INFO:
            assert not logger.isEnabledFor(SPEAKS[level] - 10)

    def test_logger_of_one_process(self, level, said):
        run(Scaled(), level)
        names = [n for n in logging.root.manager.loggerDict if n.startswith("orttraining.rank")]
        assert names == []
        assert bool(said()) == (VALUES[level] <= LogLevel.INFO)

    def test_introduction(self, level, said):
        run(Scaled(), level, times=2)
        assert len(introductions(said(logging.INFO))) == (1 if VALUES[level] <= 2 else 0)

    def test_break_down(self, level, said):
        run(Scaled(), level)
        lines = [m for m in said(logging.INFO) if m.startswith("captured a training graph in ")]
        assert len(lines) == (1 if VALUES[level] <= 2 else 0)
        pattern = r"captured a training graph in \d+\.\d\ds: (\w+ \d+ ms, )+\w+ \d+ ms"
        assert all(re.fullmatch(pattern, line) for line in lines)
        assert all(f"{part} " in line for line in lines for part in ("read", "passes", "record"))

    def test_traced_graph(self, level, said):
        run(Scaled(), level)
        graphs = [m for m in said(logging.INFO) if m.startswith("traced graph ")]
        assert len(graphs) == (1 if level in TRACED else 0)
        for graph in graphs:
            onnx.parser.parse_model(graph.partition("\n")[2])
            assert "Gemm" in graph
            assert "com.microsoft.YieldOp" in graph

    def test_engine(self, level, said_by_engine):
        """Developers are told what passes did, and how much memory a step takes."""
        wrapped = run(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), level, times=2)
        spoken = said_by_engine(logging.INFO)
        if ENGINE_SPEAKS[level] > logging.INFO:
            assert spoken == said_by_engine(logging.DEBUG) == []
            return
        assert any(re.fullmatch(r"pass fuse_regions: \d+ rewrites in .* ms", m) for m in spoken)
        (steps,) = [m for m in spoken if re.fullmatch(r"steps of graph \d+: .*", m)]
        assert "2 region" in steps
        (plan,) = [m for m in spoken if m.startswith("plan of graph")]
        report = wrapped._calls._captured[0].state.programs[0].session.plan_report()
        assert f": {report['steps_forward']} forward and {report['steps_backward']} back" in plan
        assert plan.endswith(f", {report['peak_bytes'] / 1024:.1f} KiB at the peak")

    def test_engine_step_by_step(self, level, said_by_engine):
        run(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), level, times=2)
        spoken = said_by_engine(logging.DEBUG)
        assert len(spoken) == (2 if level == "VERBOSE" else 0)
        for text, words in zip(spoken, ("torch_ort.Region", "primals_3"), strict=False):
            assert re.match(r"(steps|plan) of graph \d+:\n", text)
            assert words in text

    @pytest.mark.hands_over("branches on data in training")
    def test_why_a_recording_was_left_to_aotautograd(self, level, caplog):
        run(Chooses(4, 3), level)
        told = [r for r in caplog.records if r.name == "torch_ort.recorder"]
        assert len(told) == (1 if VALUES[level] <= LogLevel.DEVINFO else 0)
        assert all("recorder: " in record.getMessage() for record in told)

    def test_reason_of_a_recapture(self, level, said):
        wrapped = run(Scaled(), level)
        wrapped(torch.ones(2, 4, dtype=torch.float64))
        again = [m for m in said(logging.INFO) if m.startswith("captured again, because ")]
        assert len(again) == (1 if VALUES[level] <= 2 else 0)
        assert all("args[0]: another dtype, device, layout or num" in reason for reason in again)

    @pytest.mark.hands_over("forward branches on data")
    @pytest.mark.filterwarnings("ignore::torch_ort.fallback.FallbackWarning")
    def test_traceback_of_a_fallback(self, level, said, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        run(Branches(4, 3), level)
        traces = [m for m in said(logging.INFO) if "Traceback" in m]
        assert len(traces) == (1 if VALUES[level] <= 2 else 0)
        assert all("return y * 2 if y.sum() > 0 else y * 3" in trace for trace in traces)
        assert all("ORTModuleONNXModelException" in trace for trace in traces)

    def test_nothing_on_standard_output(self, level, capfd):
        wrapped = run(Scaled(), level)
        wrapped(torch.ones(2, 4), torch.ones(3)).sum().backward()
        wrapped.recapture()
        wrapped(torch.ones(2, 4))
        assert capfd.readouterr().out == ""


class TestIntroduction:
    RULES = "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD ON, ORTMODULE_FALLBACK_POLICY {}"

    KERNELS = "kernels of its own for {}, else PyTorch's"

    def test_words(self, said):
        run(Scaled(), "INFO")
        isa = options.resolve().isa or torch_ort._C.isa_names()[-1]
        kernels = self.KERNELS.format(f"fused regions ({isa}), attention and products of matrices")
        assert said()[0] == f"{TITLE}, on cpu with {kernels} ({self.RULES.format('ON')})"

    def test_no_fallback(self, said, monkeypatch):
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
        run(Scaled(), "INFO")
        assert said()[0].endswith(f" ({self.RULES.format('OFF')})")

    @pytest.mark.parametrize(
        ("disabled", "words"),
        [
            ("products", KERNELS.format("fused regions (portable) and attention")),
            ("region_kernels", KERNELS.format("attention and products of matrices")),
            ("fuse_regions,products", KERNELS.format("attention")),
            ("own_kernels", "PyTorch's kernels"),
        ],
    )
    def test_kernels_that_are_switched_off(self, disabled, words, said):
        config = {"disable": disabled, "isa": "portable"}
        ORTModule(Scaled(), at("INFO", config=config))(X)
        assert said()[0].startswith(f"{TITLE}, on cpu with {words} (")

    def test_is_one_for_each_device(self, said):
        """Of a GPU without a driver the kernels are PyTorch's."""
        wrapped = run(Scaled(), "INFO")
        (program,) = wrapped._calls._captured[0].state.programs
        types = program.graph.types()
        assert {device for *_, device in types.values()} == {"cpu"}

        class OnGpu:
            def types(self) -> dict:
                return {"x": ("float", [2], [1], "cuda:0"), "seed": ("int64", [], [], "cpu")}

        settings, chosen = options.resolve_ortmodule(), options.resolve()
        on_gpu = replace(program, graph=OnGpu())
        for _ in range(2):
            logs.introduce(wrapped._calls.logger, settings, chosen, [on_gpu, program])
        titles = introductions(said())
        assert len(titles) == 2
        kernels = "PyTorch's kernels"
        if not torch_ort._C.cuda.missing():
            kernels = self.KERNELS.format("fused regions (CUDA C++)")
        assert titles[1].startswith(f"{TITLE}, on cuda with {kernels} (")

    def test_is_for_those_who_ask(self, said):
        run(Scaled())
        assert said() == []

    def test_comes_with_the_first_run(self, said):
        wrapped = ORTModule(Scaled(), at("INFO"))
        assert said() == []
        wrapped(torch.ones(2, 4))
        assert len(introductions(said())) == 1

    def test_is_one_for_all_modules(self, said):
        wrapped = run(Scaled(), "INFO")
        run(Scaled(), "INFO")
        copy.deepcopy(wrapped)(torch.ones(2, 4))
        wrapped.recapture()
        wrapped(torch.ones(2, 4, dtype=torch.float64))
        assert len(introductions(said())) == 1

    def test_a_module_that_says_nothing_does_not_take_it(self, said):
        run(Scaled())
        run(Scaled(), "INFO")
        assert len(introductions(said())) == 1

    @pytest.mark.hands_over("forward branches on data")
    @pytest.mark.filterwarnings("ignore::torch_ort.fallback.FallbackWarning")
    def test_is_not_there_if_nothing_was_captured(self, said, monkeypatch):
        """It would say of a module that it runs in the engine, which runs in PyTorch."""
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        run(Branches(4, 3), "INFO", times=2)
        assert introductions(said()) == []


class TestReasonOfRecapture:
    @pytest.mark.parametrize(
        ("first", "then", "words"),
        [
            ([X], [X.double()], "args[0]: another dtype, device, layout or number of dims"),
            ([X], [torch.ones(3, 2, 4)], "args[0]: another dtype, device, layout or number of dim"),
            ([X], [X.clone().requires_grad_()], "args[0]: requires_grad has changed"),
            ([X], [X, torch.ones(3)], "args: got 2 parts, captured with 1"),
            (
                [X, None],
                [X, torch.ones(3)],
                "args[1]: got tensor([1., 1., 1.]), captured with None",
            ),
            ([X, None, False], [X, None, True], "args[2]: got True, captured with False"),
        ],
        ids=["dtype", "rank", "requires_grad", "count", "presence", "bool"],
    )
    def test_of_an_argument(self, first, then, words, said):
        wrapped = ORTModule(Scaled(), at("INFO"))
        for args in (first, then):
            wrapped(*args)
        reasons = [m for m in said() if m.startswith("captured again, because ")]
        assert len(reasons) == 1
        assert words in reasons[0]

    def test_of_an_attribute(self, said):
        wrapped = run(Scaled(), "INFO")
        wrapped.scale = 3.0
        wrapped(torch.ones(2, 4))
        reasons = [m for m in said() if m.startswith("captured again, because ")]
        assert len(reasons) == 1
        assert "attribute 'scale'" in reasons[0]

    def test_none_where_the_graph_fits(self, said):
        wrapped = run(Scaled(), "INFO")
        wrapped(torch.ones(5, 4))
        assert not [m for m in said() if m.startswith("captured again")]

    def test_none_for_the_first_capture(self, said):
        run(Scaled(), "INFO")
        assert not [m for m in said() if m.startswith("captured again")]


@pytest.mark.hands_over("forward branches on data")
def test_a_fallback_is_a_warning_at_every_level(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    for level in LEVELS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(Branches(4, 3), level)
        assert len([w for w in caught if "plain PyTorch" in str(w.message)]) == 1


def environment_of_scripts(**names: str) -> dict[str, str]:
    others = {k: v for k, v in os.environ.items() if not k.startswith("ORTMODULE_")}
    return {**others, "TORCH_ORT_STRICT": "1", "OMP_NUM_THREADS": "1", **names}


def outputs(script: str, folder: Path, *ranks: tuple, **names: str) -> list[tuple[str, str]]:
    """Run a script in a process for each list of arguments; give the outputs and errors."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    done = run_forks(path, ranks, env=environment_of_scripts(**names))
    assert not any(each.returncode for each in done), [each.stderr[-4000:] for each in done]
    return [(each.stdout, each.stderr) for each in done]


RANKS = """
    import contextlib, io, json, logging, sys
    import torch
    import torch.distributed as dist
    from torch_ort import DebugOptions, LogLevel, ORTModule

    rank, store, report = int(sys.argv[1]), *sys.argv[2:]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    logger = logging.getLogger(f"orttraining.rank-{rank}")
    seen = {}
    for level in LogLevel:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            model = ORTModule(torch.nn.Linear(4, 3), DebugOptions(log_level=level))
            ddp = torch.nn.parallel.DistributedDataParallel(model)
            for _ in range(2):
                ddp(torch.ones(2, 4)).sum().backward()
        seen[level.name] = {
            "log": err.getvalue(), "disabled": logger.disabled, "level": logger.level,
            "names": [n for n in logging.root.manager.loggerDict if n.startswith("orttraining")],
        }
    dist.barrier()
    dist.destroy_process_group()
    with open(report, "w") as file:
        json.dump(seen, file)
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """Give what two ranks say, by level; none of it is on standard output."""
    folder = tmp_path_factory.mktemp("ranks")
    reports = [folder / f"report_{rank}" for rank in range(2)]
    arguments = [(rank, folder / "store", report) for rank, report in enumerate(reports)]
    written = outputs(textwrap.dedent(RANKS) + LEAVE, folder, *arguments)
    assert [out for out, _ in written] == ["", ""]
    return [json.loads(report.read_text()) for report in reports]


@pytest.mark.parametrize("level", LEVELS)
class TestRanks:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_logger_name(self, level, rank, ranks):
        assert f"orttraining.rank-{rank}" in ranks[rank][level]["names"]
        assert f"orttraining.rank-{1 - rank}" not in ranks[rank][level]["names"]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_level(self, level, rank, ranks):
        of_logger = ranks[rank][level]["level"]
        assert of_logger <= SPEAKS[level]
        assert of_logger > SPEAKS[level] - 10 or VALUES[level] <= LogLevel.DEVINFO

    def test_rank_0_speaks(self, level, ranks):
        of_rank = ranks[0][level]
        assert not of_rank["disabled"]
        assert ("captured a training graph" in of_rank["log"]) == (VALUES[level] <= LogLevel.INFO)
        assert "orttraining.rank-0 [WARNING]" not in of_rank["log"]

    def test_other_ranks_speak_to_developers_only(self, level, ranks):
        of_rank = ranks[1][level]
        assert of_rank["disabled"] == (level in SILENT_ELSEWHERE)
        if level in SILENT_ELSEWHERE:
            assert of_rank["log"] == ""
        else:
            assert "orttraining.rank-1 [INFO] - captured a training graph" in of_rank["log"]


def test_introduction_is_of_rank_0_only(ranks):
    assert sum(of_level["log"].count(TITLE) for of_level in ranks[0].values()) == 1
    assert not any(TITLE in of_level["log"] for of_level in ranks[1].values())


class TestStandardError:
    SCRIPT = """
        import logging, sys, torch
        from torch_ort import DebugOptions, LogLevel, ORTModule
        if "first" in sys.argv:
            logging.basicConfig(format="user %(message)s")
        module = ORTModule(torch.nn.Linear(4, 3), DebugOptions(log_level=LogLevel.INFO))
        if "later" in sys.argv:
            logging.basicConfig(format="user %(message)s")
        module(torch.ones(2, 4))
    """

    def test_has_the_log(self, tmp_path):
        ((out, err),) = outputs(self.SCRIPT, tmp_path, ())
        assert out == ""
        assert err.count(TITLE) == 1
        line = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} orttraining \[INFO\] - captured a training"
        assert re.search(line, err, re.M)

    def test_handlers_of_the_user_replace_ours(self, tmp_path):
        ((_, err),) = outputs(self.SCRIPT, tmp_path, ("first",))
        assert err.count(TITLE) == 1
        assert "user captured a training graph" in err
        assert "[INFO]" not in err

    def test_a_level_of_the_environment(self, tmp_path):
        written = outputs(self.SCRIPT, tmp_path, (), ORTMODULE_LOG_LEVEL="FATAL")
        assert written == [("", "")]


DEBUGGER = """
    import pdb, sys
    import torch
    from torch_ort import DebugOptions, LogLevel, ORTModule, counters, reset_counters

    class Stops(torch.nn.Linear):
        def forward(self, x):
            answer = 6 * 7
            pdb.set_trace()
            return super().forward(x) * answer

    plain = torch.nn.Linear(4, 3)
    x = torch.ones(2, 4)
    for level in LogLevel:
        for stream in (sys.stdout, sys.stderr):
            print("LEVEL", level.name, file=stream, flush=True)
        reset_counters()
        module = Stops(4, 3)
        module.load_state_dict(plain.state_dict())
        result = ORTModule(module, DebugOptions(log_level=level))(x)
        result.sum().backward()
        torch.testing.assert_close(result, plain(x) * 42)
        assert counters()["backward_runs"] == 1, counters()
"""


@pytest.fixture(scope="module")
def debugged() -> dict[str, list[str]]:
    """Give what a forward that stops in the debugger leaves on both outputs, by level."""
    # Capture runs forward more than once.
    commands = "p 'answer', answer\nx.shape\nc\n" * 4 * len(LEVELS)
    done = run_python("-c", textwrap.dedent(DEBUGGER), input=commands, env=environment_of_scripts())
    assert done.returncode == 0, done.stderr[-4000:]
    parts = [re.split(r"LEVEL (\w+)\n", text) for text in (done.stdout, done.stderr)]
    assert all(part[1::2] == LEVELS for part in parts)
    return {level: [part[2 * i + 2] for part in parts] for i, level in enumerate(LEVELS)}


@pytest.mark.parametrize("level", LEVELS)
class TestDebugger:
    def test_answers_on_standard_output(self, level, debugged):
        out, _ = debugged[level]
        assert "(Pdb) ('answer', 42)" in out
        assert "torch.Size([" in out

    def test_stops_in_forward(self, level, debugged):
        out, _ = debugged[level]
        assert 1 <= out.count("> <string>(10)forward()") <= 4

    def test_the_log_goes_elsewhere(self, level, debugged):
        out, err = debugged[level]
        assert "captured a training graph" not in out
        assert ("captured a training graph" in err) == (VALUES[level] <= LogLevel.INFO)
