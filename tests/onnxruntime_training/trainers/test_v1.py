"""The second ORTTrainer: the same training as a loop in eager PyTorch."""

from __future__ import annotations

import copy
import warnings

import onnx
import pytest
import torch
import torch.nn.functional as F
from eager_loops import WithLoss, batches, make_optimizer, net, train
from models import module_with
from torch import nn

import torch_ort
from torch_ort.optim import AdamConfig, LambConfig, SGDConfig, lr_scheduler
from torch_ort.trainers.loss_scaler import DynamicLossScaler, LossScaler
from torch_ort.trainers.v1 import ORTTrainer, ORTTrainerOptions, TrainStepInfo

pytestmark = pytest.mark.ort_only

DESC = {
    "inputs": [("x", ["batch", 6]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}
CONFIGS = {
    "SGDOptimizer": SGDConfig(lr=0.05),
    "AdamOptimizer": AdamConfig(lr=0.05, lambda_coef=0.1),
    "LambOptimizer": LambConfig(lr=0.05, lambda_coef=0.1),
}
DECAYS = {"SGDOptimizer": {}, "AdamOptimizer": {"weight_decay": 0.1}}
DECAYS["LambOptimizer"] = {"weight_decay": 0.1, "corrected": False}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def make(model, name="SGDOptimizer", loss_fn=F.cross_entropy, desc=DESC, **options):
    options.setdefault("device", {"id": "cpu"})
    return ORTTrainer(model, desc, CONFIGS[name], loss_fn, ORTTrainerOptions(options))


def eager(name, data, **settings):
    model = net()
    optimizer = make_optimizer(name, model, **DECAYS[name])
    settings.setdefault("lr", lambda _: 0.05)
    if name != "SGDOptimizer":
        settings.setdefault("max_norm", 1.0)
    return model, train(model, optimizer, data=data, **settings)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_are_those_of_a_loop(name, accumulation):
    want_model, want = eager(name, batches(), accumulation=accumulation)
    model = net()
    torch_ort.reset_counters()
    trainer = make(model, name, batch={"gradient_accumulation_steps": accumulation})
    got = [trainer.train_step(x, y) for x, y in batches()]
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(model.state_dict(), want_model.state_dict(), **CLOSE)
    info = trainer.train_step_info
    assert (info.step, info.optimization_step, info.all_finite) == (6, 6 // accumulation, True)
    counters = torch_ort.counters()
    assert (counters["fallbacks"], counters["backward_runs"]) == (0, 6)


def test_defaults():
    trainer = ORTTrainer(net(), DESC, AdamConfig(), F.cross_entropy)
    before = copy.deepcopy(trainer._trainer.model.state_dict())
    loss, logits = trainer.train_step(*batches(1)[0])
    assert (loss.shape, logits.shape) == ((), (8, 3))
    assert not torch.equal(before["0.weight"].cpu(), trainer.state_dict(True)["0.weight"])


@pytest.mark.parametrize(
    ("schedule", "torchs"),
    [
        (lr_scheduler.ConstantWarmupLRScheduler(12, warmup=0.25), lambda s: min(1, s / 3)),
        (lr_scheduler.LinearWarmupLRScheduler(4, warmup=0.0), lambda s: max(0, 1 - s / 4)),
    ],
)
def test_a_schedule_gives_the_rate_of_each_update(schedule, torchs):
    want_model, want = eager("SGDOptimizer", batches(), lr=lambda s: 0.05 * torchs(s))
    model = net()
    trainer = make(model, lr_scheduler=schedule)
    got = [trainer.train_step(x, y) for x, y in batches()]
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(model.state_dict(), want_model.state_dict(), **CLOSE)
    assert schedule.get_last_lr() == [pytest.approx(0.05 * torchs(5))]


def test_a_schedule_of_ones_own():
    class Halving(lr_scheduler.LRScheduler):
        def get_lr(self, train_step_info):
            assert isinstance(train_step_info, TrainStepInfo)
            return [train_step_info.optimizer_config.lr / 2**train_step_info.optimization_step]

    want_model, _ = eager("SGDOptimizer", batches(), lr=lambda s: 0.05 / 2**s, accumulation=3)
    model = net()
    trainer = make(model, lr_scheduler=Halving(), batch={"gradient_accumulation_steps": 3})
    for x, y in batches():
        trainer.train_step(label=y, x=x)
    torch.testing.assert_close(model.state_dict(), want_model.state_dict(), **CLOSE)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_mixed_precision(accumulation):
    scaler = DynamicLossScaler(loss_scale=512.0)
    want_model, want = eager("AdamOptimizer", batches(), scale=512.0, accumulation=accumulation)
    model = net()
    trainer = make(
        model, "AdamOptimizer", mixed_precision={"enabled": True, "loss_scaler": scaler},
        batch={"gradient_accumulation_steps": accumulation},
    )  # fmt: skip
    got = [trainer.train_step(x, y) for x, y in batches()]
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(model.state_dict(), want_model.state_dict(), rtol=2e-2, atol=2e-2)
    assert got[0][1].dtype == torch.float16
    assert all(it.dtype == torch.float32 for it in model.parameters())


def test_a_scaler_of_ones_own_is_told_how_it_went():
    told = []

    class Shrinking(LossScaler):
        def update(self, train_step_info):
            told.append((train_step_info.all_finite, train_step_info.optimization_step))
            if not train_step_info.all_finite:
                self.loss_scale /= 2.0**40

    scaler = Shrinking(2.0**50)
    trainer = make(net(), mixed_precision={"enabled": True, "loss_scaler": scaler})
    for x, y in batches(3):
        trainer.train_step(x, y)
    assert told == [(False, 0), (True, 1), (True, 2)]
    assert (trainer.train_step_info.step, scaler.loss_scale) == (3, 2.0**10)


def test_mixed_precision_has_a_scaler_by_itself():
    trainer = make(net(), mixed_precision={"enabled": True})
    for x, y in batches(2):
        trainer.train_step(x, y)
    assert trainer.state_dict()["loss_scaler"] == {"loss_scale": 65536.0, "num_good": 2}


def test_the_loss_may_stand_anywhere():
    desc = {**DESC, "outputs": [("logits", ["batch", 3]), ("loss", [], True)]}
    _, want = eager("SGDOptimizer", batches())
    trainer = make(net(), desc=desc)
    got = [trainer.train_step(x, y)[::-1] for x, y in batches()]
    torch.testing.assert_close(got, want, **CLOSE)
    logits, loss = trainer.eval_step(*batches(1)[0])
    assert (logits.shape, loss.shape) == ((8, 3), ())


def test_a_model_that_gives_its_loss_by_name():
    desc = {
        "inputs": [("x", ["batch", 6]), ("labels", ["batch"])],
        "outputs": [("logits", ["batch", 3]), ("loss", [], True)],
    }
    _, want = eager("SGDOptimizer", batches())
    trainer = make(WithLoss(net()), loss_fn=None, desc=desc)
    got = [trainer.train_step(x, y)[::-1] for x, y in batches()]
    torch.testing.assert_close(got, want, **CLOSE)


def test_fetches_and_evaluation():
    model = net()
    trainer = make(model)
    x, y = batches(1)[0]
    trainer.train_step_info.fetches = ["logits"]
    assert trainer.train_step(x, y).shape == (8, 3)
    before = copy.deepcopy(trainer.state_dict())
    with torch.no_grad():
        want = copy.deepcopy(model).eval()(x)
    torch.testing.assert_close(trainer.eval_step(x), want, **CLOSE)
    trainer.train_step_info.fetches = []
    got = trainer.eval_step(x, y)
    torch.testing.assert_close(got, (F.cross_entropy(want, y), want), **CLOSE)
    after = trainer.state_dict()
    for part in ("model", "optimizer", "gradients"):
        torch.testing.assert_close(after[part], before[part], rtol=0, atol=0)
    assert after["train_step_info"] == before["train_step_info"]
    with pytest.raises(RuntimeError, match="eval_step: got 1 inputs, want 2: x, label"):
        trainer.eval_step(x)
    trainer.train_step_info.fetches = ["probs"]
    with pytest.raises(ValueError, match="fetches: got 'probs', want some of loss, logits"):
        trainer.train_step(x, y)


@pytest.mark.parametrize("clips", [True, False])
def test_the_norm_is_clipped_if_asked_for(clips, monkeypatch):
    monkeypatch.setitem(CONFIGS, "AdamOptimizer", AdamConfig(lr=0.05, max_norm_clip=1e-9))
    want_model, _ = eager("AdamOptimizer", [])
    model = net()
    optimizer = torch.optim.AdamW(want_model.parameters(), lr=0.05, eps=1e-8, weight_decay=0)
    train(want_model, optimizer, lambda _: 0.05, batches(), max_norm=1e-9 if clips else None)
    trainer = make(model, "AdamOptimizer", utils={"grad_norm_clip": clips})
    for x, y in batches():
        trainer.train_step(x, y)
    torch.testing.assert_close(model.state_dict(), want_model.state_dict(), rtol=1e-3, atol=1e-4)


def test_frozen_weights_and_groups():
    model = net()
    before = copy.deepcopy(model.state_dict())
    config = AdamConfig([{"params": ["3.weight"], "lambda_coef": 0.5, "alpha": 0.5}], lr=0.1)
    options = ORTTrainerOptions(
        {"utils": {"frozen_weights": ["0.weight"]}, "device": {"id": "cpu"}}
    )
    trainer = ORTTrainer(model, DESC, config, F.cross_entropy, options)
    trainer.train_step(*batches(1)[0])
    changed = {name for name, it in model.named_parameters() if not torch.equal(it, before[name])}
    assert changed == {"1.weight", "1.bias", "3.weight", "3.bias"}
    first, second = trainer._trainer.core.optimizer.param_groups
    assert (first["weight_decay"], first["betas"]) == (0.5, (0.5, 0.999))
    assert (second["weight_decay"], len(second["params"])) == (0.0, 3)


def test_descriptions_that_contradict_the_data_warn_once():
    desc = {
        "inputs": [("x", [8, 5]), ("label", ["batch", "words"])],
        "outputs": [("loss", [], True), ("logits", ["batch", 3])],
    }
    trainer = make(net(), desc=desc)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for x, y in batches(3):
            trainer.train_step(x, y)
    assert [str(it.message) for it in told] == [
        "x: shape: got [8, 6], described as [8, 5]; the data is taken as it is",
        "label: shape: got [8], described as ['batch', 'words']; the data is taken as it is",
    ]
    assert {it.filename for it in told} == {__file__}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": onnx.ModelProto()}, TypeError, "model: got ModelProto, want a torch.nn.Module"),
        ({"model": nn.DataParallel(net())}, TypeError, "model: got DataParallel, want the module"),
        ({"optim_config": "Adam"}, TypeError, "optim_config: got str, want an SGDConfig"),
        ({"options": {}}, TypeError, "options: got dict, want ORTTrainerOptions"),
        ({"loss_fn": lambda a, b, c: 0}, RuntimeError, "loss_fn: want a function of two argument"),
        ({"model_desc": {}}, ValueError, "model_desc: inputs: got None.*; outputs: got None"),
        ({"optim_config": AdamConfig([{"params": ["w"]}])}, ValueError, "params: got 'w', want a"),
    ],
)
def test_arguments_that_do_not_fit(arguments, error, words):
    known = {"model": net(), "model_desc": DESC, "optim_config": SGDConfig()}
    with pytest.raises(error, match=words):
        ORTTrainer(**{**known, "loss_fn": F.cross_entropy, **arguments})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_of_other_dtypes(dtype, tmp_path):
    def small(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)

    def start(model):
        options = ORTTrainerOptions({"device": {"id": "cpu"}})
        return ORTTrainer(model, DESC, AdamConfig(lr=0.05), F.cross_entropy, options)

    want_model, model = small(0), small(0)
    data = [(x.to(dtype), y) for x, y in batches()]
    optimizer = AdamConfig(lr=0.05, max_norm_clip=1e9).optimizer(want_model.named_parameters())
    want = train(want_model, optimizer, lambda _: 0.05, data, max_norm=1.0)
    trainer = start(model)
    got = [trainer.train_step(x, y) for x, y in data[:3]]
    trainer.save_checkpoint(tmp_path / "run")
    trainer = start(small(1))
    trainer.load_checkpoint(tmp_path / "run")
    got += [trainer.train_step(x, y) for x, y in data[3:]]
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(got, want, **close)
    assert got[0][1].dtype == dtype
    moments = trainer.state_dict()["optimizer"]["0.weight"]
    assert moments["Moment_1"].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.hands_over
def test_sparse_gradients_are_refused_in_words(monkeypatch):
    monkeypatch.delenv("TORCH_ORT_STRICT")  # such a module runs in eager PyTorch

    trainer = make(
        module_with(lambda self, x: self.table(x), table=nn.Embedding(5, 3, sparse=True)),
        "AdamOptimizer",
        desc={**DESC, "inputs": [("x", ["n"]), ("label", ["n"])]},
    )
    with pytest.raises(RuntimeError, match="gradients: got a sparse one, want dense ones"):
        trainer.train_step(torch.tensor([1, 2]), torch.tensor([0, 1]))
