"""The command `python -m torch_ort.onnx`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx_cases import TWO_LAYERS, model_of
from torch.nn import functional as F

import torch_ort
from torch_ort.onnx.__main__ import main

pytestmark = pytest.mark.ort_only


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(model_of(TWO_LAYERS), path)
    return path


def changed(file: Path, change) -> Path:
    model = onnx.load(file)
    change(model)
    path = file.with_name("other.onnx")
    onnx.save(model, path)
    return path


# ---- info


def test_info_names_operators_inputs_and_weights(file: Path, capsys) -> None:
    assert main(["info", str(file), "--trainable", "second.*"]) == 0
    words = capsys.readouterr().out
    assert "input x: float (N, 3)" in words
    assert "output y: float (N, 2)" in words
    for row in ("Gemm", "MatMul", "the engine", "second.bias", "4 x 2"):
        assert row in words
    assert "10 of 22 numbers are trained" in words


def test_info_of_functions_and_of_what_cannot_be_loaded(tmp_path: Path, capsys) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model_of("(float[N, 3] y) { h = Celu(x) y = mine.Twice(h) }",
                       domains='"" : 20, "mine" : 1'), path)  # fmt: skip
    assert main(["info", str(path)]) == 2
    words = capsys.readouterr().out
    assert "a function of PyTorch's" in words
    assert "cannot be loaded: " in words
    assert "mine.Twice" in words


# ---- run


@pytest.mark.parametrize("backend", ["eager", "ort"])
def test_run_compares_with_onnxruntime(file: Path, backend: str, capsys) -> None:
    assert main(["run", str(file), "--size", "N=3", "--backend", backend]) == 0
    words = capsys.readouterr().out
    assert "3 x 2" in words
    assert "onnxruntime: " in words
    assert f"{backend}: " in words


def test_run_takes_arrays(file: Path, tmp_path: Path, capsys) -> None:
    np.savez(tmp_path / "in.npz", x=np.ones((5, 3), np.float32))
    assert main(["run", str(file), "--inputs", str(tmp_path / "in.npz")]) == 0
    assert "5 x 2" in capsys.readouterr().out
    np.savez(tmp_path / "in.npz", z=np.ones((5, 3), np.float32))
    assert main(["run", str(file), "--inputs", str(tmp_path / "in.npz")]) == 2
    assert "got z, want some of x" in capsys.readouterr().err


def test_run_says_that_results_differ(file: Path, monkeypatch, capsys) -> None:
    from torch_ort.onnx.command import trial

    theirs = [np.zeros((2, 2), np.float32)]
    monkeypatch.setattr(trial, "by_onnxruntime", lambda path, inputs: (theirs, 0.0))
    assert main(["run", str(file)]) == 1
    monkeypatch.setattr(trial, "by_onnxruntime", lambda path, inputs: (None, None))
    assert main(["run", str(file)]) == 0
    assert "not installed" in capsys.readouterr().out


def test_run_with_a_wrong_size(file: Path, capsys) -> None:
    assert main(["run", str(file), "--size", "N"]) == 2
    assert "--size: got N, want NAME=N" in capsys.readouterr().err


# ---- finetune


def write_batches(folder: Path, count: int = 4) -> None:
    folder.mkdir()
    generator = np.random.default_rng(0)
    for i in range(count):
        x = generator.standard_normal((8, 3)).astype(np.float32)
        np.savez(folder / f"{i}.npz", x=x, target=(x[:, 0] > 0).astype(np.int64))


@pytest.mark.parametrize("backend", ["eager", "ort"])
def test_finetune_trains_and_writes(file: Path, tmp_path: Path, backend: str, capsys) -> None:
    write_batches(tmp_path / "data")
    written, plot = tmp_path / "out.onnx", tmp_path / "losses.png"
    assert main([
        "finetune", str(file), str(tmp_path / "data"), "--write", str(written), "--epochs", "5",
        "--lr", "0.05", "--trainable", "second.*", "--plot", str(plot), "--backend", backend,
    ]) == 0  # fmt: skip
    words = capsys.readouterr().out
    assert "in 20 steps" in words
    assert plot.read_bytes()[:4] == b"\x89PNG"
    before, after = (torch_ort.load_onnx(each).state_dict() for each in (file, written))
    torch.testing.assert_close(after["first.weight"], before["first.weight"], rtol=0, atol=0)
    assert not torch.equal(after["second.weight"], before["second.weight"])
    assert loss_of(written, tmp_path / "data") < loss_of(file, tmp_path / "data")


def loss_of(file: Path, data: Path) -> float:
    loaded = torch_ort.load_onnx(file)
    losses = []
    for path in sorted(data.iterdir()):
        batch = np.load(path)
        logits = loaded(torch.from_numpy(batch["x"]))
        losses.append(F.cross_entropy(logits, torch.from_numpy(batch["target"])).item())
    return sum(losses)


def test_finetune_says_what_is_missing(file: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "none").mkdir()
    command = ["finetune", str(file), str(tmp_path / "none"), "--write", str(tmp_path / "o.onnx")]
    assert main(command) == 2
    assert "got no .npz files, want one or more" in capsys.readouterr().err
    np.savez(tmp_path / "none" / "0.npz", x=np.ones((2, 3), np.float32))
    assert main(command) == 2
    assert "got no array 'target', want targets" in capsys.readouterr().err
    assert main([*command, "--output", "1"]) == 2
    assert "--output: got 1, want less than 1" in capsys.readouterr().err
    assert not (tmp_path / "o.onnx").exists()


def test_finetune_reads_no_objects(file: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "0.npz", x=np.array([{}], dtype=object))
    command = ["finetune", str(file), str(tmp_path / "data"), "--write", str(tmp_path / "o.onnx")]
    assert main(command) == 2
    assert "allow_pickle=False" in capsys.readouterr().err


# ---- diff


def test_the_same_files(file: Path, capsys) -> None:
    assert main(["diff", str(file), str(file)]) == 0
    assert "the graphs are the same; 0 weights differ" in capsys.readouterr().out


def test_other_weights(file: Path, capsys) -> None:
    def change(model: onnx.ModelProto) -> None:
        (bias,) = [each for each in model.graph.initializer if each.name == "second.bias"]
        bias.CopyFrom(helper.make_tensor("second.bias", 1, [2], [1.0, 2.5]))

    other = changed(file, change)
    assert main(["diff", str(file), str(other)]) == 1
    words = capsys.readouterr().out
    assert "second.bias" in words
    assert "0.5" in words
    assert "the graphs are the same; 1 weights differ" in words
    assert main(["diff", str(file), str(other), "--tolerance", "0.6"]) == 0


def test_other_nodes_inputs_and_opsets(file: Path, capsys) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = 21
        model.graph.node[0].op_type = "Gemm"
        model.graph.node.append(helper.make_node("Relu", ["y"], ["z"]))
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "M"

    assert main(["diff", str(file), str(changed(file, change))]) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "opset ai.onnx: 20 became 21" in words
    assert "input x: x: float (N, 3) became x: float (M, 3)" in words
    assert "node h: MatMul (x, first.weight) became Gemm (x, first.weight)" in words
    assert "node z: new, Relu (y)" in words
    assert "4 differences of the graphs; 0 weights differ" in words


def test_as_a_program(file: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "torch_ort.onnx", "info", str(file)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert "22 of 22 numbers are trained" in found.stdout
    found = subprocess.run(
        [sys.executable, "-m", "torch_ort.onnx", "info", "none.onnx"],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2
    assert "No such file" in found.stderr


def test_numbers_of_a_constant_are_a_difference(tmp_path: Path, capsys) -> None:
    paths = [tmp_path / name for name in ("one.onnx", "two.onnx")]
    for number, path in enumerate(paths):
        onnx.save(model_of(f"""(float[N, 3] y) {{
          c = Constant <value = float {{{number}}}> ()
          y = Add(x, c)
        }}"""), path)  # fmt: skip
    assert main(["diff", *map(str, paths)]) == 1
    assert "1 differences of the graphs" in capsys.readouterr().out


def test_finetuning_moves_statistics(tmp_path: Path) -> None:
    model = model_of(
        """(float[N, 3] y) <float[3] s = {1, 1, 1}, float[3] b = {0, 0, 0}, float[3] m = {0, 0, 0},
        float[3] v = {1, 1, 1}> { y = BatchNormalization(x, s, b, m, v) }"""
    )
    onnx.save(model, tmp_path / "net.onnx")
    (tmp_path / "data").mkdir()
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32) + 3
    np.savez(tmp_path / "data" / "0.npz", x=x, target=np.zeros((8, 3), np.float32))
    written = tmp_path / "out.onnx"
    command = ["finetune", str(tmp_path / "net.onnx"), str(tmp_path / "data")]
    assert main([*command, "--write", str(written), "--loss", "mse"]) == 0
    assert torch_ort.load_onnx(written).m.min().item() > 0.1


def test_names_with_brackets_and_files_that_are_none(tmp_path: Path, capsys) -> None:
    model = model_of("(float[N, 3] y) <float[3] w = {1, 2, 3}> { y = Mul(x, w) }")
    model.graph.initializer[0].name = model.graph.node[0].input[1] = "w[/a]"
    onnx.save(model, tmp_path / "net.onnx")
    assert main(["info", str(tmp_path / "net.onnx")]) == 0
    assert "w[/a]" in capsys.readouterr().out
    (tmp_path / "net.onnx").write_bytes(b"nothing of the kind")
    for command in ("info", "run"):
        assert main([command, str(tmp_path / "net.onnx")]) == 2
