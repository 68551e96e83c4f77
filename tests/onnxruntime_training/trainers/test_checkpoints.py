"""Checkpoints of both ORTTrainers: what they hold, bit by bit, and files of other kinds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from eager_loops import batches, net
from torch import nn

from torch_ort.onnxruntime_training.trainers import checkpoint_files
from torch_ort.optim import AdamConfig, LambConfig, SGDConfig
from torch_ort.trainers import v0
from torch_ort.trainers.loss_scaler import DynamicLossScaler
from torch_ort.trainers.v1 import ORTTrainer, ORTTrainerOptions, checkpoint

pytestmark = pytest.mark.ort_only

CONFIGS = {"SGDOptimizer": SGDConfig, "AdamOptimizer": AdamConfig, "LambOptimizer": LambConfig}
DESC = {
    "inputs": [("x", ["batch", 6]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}


def other_net():
    """Give the same model with other weights."""
    model = net()
    for it in model.parameters():
        nn.init.normal_(it)
    return model


def make_v0(model, name="AdamOptimizer", is_mixed=False):
    desc = v0.ModelDescription(
        [v0.IODescription("x", ["batch", 6]), v0.IODescription("label", ["batch"])],
        [v0.IODescription("loss", []), v0.IODescription("logits", ["batch", 3])],
    )
    scaler = v0.LossScaler("scale", True, 2.0**12, up_scale_window=2) if is_mixed else None
    return v0.ORTTrainer(
        model, F.cross_entropy, desc, name, None, None, "cpu", gradient_accumulation_steps=2,
        get_lr_this_step=lambda step: 0.1 / (1 + step), use_mixed_precision=is_mixed,
        loss_scaler=scaler,
    )  # fmt: skip


def make_v1(model, name="AdamOptimizer", is_mixed=False):
    scaler = DynamicLossScaler(loss_scale=2.0**12, up_scale_window=2)
    options = {
        "device": {"id": "cpu"},
        "batch": {"gradient_accumulation_steps": 2},
        "mixed_precision": {"enabled": is_mixed, "loss_scaler": scaler},
    }
    return ORTTrainer(
        model, DESC, CONFIGS[name](lr=0.1), F.cross_entropy, ORTTrainerOptions(options)
    )


def tensors(state, path=""):
    """Give all parts of a state by their path."""
    if not isinstance(state, dict):
        return {path: state}
    return {key: it for name in state for key, it in tensors(state[name], f"{path}/{name}").items()}


def assert_same(got, want):
    got, want = tensors(got), tensors(want)
    assert got.keys() == want.keys()
    for name, it in want.items():
        same = torch.equal(it, got[name]) if isinstance(it, torch.Tensor) else it == got[name]
        assert same, name


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("stop", [3, 4])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("make", [make_v0, make_v1])
def test_training_goes_on_bit_by_bit(make, name, stop, is_mixed, tmp_path):
    through = make(net(), name, is_mixed)
    want = [through.train_step(x, y) for x, y in batches()]
    first, second = make(net(), name, is_mixed), make(other_net(), name, is_mixed)
    for x, y in batches()[:stop]:
        first.train_step(x, y)
    user = {"epoch": 3, "losses": [torch.tensor(0.5)], "name": "run"}
    if make is make_v0:
        v0.save_checkpoint(first, tmp_path, checkpoint_state_dict=user)
        assert [it.name for it in tmp_path.iterdir()] == ["ORT_checkpoint.ort.pt"]
        kept = v0.load_checkpoint(second, tmp_path, strict=True)
    else:
        first.save_checkpoint(tmp_path / "run.ort", user)
        kept = second.load_checkpoint(tmp_path / "run.ort")
    assert kept == user
    got = [second.train_step(x, y) for x, y in batches()[stop:]]
    torch.testing.assert_close(got, want[stop:], rtol=0, atol=0)
    assert_same(second.state_dict(), through.state_dict())


class Unused(nn.Module):
    """Has a part without gradients until it is told to use it."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.uses_all = nn.Linear(6, 3), nn.Linear(6, 3), False

    def forward(self, x):
        return self.used(x) + self.unused(x) if self.uses_all else self.used(x)


@pytest.mark.parametrize("make", [make_v0, make_v1])
def test_parameters_that_were_never_updated_have_no_moments(make, tmp_path):
    torch.manual_seed(0)
    first, second = make(Unused()), make(Unused())
    for x, y in batches(4):
        first.train_step(x, y)
    state = first.state_dict()
    second.load_state_dict(state, strict=True)
    assert_same(second.state_dict(), state)
    for trainer in (first, second):
        (model,) = {each for each in trainer._trainer.model.modules() if isinstance(each, Unused)}
        model.uses_all = True
        for x, y in batches(4):
            trainer.train_step(x, y)
    assert_same(second.state_dict(), first.state_dict())


@pytest.mark.parametrize("make", [make_v0, make_v1])
def test_a_state_from_before_the_first_update_makes_a_used_trainer_new(make):
    used, new = make(net()), make(other_net())
    before = used.state_dict()
    for x, y in batches():
        used.train_step(x, y)
    for trainer in (used, new):
        trainer.load_state_dict(before, strict=True)
        for x, y in batches():
            trainer.train_step(x, y)
    assert_same(used.state_dict(), new.state_dict())


@pytest.mark.parametrize("make", [make_v0, make_v1])
def test_states_are_copies(make):
    trainer = make(net())
    trainer.train_step(*batches(1)[0])
    before = trainer.state_dict()
    kept = {name: it.clone() for name, it in tensors(before).items() if hasattr(it, "clone")}
    for x, y in batches(3):
        trainer.train_step(x, y)
    after = tensors(before)
    assert all(torch.equal(after[name], it) for name, it in kept.items())


def test_names_of_the_first_state():
    model = net()
    trainer = make_v0(model)
    for x, y in batches(3):
        trainer.train_step(x, y)
    weights = [name for name, _ in model.named_parameters()]
    state = trainer.state_dict()
    assert state.keys() - model.state_dict().keys() == {
        "Step", "Calls",
        *(f"{kind}_{it}" for it in weights for kind in ("Moment_1", "Moment_2", "Update_Count")),
        *(f"Gradient_{it}" for it in weights),
    }  # fmt: skip
    assert (state["Step"], state["Update_Count_3.bias"].item()) == (1, 1)
    torch.testing.assert_close(trainer.state_dict(False), dict(model.state_dict()))


def test_names_of_the_second_state():
    model = net()
    trainer = make_v1(model)
    for x, y in batches(3):
        trainer.train_step(x, y)
    state = trainer.state_dict()
    assert state["model"]["full_precision"].keys() == model.state_dict().keys()
    assert state["optimizer"].keys() == dict(model.named_parameters()).keys()
    assert state["optimizer"]["3.bias"].keys() == {"Moment_1", "Moment_2", "Update_Count"}
    assert state["gradients"].keys() == state["optimizer"].keys()
    assert state["train_step_info"] == {"optimization_step": 1, "step": 3, "all_finite": True}
    assert state["trainer_options"]["optimizer_name"] == "AdamOptimizer"
    torch.testing.assert_close(trainer.state_dict(pytorch_format=True), dict(model.state_dict()))


@pytest.mark.parametrize("make", [make_v0, make_v1])
def test_weights_alone_can_be_loaded(make):
    model, other = net(), other_net()
    make(other).load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    partial = {"0.weight": torch.zeros(16, 6)}
    make(other).load_state_dict(partial, strict=False)
    assert not other[0].weight.any()
    with pytest.raises(RuntimeError, match="Missing key"):
        make(other).load_state_dict(partial, strict=True)


def test_state_of_another_optimizer():
    trainer = make_v1(net(), "LambOptimizer")
    for x, y in batches(2):
        trainer.train_step(x, y)
    words = "state_dict: got state of LambOptimizer, want that of AdamOptimizer"
    with pytest.raises(ValueError, match=words):
        make_v1(net()).load_state_dict(trainer.state_dict())
    state = trainer.state_dict()
    del state["optimizer"]["3.bias"]
    with pytest.raises(ValueError, match=r"optimizer: got no state of 3.bias; a sharded state"):
        make_v1(net(), "LambOptimizer").load_state_dict(state)
    state["optimizer"]["4.bias"] = state["optimizer"]["3.weight"]
    with pytest.raises(ValueError, match=r"optimizer: got state of 4.bias, want known parameters"):
        make_v1(net(), "LambOptimizer").load_state_dict(state)
    with pytest.raises(ValueError, match="state_dict: got unknown more"):
        make_v0(net()).load_state_dict({**net().state_dict(), "more": torch.ones(1)}, strict=True)


def test_a_checkpoint_without_the_optimizer(tmp_path):
    trainer = make_v1(net())
    for x, y in batches(3):
        trainer.train_step(x, y)
    trainer.save_checkpoint(tmp_path / "weights", include_optimizer_states=False)
    second = make_v1(other_net())
    assert second.load_checkpoint(tmp_path / "weights") == {}
    torch.testing.assert_close(second.state_dict(True), trainer.state_dict(True), rtol=0, atol=0)
    assert second.state_dict()["optimizer"] == {}


def test_folders_of_the_experimental_functions(tmp_path):
    trainer, second = make_v1(net()), make_v1(other_net())
    for x, y in batches(3):
        trainer.train_step(x, y)
    checkpoint.experimental_save_checkpoint(trainer, tmp_path, "run", {"epoch": 2})
    assert (tmp_path / "run.ort.pt").exists()
    assert checkpoint.experimental_load_checkpoint(second, tmp_path, "run") == {"epoch": 2}
    assert_same(second.state_dict(), trainer.state_dict())
    weights = checkpoint.experimental_state_dict(trainer, include_optimizer_state=False)
    third = make_v1(other_net())
    checkpoint.experimental_load_state_dict(third, weights)
    torch.testing.assert_close(third.state_dict(True), weights, rtol=0, atol=0)
    checkpoint.experimental_save_checkpoint(
        trainer, tmp_path, "bare", include_optimizer_state=False
    )
    assert torch.load(tmp_path / "bare.ort.pt", weights_only=True)["optimizer"] == {}
    with pytest.raises(AssertionError, match=r"checkpoint: got no file at .*other.ort.pt"):
        checkpoint.experimental_load_checkpoint(second, tmp_path, "other")


def test_aggregated_weights_are_the_models_own(tmp_path):
    trainer = make_v1(net())
    trainer.save_checkpoint(tmp_path / "a")
    got = checkpoint.aggregate_checkpoints([tmp_path / "a"])
    torch.testing.assert_close(got, trainer.state_dict(True), rtol=0, atol=0)
    whole = checkpoint.aggregate_checkpoints([tmp_path / "a"], pytorch_format=False)
    assert whole["train_step_info"]["step"] == 0
    trainer.train_step(*batches(1)[0])
    trainer.save_checkpoint(tmp_path / "b")
    with pytest.raises(ValueError, match=r"b: got another step than .*a, want files of one moment"):
        checkpoint.aggregate_checkpoints([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ValueError, match="load_checkpoint: got no path, want one"):
        checkpoint.aggregate_checkpoints([])


def test_what_cannot_be_read_back_is_not_written(tmp_path):
    class Own:
        pass

    words = "user_dict: got what cannot be read back as plain data"
    with pytest.raises(ValueError, match=words):
        make_v1(net()).save_checkpoint(tmp_path / "a", {"own": Own})
    with pytest.raises(ValueError, match="checkpoint_state_dict: got what cannot be read back"):
        v0.save_checkpoint(make_v0(net()), tmp_path, checkpoint_state_dict={"own": net()})
    with pytest.raises(ValueError, match="user_dict: got list, want a dict"):
        make_v1(net()).save_checkpoint(tmp_path / "a", [1])
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_stays(tmp_path):
    trainer = make_v1(net())
    trainer.save_checkpoint(tmp_path / "a")
    with pytest.raises(FileExistsError, match=r"save_checkpoint: .*a is there already"):
        trainer.save_checkpoint(tmp_path / "a")
    folder = tmp_path / "folder"
    v0.save_checkpoint(make_v0(net()), folder)
    v0.save_checkpoint(make_v0(net()), folder)  # the first one replaces


def write_hdf5(path):
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))


def write_text(path):
    path.write_text("hello")


def write_list(path):
    torch.save([1], path)


def write_code(path):
    torch.save({"model": net()}, path)


def write_other(path):
    torch.save({"weights": torch.ones(1)}, path)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (write_hdf5, "got an HDF5 file of ONNX Runtime Training.*pytorch_format=True"),
        (write_text, "got no file of torch.save, want one written by torch_ort"),
        (write_list, "got a list, want a checkpoint, a dict"),
        (write_code, "got no checkpoint of plain data"),
        (write_other, "got no state of .*, want a checkpoint of ORTTrainer"),
    ],
)
def test_files_of_other_kinds(write, words, tmp_path):
    path = tmp_path / "ORT_checkpoint.ort.pt"
    write(path)
    with pytest.raises(ValueError, match=f"{path}: {words}"):
        v0.load_checkpoint(make_v0(net()), tmp_path)
    with pytest.raises(ValueError, match=f"{path}: {words}"):
        make_v1(net()).load_checkpoint(path)


def test_missing_files(tmp_path):
    with pytest.raises(AssertionError, match=r"checkpoint: got no file at .*ORT_checkpoint.ort.pt"):
        v0.load_checkpoint(make_v0(net()), tmp_path)
    with pytest.raises(FileNotFoundError):
        make_v1(net()).load_checkpoint(tmp_path / "a")


def parts(folder, last, *ranks):
    for rank in ranks:
        (folder / f"run.ZeRO.{rank}.{last}.ort.pt").touch()


def test_which_files_are_read(tmp_path):
    def names(rank, world_size):
        return [it.name for it in checkpoint_files.find(tmp_path, "run", rank, world_size)]

    parts(tmp_path, 2, 0, 2)
    with pytest.raises(AssertionError, match=r"got no file at .*run.ZeRO.1.2.ort.pt"):
        names(None, 1)
    assert names(2, 3) == ["run.ZeRO.2.2.ort.pt"]
    parts(tmp_path, 2, 1)
    with pytest.warns(UserWarning, match=r"3 files run.ZeRO.\*.2.ort.pt are put together"):
        assert names(None, 1) == [f"run.ZeRO.{rank}.2.ort.pt" for rank in range(3)]
    with pytest.warns(UserWarning, match="are put together"):
        assert len(names(1, 2)) == 3  # of another number of ranks
    (tmp_path / "run.ort.pt").touch()
    with pytest.warns(UserWarning, match="run.ort.pt: read alone, with parts beside it"):
        assert names(None, 1) == ["run.ort.pt"]
    (tmp_path / "run2.ort.pt").touch()
    assert [it.name for it in checkpoint_files.find(tmp_path, "run2", 1, 2)] == ["run2.ort.pt"]
    with pytest.raises(AssertionError, match=r"got no file of rank 1 at .*more.ZeRO.1.1.ort.pt"):
        checkpoint_files.find(tmp_path, "more", 1, 2)
