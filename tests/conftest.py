# What all tests share: the backend under test, devices, strict mode, and the comparison of a
# compiled training run with an eager one.
from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from emulated import cuda_device

if TYPE_CHECKING:
    from types import ModuleType

    from comparison import Run

OURS = ("ort", "ortmodule")

# Read as torch is loaded, here and in processes of tests: OpenMP's threads that wait for work would
# spin on cores that other test processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--backend",
        help="torch.compile backend of the semantic tests (aot_eager checks the tests themselves), "
        "or ortmodule to wrap what they compile in an ORTModule; both roads if left out",
    )
    parser.addoption(
        "--accept", action="store_true", help="write the graphs that passes leave into their cases"
    )
    parser.addoption("--run-slow", action="store_true", help="run tests marked slow as well")
    # The earliest hook of a conftest: none below this folder has imported torch yet.
    asked_for = pluginmanager.get_plugin("pytestconfig").known_args_namespace.markexpr or ""
    if "cuda" in asked_for.replace("not cuda", "") and cuda_device.is_possible():
        cuda_device.activate()
        cuda_device.use_driver()


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "aot_eager_fails(reason): stock AOTAutograd is known to fail this; expected with "
        "--backend aot_eager only",
        "both_roads: runs through torch.compile and through an ORTModule",
        "ort_only: reads counters of torch_ort; skipped with another --backend",
        "compile_only(reason): about torch.compile itself; skipped where an ORTModule runs",
        "also_on_cuda: of regions for all ISAS; -m cuda runs it on a GPU",
        "hands_over(reason): the recorder leaves something to AOTAutograd, as it should",
    ):
        config.addinivalue_line("markers", line)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what is marked both_roads through either road, unless one is asked for."""
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    asked_for = metafunc.config.getoption("--backend")
    if "backend" in metafunc.fixturenames and "both_roads" in marks and not asked_for:
        roads = OURS[:1] if "compile_only" in marks else OURS
        metafunc.parametrize("backend", roads, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    keep_slow = config.getoption("--run-slow") or "slow" in (config.getoption("-m") or "")
    for item in items:
        takes_turns = item.get_closest_marker("both_roads") and hasattr(item, "callspec")
        chosen = item.callspec.params.get("backend") if takes_turns else None
        backend = chosen or config.getoption("--backend") or "ort"
        known = item.get_closest_marker("aot_eager_fails")
        if known and backend == "aot_eager":
            item.add_marker(pytest.mark.xfail(reason=known.args[0], strict=True))
        if item.get_closest_marker("ort_only") and backend not in OURS:
            item.add_marker(pytest.mark.skip(reason="reads counters of torch_ort"))
        if item.get_closest_marker("compile_only") and backend == "ortmodule":
            item.add_marker(pytest.mark.skip(reason="about torch.compile itself"))
        if item.get_closest_marker("slow") and not keep_slow:
            item.add_marker(pytest.mark.skip(reason="slow: ask with --run-slow"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device: ask with -m cuda for the test device")


def _seed(torch: ModuleType) -> None:
    """Seed all generators. Where there is no GPU, PyTorch would note for later who asked for it."""
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


def _reset() -> None:
    # Rooms that never import torch are not made to pay for it.
    if "torch" in sys.modules:
        _seed(sys.modules["torch"])
    if "torch_ort" in sys.modules:
        sys.modules["torch_ort"].reset_counters()
        sys.modules["torch_ort"]._C.set_failpoint(None)
    # A record that pytest keeps for a loud logger keeps alive what the test wants freed.
    for name in ("orttraining", "orttraining.engine", "torch_ort"):
        logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger(name).disabled = False
    # PyTorch prints its graphs for this logger as soon as somebody listens to it, as pytest does
    # to each one that does not propagate.
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()


def _forget_graphs() -> None:
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
        sys.modules["torch._dynamo.utils"].counters.clear()


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Keep what lives by now out of garbage collections: many tests ask for one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test strict mode, a seed, eager's numbers, and nothing of the test before it."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "1")
    _reset()
    yield
    _forget_graphs()
    _reset()


@pytest.fixture(autouse=True)
def nothing_handed_over(request: pytest.FixtureRequest, fresh_state: None) -> Iterator[None]:
    """Fail a test in which the recorder leaves a capture to AOTAutograd, unless it says so.

    Such captures are only slower: a bug of a shape rule would show nowhere else.
    """
    yield
    if "torch_ort" not in sys.modules or request.node.get_closest_marker("hands_over"):
        return
    count = sys.modules["torch_ort"].counters()["recordings_handed_over"]
    assert count == 0, f"{count} captures were left to AOTAutograd: --log-level=INFO says why"


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """Return what runs the test: a backend of torch.compile, or ortmodule."""
    return getattr(request, "param", None) or request.config.getoption("--backend") or "ort"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def compiled(backend: str) -> Callable[..., Any]:
    """Return `torch.compile` with the backend under test; a graph break is an error by default."""

    def compile_with_backend(target: Any, **settings: Any) -> Any:
        import torch

        if backend == "ortmodule":
            return wrap(target, **settings)
        settings.setdefault("fullgraph", True)
        return torch.compile(target, backend=backend, **settings)

    return compile_with_backend


def wrap(target: Any, options: dict | None = None, **unused: Any) -> Any:
    """Return a module, or a function as one, in an ORTModule."""
    import torch

    import torch_ort

    class Calls(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return target(*args, **kwargs)

    module = target if isinstance(target, torch.nn.Module) else Calls()
    return torch_ort.ORTModule(module, torch_ort.DebugOptions(config=options))


@pytest.fixture
def both(compiled: Callable) -> Callable[[Any], list]:
    """Return a function that pairs an eager callable with its compiled form."""
    return lambda target: [target, compiled(target)]


@pytest.fixture
def assert_engine_ran(backend: str) -> Callable[..., None]:
    """Return a check that the engine, and not eager PyTorch, did the work so far."""

    def check(backward: bool = False) -> None:
        if backend not in OURS:
            from torch._dynamo.utils import counters as of_torch

            assert of_torch["stats"]["unique_graphs"] > 0, "torch captured nothing"
            return
        import torch_ort

        counters = torch_ort.counters()
        assert counters["fallbacks"] == counters["calls_left_to_eager"] == 0, counters
        assert counters["forward_runs"] > 0, counters
        assert not backward or counters["backward_runs"] > 0, counters

    return check


@pytest.fixture
def graphs_captured(backend: str) -> Callable[[], int]:
    """Return a function that counts the graphs captured since the test began."""

    def count() -> int:
        if backend in OURS:
            import torch_ort

            return torch_ort.counters()["graphs_captured"]
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]

    return count


def _finish_backward_thread() -> None:
    """Have autograd's thread of the device let go of the graph that it has run last.

    Who waits for a backward pass is told of its end, or of its error, just before that.
    """
    import torch

    x = torch.ones((), device="cuda", requires_grad=True)
    (x * 2).backward()


@pytest.fixture
def live_contexts(backend: str, request: pytest.FixtureRequest) -> Callable[[], int]:
    """Return a function that counts contexts made by this test and still alive."""

    def count() -> int:
        if request.node.get_closest_marker("cuda"):
            _finish_backward_thread()
        gc.collect()
        if backend not in OURS:
            return 0
        import torch_ort

        return torch_ort.counters()["contexts_live"]

    # A leak of another test is that test's failure.
    before = count()
    return lambda: count() - before


@pytest.fixture
def compare_training(
    compiled: Callable, device: str, assert_engine_ran: Callable
) -> Callable[..., tuple[Run, Run]]:
    """Return a function that trains an eager and a compiled copy and compares them.

    `make_model()` builds a module or a function, `make_inputs(step)` the arguments of one call;
    both are called once per copy, with equal seeds and with `device` as the default device.
    The function returns both runs for further checks.
    """

    def compare(
        make_model: Callable[[], Any],
        make_inputs: Callable[[int], Any],
        *,
        rtol: float | None = None,
        atol: float | None = None,
        check_stride: bool = True,
        compile_settings: dict | None = None,
        **settings: Any,
    ) -> tuple[Run, Run]:
        from comparison import Options, assert_same_runs, build, train

        options = Options(**settings)
        eager, ours = (build(make_model, device=device, seed=options.seed) for _ in range(2))
        want = train(eager, eager, make_inputs, device, options)
        got = train(ours, compiled(ours, **(compile_settings or {})), make_inputs, device, options)
        assert_same_runs(want, got, rtol, atol, check_stride)
        assert_engine_ran(backward=got.backwards > 0)
        return want, got

    return compare


@pytest.fixture
def few_registers() -> Iterator[None]:
    """Let passes judge oneDNN as on a processor with AVX2, whatever this one has."""
    yield from planted("few_registers")


@pytest.fixture
def many_registers() -> Iterator[None]:
    """The same as on one with AVX-512."""
    yield from planted("many_registers")


def planted(codegen: str) -> Iterator[None]:
    from torch_ort import _C

    _C.testing.plant_codegen(codegen)
    yield
    _C.testing.plant_codegen("own")
