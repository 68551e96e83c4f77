# The five files of an ORTModule's graph: names, what they hold, when they are written.
from __future__ import annotations

import copy
import os
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from models import MODELS
from torch import nn

from torch_ort import DebugOptions, ORTModule, UserError
from torch_ort.ortmodule import register_graph_optimizer, unregister_graph_optimizer

pytestmark = pytest.mark.ort_only

KINDS = ("torch_exported", "post_processed", "optimized_pre_grad", "optimized", "execution_model")
# Those that hold the graph as the user knows it, and not as memory was planned for it.
NAMED = KINDS[:4]
# Those of an inference graph that are all of standard nodes.
STANDARD = KINDS[1:4]


def names(mode: str, prefix: str = "net") -> list[str]:
    return sorted(f"{prefix}_{kind}_{mode}.onnx" for kind in KINDS)


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saving(folder: Path, **settings: object) -> DebugOptions:
    return DebugOptions(save_onnx=True, onnx_prefix="net", save_path=folder, **settings)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def train(module: nn.Module, x: torch.Tensor) -> None:
    module(x).sum().backward()


def infer(module: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        module.eval()(x)


MODES = {"training": train, "inference": infer}


def save(name: str, mode: str, folder: Path) -> tuple[nn.Module, torch.Tensor, dict[str, Path]]:
    """Run a model; give it, its input and the files by kind."""
    torch.manual_seed(0)
    factory, x = MODELS[name]
    model = factory()
    MODES[mode](ORTModule(model, saving(folder)), x)
    return model, x, {kind: folder / f"net_{kind}_{mode}.onnx" for kind in KINDS}


def run_in_onnxruntime(path: Path, x: torch.Tensor) -> torch.Tensor:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    (result,) = session.run(None, {given.name: x.numpy()})
    return torch.from_numpy(np.asarray(result))


def ops(path: Path) -> list[tuple[str, str]]:
    return [(node.domain, node.op_type) for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("mode", MODES)
def test_names(mode, tmp_path):
    module = ORTModule(mlp(), saving(tmp_path))
    assert listed(tmp_path) == []
    MODES[mode](module, torch.ones(3, 6))
    assert listed(tmp_path) == names(mode)


def test_both_modes_stand_side_by_side(tmp_path):
    module = ORTModule(mlp(), saving(tmp_path))
    train(module, torch.ones(3, 6))
    infer(module, torch.ones(3, 6))
    assert listed(tmp_path) == sorted(names("training") + names("inference"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_files_are_sound(name, mode, tmp_path):
    _, _, files = save(name, mode, tmp_path)
    for path in files.values():
        is_standard = {domain for domain, _ in ops(path)} == {""}
        onnx.checker.check_model(path, full_check=is_standard)


@pytest.mark.parametrize("name", MODELS)
def test_inference_files_give_the_modules_numbers(name, tmp_path):
    model, x, files = save(name, "inference", tmp_path)
    for kind in STANDARD:
        assert {domain for domain, _ in ops(files[kind])} == {""}
        for given in (x, torch.cat([x, x])):
            with torch.no_grad():
                want = model(given)
            got = run_in_onnxruntime(files[kind], given)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["MLP", "CNN"])
def test_inference_files_hold_the_parameters(name, tmp_path):
    model, _, files = save(name, "inference", tmp_path)
    for kind in NAMED:
        graph = onnx.load(files[kind]).graph
        assert [each.name for each in graph.input] == ["input"]
        held = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
        for key, parameter in model.named_parameters():
            np.testing.assert_array_equal(held[key], parameter.detach().numpy())


@pytest.mark.parametrize("name", ["MLP", "CNN", "encoder block"])
def test_training_files_take_parameters_and_inputs_by_name(name, tmp_path):
    model, _, files = save(name, "training", tmp_path)
    given = "x" if name == "encoder block" else "input"
    for kind in NAMED:
        found = {each.name for each in onnx.load(files[kind]).graph.input}
        assert found == {*model.state_dict(), given}


@pytest.mark.parametrize("kind", KINDS)
def test_the_border_stands_in_training_files_alone(kind, tmp_path):
    border = ("com.microsoft", "YieldOp")
    assert ops(save("MLP", "training", tmp_path)[2][kind]).count(border) == 1
    assert ops(save("MLP", "inference", tmp_path)[2][kind]).count(border) == 0


def test_a_training_file_has_a_gradient_for_each_parameter(tmp_path):
    model, _, files = save("MLP", "training", tmp_path)
    for kind in NAMED:
        shapes = [
            tuple(dim.dim_value for dim in each.type.tensor_type.shape.dim)
            for each in onnx.load(files[kind]).graph.output
        ]
        assert sorted(shapes) == sorted(tuple(p.shape) for p in model.parameters())


def test_stages_differ(tmp_path):
    _, _, files = save("CNN", "inference", tmp_path)
    # Composites stand as one node until standard nodes say them; fused regions run.
    assert "torch_ort" in {domain for domain, _ in ops(files["torch_exported"])}
    assert "torch_ort" in {domain for domain, _ in ops(files["execution_model"])}
    _, _, files = save("encoder block", "inference", tmp_path)
    assert len(ops(files["optimized"])) < len(ops(files["post_processed"]))


def test_the_batch_is_a_symbol(tmp_path):
    for mode, run in MODES.items():
        run(ORTModule(mlp(), saving(tmp_path)), torch.ones(3, 6))
        for kind in KINDS:
            graph = onnx.load(tmp_path / f"net_{kind}_{mode}.onnx").graph
            dims = [each.type.tensor_type.shape.dim for each in graph.input]
            (of_input,) = [dim for dim in dims if len(dim) == 2 and dim[0].dim_param]
            assert not of_input[0].dim_value


PLACE = re.compile(
    r"(input|output|initializer|scratch|saved|[a-z_ ]+?)( in \w+ at \d+)?, \d+ bytes"
    r"(, steps \d+ to \d+)?(, (in place of|memory of) \w+)?"
)


@pytest.mark.parametrize("mode", MODES)
def test_the_plan_stands_in_doc_strings(mode, tmp_path):
    _, _, files = save("CNN", mode, tmp_path)
    graph = onnx.load(files["execution_model"]).graph
    infos = [*graph.input, *graph.value_info, *graph.output]
    places = {info.name: info.doc_string for info in infos}
    made = [name for node in graph.node for name in node.output if name]
    assert all(places[each.name] for each in graph.input)
    assert [name for name in made if places.get(name)]
    for place in filter(None, places.values()):
        assert PLACE.fullmatch(place), place
    assert any(" at " in place for place in places.values())
    for kind in NAMED:
        others = onnx.load(files[kind]).graph
        assert not any(info.doc_string for info in (*others.input, *others.value_info))


@pytest.mark.parametrize("place", ["input", "config"])
def test_the_environment_wins_over_the_path(place, tmp_path, monkeypatch):
    chosen, ignored = tmp_path / "chosen", tmp_path / "ignored"
    chosen.mkdir()
    ignored.mkdir()
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(chosen))
    settings = {"config": {"save_onnx_path": str(ignored)}} if place == "config" else {}
    infer(ORTModule(mlp(), saving(ignored, **settings)), torch.ones(3, 6))
    assert listed(chosen) == names("inference")
    assert listed(ignored) == []


def test_without_a_path_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("ORTMODULE_SAVE_ONNX_PATH", raising=False)
    monkeypatch.chdir(tmp_path)
    infer(ORTModule(mlp(), DebugOptions(save_onnx=True, onnx_prefix="n")), torch.ones(3, 6))
    assert listed(tmp_path) == names("inference", "n")


@pytest.mark.parametrize("mode", MODES)
def test_a_recapture_replaces_the_files(mode, tmp_path):
    model = mlp()
    module = ORTModule(model, saving(tmp_path))
    MODES[mode](module, torch.ones(3, 6))
    path = tmp_path / f"net_post_processed_{mode}.onnx"
    before = len(ops(path))
    model.append(nn.Tanh())
    module.recapture()
    MODES[mode](module, torch.ones(3, 6))
    assert listed(tmp_path) == names(mode)
    assert len(ops(path)) > before


def test_a_call_of_another_kind_replaces_the_files(tmp_path):
    module = ORTModule(mlp(), saving(tmp_path))
    paths = [tmp_path / name for name in names("inference")]
    ranks = []
    for x in (torch.ones(3, 6), torch.ones(2, 3, 6)):
        infer(module, x)
        ranks.append([len(onnx.load(p).graph.output[0].type.tensor_type.shape.dim) for p in paths])
    assert ranks == [[2] * 5, [3] * 5]
    assert listed(tmp_path) == names("inference")


def test_other_sizes_write_nothing_anew(tmp_path):
    module = ORTModule(mlp(), saving(tmp_path))
    infer(module, torch.ones(3, 6))
    for path in tmp_path.iterdir():
        path.unlink()
    infer(module, torch.ones(5, 6))
    assert listed(tmp_path) == []


@pytest.mark.parametrize("settings", [{}, {"onnx_prefix": "net"}])
def test_nothing_is_written_unasked(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    train(ORTModule(mlp(), DebugOptions(**settings)), torch.ones(3, 6))
    assert listed(tmp_path) == []


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_written_elsewhere(mode, tmp_path, monkeypatch):
    folder, here = tmp_path / "files", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    MODES[mode](ORTModule(mlp(), saving(folder)), torch.ones(3, 6))
    assert listed(here) == []
    assert listed(folder) == names(mode)
    assert listed(tmp_path) == ["files", "here"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="save_path: cannot write to the folder"):
        saving(tmp_path)


def test_a_folder_that_is_gone_at_the_first_call(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    module = ORTModule(mlp(), saving(folder))
    folder.rmdir()
    words = r"onnx: file '.*gone/net_torch_exported_inference.onnx': got No such file or directory"
    with pytest.raises(UserError, match=words):
        infer(module, torch.ones(3, 6))


def test_numbers_are_those_of_eager(tmp_path):
    eager = mlp()
    module = ORTModule(copy.deepcopy(eager), saving(tmp_path))
    for each in (eager, module):
        train(each, torch.ones(3, 6))
    for want, got in zip(eager.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.parametrize("kind", STANDARD)
def test_what_passes_of_the_user_change(kind, tmp_path):
    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type == "Sin":
                node.op_type = "Cos"

    class Sine(nn.Linear):
        def forward(self, x):
            return super().forward(x).sin()

    register_graph_optimizer()(change)
    try:
        infer(ORTModule(Sine(6, 4), saving(tmp_path)), torch.ones(3, 6))
    finally:
        unregister_graph_optimizer(change)
    assert "Cos" in {op for _, op in ops(tmp_path / f"net_{kind}_inference.onnx")}
