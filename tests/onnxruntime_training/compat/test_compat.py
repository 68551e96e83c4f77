"""The old import paths beside a copy of the real onnxruntime, and the command that places them."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import runpy
import shutil
import sys
import textwrap
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from own_process import run_python

import torch_ort
from torch_ort.compat.custom_autograd import enable_custom_autograd_support
from torch_ort.functions import capturing
from torch_ort.onnxruntime_training.compat import old_names, placing
from torch_ort.onnxruntime_training.compat.command import main

REAL = PathFinder.find_spec("onnxruntime")
COUNT = len(old_names.MODULES) + len(old_names.BESIDE)
needs_onnxruntime = pytest.mark.skipif(REAL is None, reason="onnxruntime is not installed")

# What seeds of the specification and its tables write.
BUILT = {
    "onnxruntime.training": "ORTModule ORTTrainer ORTTrainerOptions TrainStepInfo",
    "onnxruntime.training.amp": "LossScaler DynamicLossScaler",
    "onnxruntime.training.amp.loss_scaler": "LossScaler DynamicLossScaler",
    "onnxruntime.training.checkpoint": "aggregate_checkpoints experimental_save_checkpoint "
    "experimental_load_checkpoint experimental_state_dict experimental_load_state_dict",
    "onnxruntime.training.orttrainer": "ORTTrainer TrainStepInfo",
    "onnxruntime.training.orttrainer_options": "ORTTrainerOptions",
    "onnxruntime.training.ort_trainer": "ORTTrainer IODescription ModelDescription LossScaler "
    "save_checkpoint load_checkpoint",
    "onnxruntime.capi.ort_trainer": "ORTTrainer IODescription ModelDescription LossScaler",
    "onnxruntime.training.optim.config": "AdamConfig LambConfig SGDConfig",
    "onnxruntime.training.optim.lr_scheduler": "ConstantWarmupLRScheduler "
    "CosineWarmupLRScheduler LinearWarmupLRScheduler PolyWarmupLRScheduler",
    "onnxruntime.training.api": "CheckpointState Module Optimizer LRScheduler LinearLRScheduler",
    "onnxruntime.training.artifacts": "generate_artifacts LossType OptimType",
    "onnxruntime.training.ortmodule": "ORTModule DebugOptions LogLevel register_graph_optimizer",
    "onnxruntime.training.ortmodule._fallback": "ORTModuleIOError ORTModuleInitException",
    "onnxruntime.training.ortmodule._fallback_exceptions": "ORTModuleFallbackException "
    "ORTModuleDeviceException ORTModuleTorchModelException ORTModuleONNXModelException",
    "onnxruntime.training.ortmodule._custom_autograd_function": "enable_custom_autograd_support",
    "onnxruntime.training.ortmodule.debug_options": "DebugOptions",
    "onnxruntime.training.ortmodule.graph_optimizers": "register_graph_optimizer",
    "onnxruntime.training.ortmodule.experimental.hierarchical_ortmodule": "HierarchicalORTModule",
    "onnxruntime.training.ortmodule.experimental.json_config": "load_from_json",
    "onnxruntime.training.ortmodule.options": "DebugOptions LogLevel",
    "onnxruntime.training.ortmodule._logger": "LogLevel",
    "onnxruntime.training.ortmodule.ortmodule": "ORTModule",
    "onnxruntime.training.ortmodule.graph_optimizer_registry": "register_graph_optimizer",
    "onnxruntime.training.ortmodule.torch_cpp_extensions": "is_installed",
    "onnxruntime.training.utils.data": "LoadBalancingDistributedSampler "
    "LoadBalancingDistributedBatchSampler TokenBudgetPacker TokenBudgetBatchSampler",
    "onnxruntime.training.utils.data.sampler": "LoadBalancingDistributedSampler "
    "LoadBalancingDistributedBatchSampler",
    "onnxruntime.training.optim": "FusedAdam FP16_Optimizer AdamWMode LambConfig "
    "AdamConfig SGDConfig",
    "onnxruntime.training.optim.fp16_optimizer": "FP16_Optimizer",
    "onnxruntime.training.optim.fused_adam": "FusedAdam AdamWMode",
}
# Built or not: whichever it is, the import answers so.
KNOWN = {
    "onnxruntime.training": "TrainingSession TrainingParameters",
    "onnxruntime.training.ortmodule.experimental.pipe": "ORTPipelineModule",
    "onnxruntime.training.utils.hooks": "GlobalSubscriberManager StatisticsSubscriber "
    "inspect_activation",
    "onnxruntime.training.pytorch": "trainer",
    "onnxruntime.training.experimental": "export_gradient_graph",
    "onnxruntime.training.onnxblock": "TrainingBlock",
    "onnxruntime.training.onnxblock.loss": "CrossEntropyLoss",
    "onnxruntime.training.onnxblock.optim": "AdamW ClipGradNorm",
    "onnxruntime.training.ort_triton": "register_triton_kernel",
    "onnxruntime.training.ortmodule._custom_gradient_registry": "register_gradient",
    "onnxruntime.training.ortmodule._custom_op_symbolic_registry": "CustomOpSymbolicRegistry",
    "onnxruntime.training.torchdynamo.register_backend": "aot_ort ort make_aot_ort",
}

IMPORT_ALL = """
import importlib, json, sys
import onnxruntime
facts = {"torch_with_onnxruntime": "torch" in sys.modules}
for module, names in json.loads(sys.argv[1]).items():
    for name in names.split():
        namespace = {}
        try:
            exec(f"from {module} import {name} as it", namespace)
            it = namespace["it"]
            named = it if hasattr(it, "__qualname__") else type(it)
            facts[f"{module}.{name}"] = f"{named.__module__}.{named.__qualname__}"
        except ImportError as error:
            facts[f"{module}.{name}"] = f"ImportError: {error}"
for statement in (
    "import onnxruntime.training.pytorch as ort",
    "import onnxruntime.training.api",
    "from onnxruntime.training import amp, checkpoint, optim, model_desc_validation",
    "from onnxruntime.training.ortmodule import Unheard",
    "from onnxruntime.training.unheard import ORTModule",
):
    try:
        exec(statement, {})
        facts[statement] = "imported"
    except ImportError as error:
        facts[statement] = str(error)
from onnxruntime.training.ortmodule.torch_cpp_extensions import install
from torch_ort.onnxruntime_training.compat import old_names
facts["same"] = [
    f"{old_names._dotted(path)}.{old}"
    for path, rows in old_names.MODULES.items()
    for row in rows
    for old, new in row.pairs()
    if hasattr(source := old_names._import_if_there(row.source), new)
    and getattr(sys.modules[old_names._dotted(path)], old) is getattr(source, new)
]
namespace = {}
exec("from onnxruntime.training.ortmodule import *", namespace)
facts["star"] = sorted(namespace.keys() - {"__builtins__"})
facts["providers"] = onnxruntime.get_available_providers()
facts["file"] = onnxruntime.training.__file__
print(json.dumps(facts))
"""

TRAIN = """
import onnxruntime.training
import torch
HierarchicalORTModule = (
    onnxruntime.training.ortmodule.experimental.hierarchical_ortmodule.HierarchicalORTModule
)
from onnxruntime.training.ortmodule import ORTModule, DebugOptions, LogLevel
from onnxruntime.training.ortmodule._custom_autograd_function import enable_custom_autograd_support
from onnxruntime.training.ortmodule.experimental.json_config import load_from_json

enable_custom_autograd_support(False)

def train(wrap):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
    model = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)

options = DebugOptions(save_onnx=True, log_level=LogLevel.ERROR, onnx_prefix="model_name")
want = train(lambda model: model)
torch.testing.assert_close(train(lambda model: ORTModule(model, options)), want)
torch.testing.assert_close(train(onnxruntime.training.ORTModule), want)
torch.testing.assert_close(train(HierarchicalORTModule), want)

import torch_ort
assert ORTModule is torch_ort.ORTModule
counters = torch_ort.counters()
assert counters["forward_runs"] == counters["backward_runs"] == 9, counters
assert counters["fallbacks"] == 0, counters

# Inference runs on, beside it.
import glob, numpy, onnxruntime
session = onnxruntime.InferenceSession("relu.onnx")
assert session.run(None, {"x": numpy.float32([-1, 2])})[0].tolist() == [0, 2]
print("trained", sorted(glob.glob("model_name*")))
"""

RELU = '<ir_version: 10, opset_import: ["" : 20]> net (float[2] x) => (float[2] y) { y = Relu(x) }'

# Asks for ORTModule while it is imported itself, as ONNX Runtime up to 1.21 does.
ASKS = """
try:
    from onnxruntime.training.ortmodule import ORTModule
    has_ortmodule = True
except ImportError as error:
    has_ortmodule, answer = False, str(error)
"""


def run_beside(site: Path, *arguments: str, cwd: Path | None = None):
    """Run Python in a process of its own, with `site` before all other packages."""
    return run_python(*arguments, cwd=cwd or site, env=os.environ | {"PYTHONPATH": str(site)})


def contents(folder: Path) -> dict[str, str]:
    """Give a hash of each file below a folder, but for bytecode, which Python writes by itself."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def real_site(tmp_path_factory):
    """Copy the installed onnxruntime into a folder of its own."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(REAL.submodule_search_locations[0], site / "onnxruntime")
    return site


@pytest.fixture(scope="module")
def placed_site(real_site):
    """Install into the copy, and uninstall at the end; nothing but the new folder may change."""
    before = contents(real_site)
    result = run_beside(real_site, "-m", "torch_ort.compat", "install")
    assert result.returncode == 0, result.stderr
    folder = real_site / "onnxruntime" / "training"
    assert result.stdout == (
        f"{folder}: placed {COUNT} modules for the old import paths, "
        "onnxruntime/capi/ort_trainer.py among them\n"
    )
    after = contents(real_site)
    assert before.items() <= after.items()
    assert {name for name in after if name not in before} == {
        os.path.normpath(f"onnxruntime/training/{name}")
        for name in (*placing.files(), placing.MARKER)
    }
    yield real_site
    result = run_beside(real_site, "-m", "torch_ort.compat", "uninstall")
    assert (result.returncode, result.stdout) == (0, f"{folder}: removed\n"), result.stderr
    assert contents(real_site) == before
    assert not folder.exists()


@pytest.fixture(scope="module")
def facts(placed_site):
    """Import everything in one process; give what came of it by statement."""
    names = {
        old_names._dotted(path): " ".join(old for row in rows for old, _ in row.pairs())
        for path, rows in old_names.MODULES.items()
    }
    for module, more in (*BUILT.items(), *KNOWN.items()):
        names[module] = f"{names.get(module, '')} {more}"
    result = run_beside(placed_site, "-c", IMPORT_ALL, json.dumps(names))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Make a folder with the outline of an onnxruntime the only one that onnxruntime is found in.

    The commands run in this process here; they do not import what they find.
    """
    package = tmp_path / "site" / "onnxruntime"
    (package / "capi").mkdir(parents=True)
    (package / "__init__.py").write_text(ASKS)
    monkeypatch.setattr(sys, "path", [str(package.parent)])
    return package


@needs_onnxruntime
@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in BUILT for name in BUILT[module].split()]
)
def test_what_is_built_imports_by_its_old_path(facts, module, name):
    got = facts[f"{module}.{name}"]
    assert got.startswith("torch_ort.")
    assert got.endswith(f".{name}")


@needs_onnxruntime
@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in KNOWN for name in KNOWN[module].split()]
)
def test_what_may_not_be_built_answers_by_its_old_path(facts, module, name):
    got = facts[f"{module}.{name}"]
    if not got.startswith("torch_ort."):
        assert got.startswith(f"ImportError: {module}")
        assert ": not built yet in torch_ort; " in got


@needs_onnxruntime
def test_each_name_of_the_table_is_what_its_source_has_or_says_what_to_use(facts):
    rows = [(path, row) for path, rows in old_names.MODULES.items() for row in rows]
    for path, row in rows:
        for old, _ in row.pairs():
            name = f"{old_names._dotted(path)}.{old}"
            if name not in facts["same"]:
                use = f"use {row.instead}" if row.instead else "nothing takes its place"
                assert facts[name].endswith(f": not built yet in torch_ort; {use}")


@needs_onnxruntime
def test_the_texts_of_missing_paths(facts):
    assert facts["import onnxruntime.training.pytorch as ort"] == "imported"
    assert facts["import onnxruntime.training.api"] == "imported"
    assert facts["onnxruntime.training.TrainingSession"] == (
        "ImportError: onnxruntime.training.TrainingSession: not built yet in torch_ort; "
        "use ORTModule in a training loop of PyTorch"
    )
    assert facts[
        "from onnxruntime.training import amp, checkpoint, optim, model_desc_validation"
    ] == ("imported")
    assert facts[
        "onnxruntime.training.ortmodule._custom_gradient_registry.register_gradient"
    ].endswith("not built yet in torch_ort; use torch.autograd.Function or torch.library")
    assert facts["onnxruntime.training.ortmodule.experimental.pipe.ORTPipelineModule"].endswith(
        "not built yet in torch_ort; use ORTModule around each layer of the pipeline"
    )
    assert facts["onnxruntime.training.torchdynamo.register_backend.aot_ort"].endswith(
        'not built yet in torch_ort; use torch.compile(model, backend="ort")'
    )
    # Names that nobody has heard of get Python's own words.
    unheard = facts["from onnxruntime.training.ortmodule import Unheard"]
    assert "cannot import name 'Unheard' from 'onnxruntime.training.ortmodule'" in unheard
    assert "No module named" in facts["from onnxruntime.training.unheard import ORTModule"]


@needs_onnxruntime
def test_onnxruntime_itself_stays_as_it_is(facts, placed_site):
    assert not facts["torch_with_onnxruntime"], "inference does not pay for an import of torch"
    assert "CPUExecutionProvider" in facts["providers"]
    assert facts["file"] == str(placed_site / "onnxruntime" / "training" / "__init__.py")
    assert facts["star"] == [
        "DebugOptions", "LogLevel", "ORTMODULE_TORCH_CPP_DIR", "ORTModule",
        "register_graph_optimizer",
    ]  # fmt: skip


@needs_onnxruntime
def test_an_old_script_trains(placed_site, tmp_path):
    import onnx

    onnx.save(onnx.parser.parse_model(RELU), tmp_path / "relu.onnx")
    result = run_beside(placed_site, "-c", TRAIN, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("trained ['model_name_")
    assert "each torch.autograd.Function is traced through" in result.stderr


TRAINER = """
import torch
import onnxruntime.training.pytorch as ort

class Net(torch.nn.Module):
    def __init__(self, D_in, H, D_out):
        super().__init__()
        self.first, self.second = torch.nn.Linear(D_in, H), torch.nn.Linear(H, D_out)

    def forward(self, x):
        return self.second(self.first(x).clamp(min=0))

torch.manual_seed(0)
x, y = torch.randn(64, 100), torch.randn(64, 10)
model = Net(100, 30, 10)
criterion = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
trainer = ort.trainer(model, criterion, optimizer)
losses = []
for t in range(50):
    loss, y_pred = trainer.step(x, y)
    losses.append(loss.item())
assert y_pred.shape == y.shape and losses[-1] < 0.8 * losses[0], losses

import torch_ort
counters = torch_ort.counters()
assert counters["fallbacks"] == 0 and counters["backward_runs"] == 50, counters
"""


@needs_onnxruntime
def test_the_trainer_of_the_first_scripts_trains(placed_site):
    result = run_beside(placed_site, "-c", TRAINER)
    assert result.returncode == 0, result.stderr


# What the guidelines export, apart from paths.
SWITCHES = {
    "ORTMODULE_ONNX_OPSET_VERSION": "14",
    "ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE",
    "ORTMODULE_LOG_LEVEL": "WARNING",
    "ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT": "1",
    "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": "1",
    "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": "1",
    "ORTMODULE_ENABLE_SPARSE_OPTIMIZER": "1",
    "ORTMODULE_PRINT_INPUT_DENSITY": "1",
    "ORTMODULE_PRINT_MEMORY_STATS": "1",
    "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER": "1",
    "ORTMODULE_USE_EFFICIENT_ATTENTION": "1",
    "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT": "1",
    "ORTMODULE_MEMORY_OPT_LEVEL": "0",
    "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT": "1",
    "ORTMODULE_USE_TRITON": "1",
    "ORTMODULE_USE_FLASH_ATTENTION": "1",
    "ORTMODULE_TRITON_DEBUG": "1",
}
GUIDELINES = Path(__file__).parents[2] / "guides" / "samples" / "guidelines.py"


@needs_onnxruntime
def test_the_calls_of_the_guidelines_run_with_their_switches(placed_site, tmp_path, monkeypatch):
    for name, value in SWITCHES.items():
        monkeypatch.setenv(name, value)
    result = run_beside(placed_site, str(GUIDELINES), cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@needs_onnxruntime
def test_the_old_build_step_says_that_nothing_has_to_be_built(placed_site):
    module = "onnxruntime.training.ortmodule.torch_cpp_extensions.install"
    result = run_beside(placed_site, "-m", module)
    assert (result.returncode, result.stderr) == (0, "")
    assert "nothing to build" in result.stdout


def test_the_comparison_of_two_runs_is_a_command(monkeypatch, capsys):
    name = "onnxruntime.training.utils.hooks.merge_activation_summary"
    spec = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as error:
        old_names.open_module({"__name__": "__main__", "__spec__": spec})
    assert error.value.code == 0
    assert "--pt_dir" in capsys.readouterr().out


def test_configure_says_that_nothing_has_to_be_configured(capsys):
    runpy.run_module("torch_ort.configure", run_name="__main__")
    assert "nothing to configure" in capsys.readouterr().out


@needs_onnxruntime
def test_old_questions_about_extensions_are_answered(placed_site):
    code = """
        from pathlib import Path
        import torch_ort
        from onnxruntime.training.ortmodule import ORTMODULE_TORCH_CPP_DIR
        from onnxruntime.training.ortmodule.torch_cpp_extensions import is_installed
        assert is_installed(ORTMODULE_TORCH_CPP_DIR) and is_installed()
        assert Path(torch_ort._C.__file__).parent == Path(ORTMODULE_TORCH_CPP_DIR)
    """
    result = run_beside(placed_site, "-c", textwrap.dedent(code))
    assert result.returncode == 0, result.stderr


def test_an_onnxruntime_that_asks_while_it_is_imported(site):
    assert main(["install"]) == 0
    code = textwrap.dedent("""
        import sys, onnxruntime
        assert not onnxruntime.has_ortmodule
        assert "training: not while onnxruntime itself is imported" in onnxruntime.answer
        assert "torch" not in sys.modules
        from onnxruntime.training.ortmodule import ORTModule
        assert "torch" in sys.modules
    """)
    result = run_beside(site.parent, "-c", code)
    assert result.returncode == 0, result.stderr


def test_install_and_uninstall_twice(site, capsys):
    before = contents(site)
    placed = f"placed {COUNT} modules"
    words = (placed, "in place already", "removed", "not there, nothing to remove")
    for command, text in zip(("install", "install", "uninstall", "uninstall"), words, strict=True):
        assert main([command]) == 0
        assert text in capsys.readouterr().out
    assert contents(site) == before
    assert sorted(path.name for path in site.iterdir()) == ["__init__.py", "capi"]


def test_status_tells_each_state(site, capsys, monkeypatch):
    def status() -> str:
        assert main(["status"]) == 0
        return capsys.readouterr().out

    assert f"onnxruntime: {site}\n" in status()
    assert "not there; `python -m torch_ort.compat install` places it" in status()
    main(["install"])
    assert f"onnxruntime.training: placed by torch_ort, {COUNT} modules\n" in status()
    (site / "training" / "pytorch.py").write_text("changed")
    (site / "training" / "api.py").unlink()
    assert f"{COUNT} modules; changed: pytorch.py; gone: api.py" in status()
    monkeypatch.setitem(old_names.MODULES, "newer", ())
    assert f"not those of torch_ort {torch_ort.__version__}, run install again" in status()
    (site / "__init__.py").unlink()
    assert f"onnxruntime: gone from {site}" in status()
    shutil.rmtree(site)
    assert status() == "onnxruntime: not installed\n"


def test_no_onnxruntime_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert main(["install"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "compat install: no onnxruntime is installed here, want one for inference; "
        "run `pip install onnxruntime` first\n"
    )
    assert main(["uninstall"]) == 0
    assert capsys.readouterr().out == "no onnxruntime is installed here, nothing to remove\n"
    assert not list(tmp_path.iterdir())


def test_a_checkout_of_the_sources_is_no_onnxruntime(site, capsys):
    (site / "capi").rmdir()
    assert main(["install"]) == 1
    assert "no onnxruntime is installed here" in capsys.readouterr().err
    assert not (site / "training").exists()


@pytest.mark.parametrize("name", ["onnxruntime-training", "onnxruntime_training_cpu"])
def test_the_distribution_of_a_training_build_is_refused(site, capsys, name):
    info = site.parent / "a_build-1.19.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.19\n")
    dashed = name.replace("_", "-")
    assert main(["install"]) == 1
    assert capsys.readouterr().err == (
        f"compat install: the distribution {dashed} is installed, want onnxruntime for inference; "
        f"run `pip uninstall {dashed}` first\n"
    )
    assert not (site / "training").exists()
    assert main(["status"]) == 0
    assert f"training build: the distribution {dashed}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["install", "uninstall"])
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_training_that_is_not_ours_is_left_alone(site, tmp_path, capsys, command, kind):
    folder = site / "training"
    if kind == "folder":
        folder.mkdir()
        (folder / "__init__.py").write_text("theirs")
    elif kind == "file":
        folder.write_text("theirs")
    else:
        folder.symlink_to(tmp_path / "elsewhere")
    before = contents(site)
    assert main([command]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"compat {command}: {folder}: not placed by torch_ort, left alone\n"
    assert contents(site) == before
    assert main(["status"]) == 0
    assert f"{folder}: not placed by torch_ort, left alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", '{"files": 3}', '{"files": {"../__init__.py": ""}}']
)
@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_a_marker_that_is_not_as_written_is_refused(site, capsys, command, text):
    main(["install"])
    marker = site / "training" / placing.MARKER
    marker.write_text(text)
    before = contents(site)
    assert main([command]) == 1
    err = capsys.readouterr().err
    assert f"{marker}: cannot be read; remove {site / 'training'} by hand" in err
    assert contents(site) == before


def test_what_others_changed_or_added_is_left(site, capsys):
    main(["install"])
    folder = site / "training"
    (folder / "pytorch.py").write_text("changed")
    (folder / "optim" / "own.py").write_text("added")
    assert main(["install"]) == 1
    assert (
        f"{folder}: changed since they were placed: pytorch.py; run `python -m torch_ort.compat "
        "uninstall`, which leaves them, and move them away"
    ) in capsys.readouterr().err
    assert main(["uninstall"]) == 0
    assert (
        f"{folder}: removed what was placed; left what is not ours: optim/own.py, pytorch.py\n"
    ) in capsys.readouterr().out
    assert contents(folder).keys() == {"optim/own.py", "pytorch.py"}


def test_bytecode_of_what_was_placed_goes_with_it(site):
    main(["install"])
    for name in placing.files():
        path = (site / "training" / name).resolve()
        cache = path.parent / "__pycache__"
        cache.mkdir(exist_ok=True)
        (cache / f"{path.stem}.cpython-311.pyc").write_bytes(b"")
        (cache / f"{path.stem}.cpython-312.opt-1.pyc").write_bytes(b"")
    assert main(["uninstall"]) == 0
    assert not (site / "training").exists()


def test_install_again_brings_the_files_up_to_date(site, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(old_names.MODULES, "older", ())
        main(["install"])
    assert (site / "training" / "older.py").exists()
    assert main(["install"]) == 0
    assert "placed anew" in capsys.readouterr().out
    inside = {name for name in placing.files() if not name.startswith("../")}
    assert contents(site / "training").keys() == {*inside, placing.MARKER}


def test_an_interrupted_install_is_taken_up_again(site, capsys):
    main(["install"])
    (site / "training" / "ortmodule" / "__init__.py").unlink()
    assert main(["install"]) == 0
    assert (site / "training" / "ortmodule" / "__init__.py").exists()
    shutil.rmtree(site / "training" / "utils")
    assert main(["uninstall"]) == 0
    assert not (site / "training").exists()


def test_what_pip_left_behind_can_be_removed(site, capsys):
    main(["install"])
    (site / "__init__.py").unlink()
    assert main(["install"]) == 1
    assert "no onnxruntime is installed here" in capsys.readouterr().err
    assert main(["uninstall"]) == 0
    assert [path.name for path in site.iterdir()] == ["capi"]
    assert not list((site / "capi").iterdir())


def test_the_oldest_path_of_a_trainer_is_placed_beside_the_folder(site, capsys):
    path = site / "capi" / "ort_trainer.py"
    path.write_text("theirs")
    before = contents(site)
    assert main(["install"]) == 1
    words = "onnxruntime/capi/ort_trainer.py: not placed by torch_ort, left alone"
    assert words in capsys.readouterr().err
    assert contents(site) == before
    path.unlink()
    assert main(["install"]) == 0
    # Ours from before, where somebody has removed the folder.
    shutil.rmtree(site / "training")
    assert main(["install"]) == 0
    path.write_text("changed")
    assert main(["install"]) == 1
    assert "changed since they were placed: ../capi/ort_trainer.py" in capsys.readouterr().err
    assert main(["uninstall"]) == 0
    assert "left what is not ours: ../capi/ort_trainer.py" in capsys.readouterr().out
    assert path.read_text() == "changed"
    assert not (site / "training").exists()


def test_the_oldest_path_of_a_trainer_answers(site):
    assert main(["install"]) == 0
    code = textwrap.dedent("""
        from onnxruntime.capi.ort_trainer import IODescription, ModelDescription, ORTTrainer
        print(ORTTrainer.__module__)
        try:
            from onnxruntime.capi.ort_trainer import Other
        except ImportError as error:
            print(error)
    """)
    result = run_beside(site.parent, "-c", code)
    assert result.returncode == 0, result.stderr
    module, error = result.stdout.splitlines()
    assert module == "torch_ort.onnxruntime_training.trainers.v0"
    assert error.startswith("cannot import name 'Other' from 'onnxruntime.capi.ort_trainer'")


def test_a_folder_that_cannot_be_written(site, capsys, monkeypatch):
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert main(["install"]) == 1
    assert f"Permission denied: '{site / 'training'}'" in capsys.readouterr().err


def test_an_unknown_command_is_a_wrong_call(capsys):
    with pytest.raises(SystemExit) as error:
        main(["remove"])
    assert error.value.code == 2
    err = capsys.readouterr().err
    assert "usage: python -m torch_ort.compat" in err
    assert "invalid choice: 'remove'" in err


def test_what_is_built_later_is_found_without_a_new_install(tmp_path, monkeypatch):
    rows = (old_names.Names("Thing old=new", "torch_ort.built_later", "the old one"),)
    monkeypatch.setitem(old_names.MODULES, "things", rows)
    monkeypatch.setattr(torch_ort, "__path__", [*torch_ort.__path__, str(tmp_path)])

    def open_things() -> dict:
        spec = importlib.machinery.ModuleSpec("onnxruntime.training.things", None)
        namespace = {"__name__": spec.name, "__spec__": spec}
        old_names.open_module(namespace)
        return namespace

    text = "onnxruntime.training.things: not built yet in torch_ort; use the old one"
    with pytest.raises(ImportError, match=text):
        open_things()
    (tmp_path / "built_later.py").write_text("new = 3\n")
    importlib.invalidate_caches()
    namespace = open_things()
    assert (namespace["old"], namespace["__all__"]) == (3, ["old"])
    with pytest.raises(ImportError, match=r"training\.things\.Thing: not built yet in torch_ort"):
        namespace["__getattr__"]("Thing")
    with pytest.raises(AttributeError, match=r"'onnxruntime\.training\.things' has no attribute"):
        namespace["__getattr__"]("Other")
    del sys.modules["torch_ort.built_later"]
    (tmp_path / "built_later.py").write_text("import not_there_at_all  # a longer line\n")
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        open_things()


def test_a_command_that_is_not_built_says_so(monkeypatch):
    monkeypatch.setitem(old_names.COMMANDS, "tool", "torch_ort.built_later.tool")
    spec = importlib.machinery.ModuleSpec("onnxruntime.training.tool", None)
    with pytest.raises(SystemExit) as error:
        old_names.open_module({"__name__": "__main__", "__spec__": spec})
    assert error.value.code == (
        "onnxruntime.training.tool: not built yet in torch_ort; nothing takes its place"
    )


@pytest.mark.parametrize(
    ("asked", "level", "words"),
    [
        ((), logging.INFO, "each torch.autograd.Function is a PythonOp from now on"),
        ((True,), logging.INFO, "each torch.autograd.Function is a PythonOp from now on"),
        ((False,), logging.WARNING, "is traced through, with its own backward, from now on"),
    ],
)
def test_switch_of_custom_functions(caplog, asked, level, words):
    with caplog.at_level(logging.INFO, "orttraining"):
        enable_custom_autograd_support(*asked)
    (record,) = caplog.records
    assert record.levelno == level
    assert words in record.getMessage()
    capturing.switch(None)


def test_the_package_carries_its_files_as_python_alone():
    # wheel.packages takes Python files without being told; other files would need a rule.
    folder = Path(placing.__file__).parent
    assert {path.suffix for path in folder.iterdir() if path.is_file()} == {".py"}
