"""Training by files and arrays: artifacts, checkpoints, and loops as scripts for devices are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx_cases import TWO_LAYERS, by_onnxruntime, model_of
from torch import nn
from torch.nn import functional as F

import torch_ort
from torch_ort import Unsupported, UserError
from torch_ort.onnx.artifacts import LossType, OptimType, generate_artifacts
from torch_ort.onnx.training import (
    CheckpointState,
    LinearLRScheduler,
    LRScheduler,
    Module,
    Optimizer,
)

pytestmark = pytest.mark.ort_only

RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 3)).astype(np.float32)
FLOATS = RNG.random((5, 2)).astype(np.float32)
LABELS = RNG.integers(0, 2, 5)

LOSSES = {
    LossType.MSELoss: (F.mse_loss, FLOATS),
    LossType.CrossEntropyLoss: (F.cross_entropy, LABELS),
    LossType.BCEWithLogitsLoss: (F.binary_cross_entropy_with_logits, FLOATS),
    LossType.L1Loss: (F.l1_loss, FLOATS),
}


def generate(folder: Path, loss: LossType = LossType.MSELoss, **options: object) -> None:
    options = {"optimizer": OptimType.AdamW, **options}
    generate_artifacts(model_of(TWO_LAYERS), loss=loss, artifact_directory=folder, **options)


def load(folder: Path) -> tuple[CheckpointState, Module, Optimizer]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def train(module: Module, optimizer: Optimizer, target: np.ndarray, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        module.train()
        losses.append(float(module(X, target)))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def train_in_pytorch(
    loss: LossType, optimizer: str, steps: int, trained: set[str] | None = None
) -> tuple[nn.Module, list[float]]:
    loaded = torch_ort.load_onnx(model_of(TWO_LAYERS))
    parameters = [p for n, p in loaded.named_parameters() if trained is None or n in trained]
    make = {"AdamW": lambda: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-2),
            "SGD": lambda: torch.optim.SGD(parameters, lr=1e-3)}  # fmt: skip
    update, losses = make[optimizer](), []
    function, target = LOSSES[loss]
    for _ in range(steps):
        value = function(loaded(torch.from_numpy(X)), torch.from_numpy(target))
        value.backward()
        losses.append(value.item())
        update.step()
        update.zero_grad()
    return loaded, losses


@pytest.mark.parametrize("optimizer", OptimType)
@pytest.mark.parametrize("loss", LossType)
def test_training_is_that_of_pytorch(loss: LossType, optimizer: OptimType, tmp_path: Path) -> None:
    generate(tmp_path, loss, optimizer=optimizer)
    state, module, update = load(tmp_path)
    losses = train(module, update, LOSSES[loss][1], 10)
    source, want = train_in_pytorch(loss, optimizer.name, 10)
    assert losses == pytest.approx(want, rel=1e-4)
    for name, parameter in source.named_parameters():
        got = torch.from_numpy(state.parameters[name].data)
        torch.testing.assert_close(got, parameter.detach(), rtol=1e-4, atol=1e-5)
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["backward_runs"] == 10


def test_evaluation_and_additional_outputs(tmp_path: Path) -> None:
    generate(tmp_path, LossType.CrossEntropyLoss, additional_output_names=["y"])
    state, module, _ = load(tmp_path)
    assert module.input_names() == ["x", "labels"]
    assert module.output_names() == ["loss", "y"]
    module.eval()
    loss, y = module(X, LABELS)
    source = torch_ort.load_onnx(model_of(TWO_LAYERS))
    torch.testing.assert_close(torch.from_numpy(y), source(torch.from_numpy(X)).detach())
    want = F.cross_entropy(torch.from_numpy(y), torch.from_numpy(LABELS))
    assert loss == pytest.approx(want.item(), rel=1e-5)
    assert all(each.grad is None for each in state.parameters.values())


def test_nodes_that_train_evaluate_in_the_model_for_that(tmp_path: Path) -> None:
    model = model_of(
        """(float[N, 3] y)
        <float[3] s = {1, 2, 3}, float[3] b = {0, 1, 0}, float[3] m = {0.5, 0, 0},
         float[3] v = {1, 4, 1}, float ratio = {0.5}, bool train = {1}> {
          h, moved, spread = BatchNormalization <training_mode = 1> (x, s, b, m, v)
          y = Dropout(h, ratio, train)
        }"""
    )
    generate_artifacts(
        model, loss=LossType.MSELoss, artifact_directory=tmp_path, additional_output_names=["y"]
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    target = np.zeros((5, 3), np.float32)
    _, trained = module(X, target)
    assert (trained == 0).any()
    _, y = module.eval()(X, target)
    norm = nn.functional.batch_norm(
        torch.from_numpy(X), torch.tensor([0.5, 0, 0]), torch.tensor([1.0, 4, 1]),
        torch.tensor([1.0, 2, 3]), torch.tensor([0.0, 1, 0]),
    )  # fmt: skip
    torch.testing.assert_close(torch.from_numpy(y), norm)


def test_a_model_whose_output_is_its_loss(tmp_path: Path) -> None:
    model = model_of("""(float loss) <float[3] weight = {1, 2, 3}> {
      h = Mul(x, weight)
      loss = ReduceMean <keepdims = 0> (h)
    }""")
    generate_artifacts(model, optimizer=OptimType.SGD, artifact_directory=tmp_path)
    state, module, _ = load(tmp_path)
    module(X)
    np.testing.assert_allclose(state.parameters["weight"].grad, X.mean(0) / 3, rtol=1e-5)


def test_gradients_accumulate_until_they_are_reset(tmp_path: Path) -> None:
    generate(tmp_path)
    state, module, _ = load(tmp_path)
    module(X, FLOATS)
    once = state.parameters["second.bias"].grad
    module(X, FLOATS)
    np.testing.assert_allclose(state.parameters["second.bias"].grad, 2 * once, rtol=1e-5)
    module.lazy_reset_grad()
    np.testing.assert_allclose(state.parameters["second.bias"].grad, 2 * once, rtol=1e-5)
    module(X, FLOATS)
    np.testing.assert_allclose(state.parameters["second.bias"].grad, once, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"requires_grad": ["second.weight", "second.bias"]}, {"frozen_params": ["first.weight"]}],
    ids=["trained", "frozen"],
)
def test_what_is_trained(options: dict, tmp_path: Path) -> None:
    generate(tmp_path, **options)
    state, module, update = load(tmp_path)
    before = {name: each.data for name, each in state.parameters.items()}
    train(module, update, FLOATS, 2)
    moved = {n for n, each in state.parameters.items() if not np.array_equal(each.data, before[n])}
    assert moved == {"second.weight", "second.bias"}
    assert module.get_parameters_size() == 10
    assert module.get_parameters_size(trainable_only=False) == 22


def test_a_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    generate(tmp_path)
    state, module, update = load(tmp_path)
    train(module, update, FLOATS, 3)
    state.properties |= {"epoch": 3, "best": 0.5, "name": "a test"}
    path = tmp_path / "checkpoint"
    CheckpointState.save_checkpoint(state, path, include_optimizer_state=True)
    want = train(module, update, FLOATS, 3)
    state, module, update = load(tmp_path)
    assert state.properties == {"epoch": 3, "best": 0.5, "name": "a test"}
    assert state.step == 3
    assert train(module, update, FLOATS, 3) == want
    onnx.load(path)  # a model that other programs can look at


def test_without_its_state_an_optimizer_begins_anew(tmp_path: Path) -> None:
    generate(tmp_path)
    state, module, update = load(tmp_path)
    train(module, update, FLOATS, 3)
    CheckpointState.save_checkpoint(state, tmp_path / "checkpoint")
    again, _, _ = load(tmp_path)
    assert again.step == 0
    assert not any(each.states for each in again.parameters.values())
    np.testing.assert_array_equal(
        again.parameters["second.bias"].data, state.parameters["second.bias"].data
    )


def test_the_trained_model_for_inference(tmp_path: Path) -> None:
    generate(tmp_path, LossType.CrossEntropyLoss)
    _, module, update = load(tmp_path)
    train(module, update, LABELS, 5)
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["y"])
    assert [value.name for value in onnx.load(path).graph.input] == ["x"]
    source, _ = train_in_pytorch(LossType.CrossEntropyLoss, "AdamW", 5)
    x = torch.from_numpy(X)
    got = by_onnxruntime(path.read_bytes(), x=x)
    torch.testing.assert_close(got, source(x).detach(), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="got nothing, want names of values"):
        module.export_model_for_inferencing(path, ["nothing"])


def test_parameters_behind_each_other(tmp_path: Path) -> None:
    generate(tmp_path, requires_grad=["second.weight", "second.bias"])
    state, module, _ = load(tmp_path)
    flat = module.get_contiguous_parameters(trainable_only=True)
    assert flat.shape == (10,)
    module.copy_buffer_to_parameters(flat + 1)
    np.testing.assert_allclose(state.parameters["second.bias"].data, [2, 3])
    with pytest.raises(UserError, match="copy_buffer_to_parameters: got 3, want 10"):
        module.copy_buffer_to_parameters(np.zeros(3, np.float32))
    state.parameters["second.bias"] = np.array([7, 8], np.float32)
    np.testing.assert_allclose(module.get_contiguous_parameters(True)[-2:], [7, 8])
    with pytest.raises(UserError, match=r"parameter 'second\.bias': got \(3,\) of torch\.float32"):
        state.parameters["second.bias"] = np.zeros(3, np.float32)


def test_learning_rates(tmp_path: Path) -> None:
    generate(tmp_path)
    _, _, update = load(tmp_path)
    assert update.get_learning_rate() == 1e-3
    schedule = LinearLRScheduler(update, 2, 6, 0.1)
    assert isinstance(schedule, LRScheduler)
    found = [update.get_learning_rate()]
    for _ in range(7):
        schedule.step()
        found.append(update.get_learning_rate())
    assert found == pytest.approx([0, 0.05, 0.1, 0.075, 0.05, 0.025, 0, 0])


def test_a_script_of_onnxruntime_training_runs(tmp_path: Path) -> None:
    from torch_ort.onnxruntime_training.compat import old_names

    for module, names in (("api", "CheckpointState Module Optimizer LinearLRScheduler"),
                          ("artifacts", "generate_artifacts LossType OptimType")):  # fmt: skip
        found = {old for row in old_names.MODULES[module] for old, _ in row.pairs()}
        assert set(names.split()) <= found


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"requires_grad": ["third"]}, UserError, r"requires_grad: got third, want"),
        ({"frozen_params": ["third"]}, UserError, r"frozen_params: got third, want some of first"),
        ({"requires_grad": ["second.bias"], "frozen_params": ["second.bias"]}, UserError,
         r"second\.bias: got it in requires_grad and frozen_params"),
        ({"additional_output_names": ["z"]}, UserError, "additional_output_names: got z, want"),
        ({"loss_input_names": ["z"]}, UserError, "loss_input_names: got z, want some of y"),
        ({"loss": "mine"}, Unsupported, "loss: got str, want one of MSELoss, CrossEntropyLoss"),
        ({"ort_format": True}, Unsupported, "ort_format: got True, want it left out"),
        ({"nominal_checkpoint": True}, Unsupported, "nominal_checkpoint: got True"),
    ],
)  # fmt: skip
def test_wrong_options(options: dict, error: type, words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=f"generate_artifacts: {words}"):
        generate(tmp_path, **options)


def test_files_of_other_kinds(tmp_path: Path) -> None:
    generate(tmp_path)
    with pytest.raises(UserError, match="got no checkpoint: another model"):
        CheckpointState.load_checkpoint(tmp_path / "optimizer_model.onnx")
    (tmp_path / "damaged").write_bytes(b"no model at all")
    with pytest.raises(UserError, match="damaged: got no checkpoint"):
        CheckpointState.load_checkpoint(tmp_path / "damaged")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    with pytest.raises(UserError, match="optimizer: got '', want one of AdamW, SGD"):
        Optimizer(tmp_path / "training_model.onnx", module)
    with pytest.raises(UserError, match="the module has no eval_model_uri, which evaluation needs"):
        module.eval()(X, FLOATS)
    with pytest.raises(UserError, match="the module has no eval_model_uri"):
        module.export_model_for_inferencing(tmp_path / "out.onnx", ["y"])
    state.properties["list"] = [1]
    with pytest.raises(UserError, match="property 'list': got list, want int, float or str"):
        CheckpointState.save_checkpoint(state, tmp_path / "checkpoint")


def test_parameters_that_the_loss_does_not_need_stay(tmp_path: Path) -> None:
    model = model_of("""(float[N, 2] y, float[N, 2] z)
    <float[3, 2] first = {1, 2, 3, 4, 5, 6}, float[3, 2] other = {1, 2, 3, 4, 5, 6}> {
      y = MatMul(x, first)
      z = MatMul(x, other)
    }""")
    generate_artifacts(
        model, loss=LossType.MSELoss, optimizer=OptimType.AdamW, artifact_directory=tmp_path
    )
    state, module, update = load(tmp_path)
    before = state.parameters["other"].data
    train(module, update, FLOATS, 2)
    np.testing.assert_array_equal(state.parameters["other"].data, before)
    CheckpointState.save_checkpoint(state, tmp_path / "checkpoint")
    assert set(CheckpointState.load_checkpoint(tmp_path / "checkpoint").parameters) == {
        "first", "other",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [("torch_ort.trained", "{"), ("torch_ort.trained", "5"), ("torch_ort.property.", '"q"')],
)
def test_damaged_checkpoints(key: str, value: str, tmp_path: Path) -> None:
    generate(tmp_path)
    path = tmp_path / "checkpoint"
    model = onnx.load(path)
    onnx.helper.set_model_props(
        model, {each.key: each.value for each in model.metadata_props} | {key: value}
    )
    onnx.save(model, path)
    with pytest.raises(UserError, match="checkpoint: got no checkpoint"):
        CheckpointState.load_checkpoint(path)
