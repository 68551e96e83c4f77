"""What guides of ONNX Runtime Training tell their readers to write: samples, paths, commands."""

from __future__ import annotations

import os
import pkgutil
import re
import runpy
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from own_process import run_python

from torch_ort.onnxruntime_training.compat import placing

ROOT = Path(__file__).parents[2]
REAL = PathFinder.find_spec("onnxruntime")
SAMPLES = sorted((Path(__file__).parent / "samples").glob("*.py"))
# The paths that docs/ promises, with their names.
PATHS = {
    "torch_ort": "DebugOptions LogLevel ModuleWithLoss ORTModule optim set_seed",
    "torch_ort.compat.custom_autograd": "enable_custom_autograd_support",
    "torch_ort.compat.old_names": "open_module",
    "torch_ort.convergence": "GlobalSubscriberManager StatisticsSubscriber SubscriberBase "
    "inspect_activation",
    "torch_ort.convergence.merge_activation_summary": "main",
    "torch_ort.experimental": "load_from_json save_intermediate_onnx_graphs set_log_level "
    "set_propagate_cast_ops_optimization",
    "torch_ort.experimental.debug": "save_intermediate_onnx_graphs set_log_level",
    "torch_ort.experimental.graph_config": "PropagateCastLevel PropagateCastOpsStrategy "
    "set_propagate_cast_ops_optimization",
    "torch_ort.experimental.json_config": "load_from_json",
    "torch_ort.optim": "AdamConfig AdamWMode FP16_Optimizer FusedAdam Lamb LambConfig "
    "OptimizerConfig SGDConfig lr_scheduler",
    "torch_ort.optim.lr_scheduler": "ConstantWarmupLRScheduler CosineWarmupLRScheduler "
    "LinearWarmupLRScheduler LRScheduler PolyWarmupLRScheduler",
    "torch_ort.trainers": "Trainer trainer",
    "torch_ort.trainers.loss_scaler": "DynamicLossScaler LossScaler",
    "torch_ort.trainers.v0": "IODescription LossScaler ModelDescription ORTTrainer "
    "load_checkpoint save_checkpoint",
    "torch_ort.trainers.v1": "ORTTrainer ORTTrainerOptions TrainStepInfo",
    "torch_ort.trainers.v1.checkpoint": "aggregate_checkpoints experimental_load_checkpoint "
    "experimental_load_state_dict experimental_save_checkpoint experimental_state_dict",
    "torch_ort.utils.data": "LoadBalancingDistributedBatchSampler "
    "LoadBalancingDistributedSampler TokenBudgetBatchSampler TokenBudgetPacker",
}
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.py")]
MENTIONED = re.compile(
    r"torch_ort\.(?:compat|convergence|experimental|optim|trainers|utils)\b(?:\.\w+)*"
)
COMMANDS = {
    "torch_ort.compat status": "onnxruntime.training: placed by torch_ort",
    "torch_ort.configure": "nothing to configure",
    "torch_ort.convergence.merge_activation_summary --help": "--pt_dir",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Place the old import paths into a folder of links to the installed onnxruntime."""
    if REAL is None:
        pytest.skip("onnxruntime is not installed")
    real = Path(REAL.submodule_search_locations[0])
    site = tmp_path_factory.mktemp("site")
    (site / "onnxruntime" / "capi").mkdir(parents=True)
    for path in (*real.iterdir(), *(real / "capi").iterdir()):
        if path.name not in ("capi", "__pycache__"):
            (site / "onnxruntime" / path.relative_to(real)).symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(site)])
        placing.install()
    return site


def run_beside(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with `site` before all other packages."""
    return run_python(*arguments, cwd=cwd, env=os.environ | {"PYTHONPATH": str(site)})


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_trains(site, tmp_path, path):
    result = run_beside(site, str(path), cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", PATHS)
def test_a_documented_path_has_its_names(module):
    exec(f"from {module} import {', '.join(PATHS[module].split())}", {})


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_mentions_is_there(page):
    for path in sorted(set(MENTIONED.findall(page.read_text()))):
        assert pkgutil.resolve_name(path), path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_runs(site, monkeypatch, capsys, command):
    module, *arguments = command.split()
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    # What `python -m` does, without the seconds that torch takes to load.
    monkeypatch.delitem(sys.modules, module, raising=False)
    status = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    assert not status
    assert COMMANDS[command] in capsys.readouterr().out
