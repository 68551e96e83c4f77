"""The first ORTTrainer: the same training as a loop in eager PyTorch."""

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
from torch_ort import DebugOptions, LogLevel, ORTModule
from torch_ort.trainers.v0 import IODescription, LossScaler, ModelDescription, ORTTrainer

pytestmark = pytest.mark.ort_only

RATE = IODescription("Learning_Rate", [1], torch.float32)
OPTIMIZERS = ("SGDOptimizer", "AdamOptimizer", "LambOptimizer")
CLIPS = {"SGDOptimizer": None, "AdamOptimizer": 1.0, "LambOptimizer": 1.0}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def described() -> ModelDescription:
    return ModelDescription(
        [
            IODescription("x", ["batch", 6], torch.float32),
            IODescription("label", ["batch"], torch.int64, 3),
        ],
        [
            IODescription("loss", [], torch.float32),
            IODescription("logits", ["batch", 3], torch.float32),
        ],
    )


def make(model, name="SGDOptimizer", attributes=None, loss_fn=F.cross_entropy, **settings):
    desc = settings.pop("model_desc") if "model_desc" in settings else described()
    rate = settings.pop("learning_rate_description", RATE)
    return ORTTrainer(model, loss_fn, desc, name, attributes, rate, "cpu", **settings)


def lr_of(updates):
    return 0.05 / (1 + updates)


@pytest.fixture(autouse=True)
def no_warnings(recwarn):
    yield
    assert not [str(it.message) for it in recwarn if "described as" in str(it.message)]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_a_loop(name, accumulation):
    eager, model = net(), net()
    want = train(
        eager, make_optimizer(name, eager), lr_of, batches(), accumulation=accumulation,
        max_norm=CLIPS[name],
    )  # fmt: skip
    torch_ort.reset_counters()
    trainer = make(model, name, gradient_accumulation_steps=accumulation)
    got = [
        trainer.train_step(x, y, torch.tensor([lr_of(trainer.global_step_)])) for x, y in batches()
    ]
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **CLOSE)
    assert trainer.global_step_ == 6 // accumulation
    counters = torch_ort.counters()
    assert (counters["fallbacks"], counters["backward_runs"]) == (0, 6)
    assert counters["graphs_captured"] == 1


@pytest.mark.parametrize("clips", [True, False])
def test_the_norm_is_clipped_if_asked_for(clips):
    eager, model = net(), net()
    settings = {"max_norm_clip": 0.02, "lambda": 0.1, "epsilon": 1e-8}
    trainer = make(model, "AdamOptimizer", lambda _: settings, enable_grad_norm_clip=clips)
    optimizer = make_optimizer("AdamOptimizer", eager, weight_decay=0.1)
    want = train(eager, optimizer, lr_of, batches(), max_norm=0.02 if clips else None)
    got = [trainer.train_step(x, y, torch.tensor(lr_of(i))) for i, (x, y) in enumerate(batches())]
    torch.testing.assert_close(got, want, **CLOSE)


def test_weights_have_attributes_of_their_own():
    eager, model = net(), net()
    others = {"alpha": 0.8, "beta": 0.95, "lambda": 0.1, "epsilon": 1e-4}

    def attributes(name):
        return {**others, "lambda": 0.0} if name.endswith("bias") else others

    trainer = make(model, "AdamOptimizer", attributes, enable_grad_norm_clip=False)
    is_bias = {True: [], False: []}
    for name, it in eager.named_parameters():
        is_bias[name.endswith("bias")].append(it)
    optimizer = torch.optim.AdamW(
        [{"params": is_bias[True], "weight_decay": 0.0}, {"params": is_bias[False]}],
        betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1,
    )  # fmt: skip
    want = train(eager, optimizer, lr_of, batches())
    got = [trainer.train_step(x, y, torch.tensor(lr_of(i))) for i, (x, y) in enumerate(batches())]
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **CLOSE)


def test_decay_after_the_update_is_another_mode():
    model = nn.Linear(3, 2)
    settings = {"lambda": 0.5, "weight_decay_mode": 1}
    trainer = make(model, "AdamOptimizer", lambda _: settings)
    assert trainer._trainer.core.optimizer._adam_w_mode == 1


def test_a_schedule_replaces_the_learning_rate():
    eager, model = net(), net()
    asked = []

    def schedule(global_step):
        asked.append(global_step)
        return lr_of(global_step)

    trainer = make(model, get_lr_this_step=schedule, learning_rate_description=None)
    want = train(eager, make_optimizer("SGDOptimizer", eager), lr_of, batches())
    got = [trainer.train_step(x, label=y) for x, y in batches()]
    torch.testing.assert_close(got, want, **CLOSE)
    assert asked == list(range(6))
    later = make(net(), get_lr_this_step=schedule, global_step=40)
    later.train_step(*batches(1)[0])
    assert (asked[-1], later.global_step_) == (40, 41)


def test_inputs_by_name_and_some_outputs():
    x, y = batches(1)[0]
    trainer = make(net())
    loss = trainer.train_step(Learning_Rate=0.0, label=y, x=x, fetches=["loss"])
    assert loss.shape == ()
    logits, again = trainer.train_step(x, y, 0.0, fetches=["logits", "loss"])
    assert logits.shape == (8, 3)
    torch.testing.assert_close(again, F.cross_entropy(logits, y))
    assert not logits.requires_grad


@pytest.mark.parametrize("accumulation", [1, 2])
def test_mixed_precision_with_a_scaler(accumulation):
    eager, model = net(), net()
    scaler = LossScaler("loss_scale", True, loss_scale=1024.0, up_scale_window=1000)
    want = train(
        eager, make_optimizer("AdamOptimizer", eager), lr_of, batches(), scale=1024.0,
        accumulation=accumulation, max_norm=1.0,
    )  # fmt: skip
    trainer = make(
        model, "AdamOptimizer", use_mixed_precision=True, loss_scaler=scaler,
        gradient_accumulation_steps=accumulation, get_lr_this_step=lr_of,
    )  # fmt: skip
    got = [trainer.train_step(x, y) for x, y in batches()]
    assert got[0][1].dtype == torch.float16
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=2e-2, atol=2e-2)
    assert scaler.loss_scale_ == 1024.0


def test_the_caller_keeps_the_loss_scale():
    model = net()
    before = copy.deepcopy(model.state_dict())
    x, y = batches(1)[0]
    trainer = make(model, use_mixed_precision=True)
    loss, _, is_finite = trainer.train_step(x, y, torch.tensor([0.1]), torch.tensor([1e30]))
    assert (is_finite.dtype, is_finite.shape) == (torch.bool, ())
    assert not is_finite
    assert loss.isfinite()
    weights = dict(model.named_parameters())
    torch.testing.assert_close({name: before[name] for name in weights}, weights, rtol=0, atol=0)
    assert trainer.global_step_ == 0
    loss, is_finite = trainer.train_step(x, y, 0.1, loss_scale=8.0, fetches=["loss"])
    assert is_finite
    assert trainer.global_step_ == 1


def test_a_scaler_follows_what_gradients_bear():
    scaler = LossScaler("loss_scale", True, loss_scale=2.0**24, up_scale_window=2)
    trainer = make(
        net(), use_mixed_precision=True, loss_scaler=scaler, get_lr_this_step=lambda _: 0.01
    )
    scales = []
    for x, y in batches(6):
        trainer.train_step(x * 100, y)
        scales.append(scaler.loss_scale_)
    assert scales[0] == 2.0**23
    assert trainer.global_step_ == sum(a >= b for a, b in zip(scales[1:], scales, strict=False))


def test_scales_go_up_and_down_between_limits():
    scaler = LossScaler("scale", True, 4.0, up_scale_window=2, min_loss_scale=2, max_loss_scale=8)
    scales = []
    for is_finite in [True, True, True, torch.tensor(True), False, False, False, True, False]:
        scaler.update_loss_scale(is_finite)
        scales.append(scaler.loss_scale_)
    assert scales == [4, 8, 8, 8, 4, 2, 2, 2, 2]
    fixed = LossScaler("scale", False, 4.0)
    fixed.update_loss_scale(False)
    assert fixed.loss_scale_ == 4.0
    scaler.reset()
    assert scaler.loss_scale == 4.0


def test_a_model_that_gives_its_loss():
    def forward(self, x, y):
        logits = self.net(x)
        return F.cross_entropy(logits, y), (logits, [logits.argmax(1)])

    eager, model = net(), module_with(forward, net=net())
    desc = described()
    desc.outputs_.append(IODescription("classes", ["batch"], torch.int64))
    trainer = make(model, loss_fn=None, model_desc=desc)  # `label` is no parameter: by place
    want = train(eager, make_optimizer("SGDOptimizer", eager), lr_of, batches())
    got = [trainer.train_step(x, y, lr_of(i)) for i, (x, y) in enumerate(batches())]
    torch.testing.assert_close([it[:2] for it in got], want, **CLOSE)
    assert torch.equal(got[0][2], got[0][1].argmax(1))


def by_name(*inputs):
    return ModelDescription(
        [IODescription(name, shape) for name, shape in inputs],
        [IODescription("loss", []), IODescription("logits", ["batch", 3])],
    )


def test_inputs_find_the_parameters_of_forward():
    eager, model = net(), WithLoss(net())
    desc = by_name(("labels", ["batch"]), ("scale", []), ("x", ["batch", 6]))
    trainer = make(model, loss_fn=None, model_desc=desc)
    want = train(eager, make_optimizer("SGDOptimizer", eager), lr_of, batches())
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    got = [trainer.train_step(y, one, x, lr_of(i)) for i, (x, y) in enumerate(batches())]
    torch.testing.assert_close(got, want, **CLOSE)
    x, y = batches(1)[0]
    logits = trainer.eval_step(x=x, fetches=["logits"])
    torch.testing.assert_close(logits, trainer.eval_step(y, one, x)[1])
    doubled = trainer.eval_step(x=x, scale=two, fetches=["logits"])
    torch.testing.assert_close(doubled, 2 * logits)


def test_evaluation_needs_no_labels_and_changes_nothing():
    model = net()
    trainer = make(model)
    x, y = batches(1)[0]
    trainer.train_step(x, y, 0.1)
    before = copy.deepcopy(trainer.state_dict())
    loss, logits = trainer.eval_step(x, y)
    with torch.no_grad():
        want = copy.deepcopy(model).eval()(x)
    torch.testing.assert_close((loss, logits), (F.cross_entropy(want, y), want), **CLOSE)
    torch.testing.assert_close(trainer.eval_step(x, fetches=["logits"]), want, **CLOSE)
    torch.testing.assert_close(trainer.eval_step(x, y, fetches=["loss"]), loss)
    torch.testing.assert_close(trainer.state_dict(), before, rtol=0, atol=0)
    assert model.training
    with pytest.raises(RuntimeError, match="eval_step: got 1 inputs, want 2: x, label; missing:"):
        trainer.eval_step(x)


def test_calls_train_or_evaluate():
    trainer = make(net())
    x, y = batches(1)[0]
    trainer(x, y, 0.1)
    assert trainer.global_step_ == 1
    trainer.eval()
    trainer(x, y)
    assert trainer.global_step_ == 1
    trainer.train()
    trainer(x, y, 0.1)
    assert trainer.global_step_ == 2


def test_a_model_in_evaluation_mode_is_trained_in_training_mode():
    model = net().eval()
    trainer = make(model)
    trainer.train_step(*batches(1)[0], 0.1)
    assert model[1].num_batches_tracked == 1
    model[1].eval()  # a part that the caller keeps as it is
    trainer.train_step(*batches(1)[0], 0.1)
    assert model[1].num_batches_tracked == 1


def test_frozen_weights_stay():
    model = net()
    before = copy.deepcopy(model.state_dict())
    trainer = make(model, "LambOptimizer", frozen_weights=["0.weight", "3.bias"])
    for x, y in batches():
        trainer.train_step(x, y, 0.1)
    for name, it in model.named_parameters():
        assert torch.equal(it, before[name]) == (name in ("0.weight", "3.bias")), name
    with pytest.raises(ValueError, match=r"frozen_weights: got '0.wieght', .* mean 0.weight"):
        make(net(), frozen_weights=["0.wieght"])


def test_deterministic_steps_leave_the_switch_alone():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().forward(x)

    trainer = make(Watched(6, 3), _use_deterministic_compute=True)
    trainer.train_step(*batches(1)[0], 0.1)
    trainer.eval_step(*batches(1)[0])
    assert seen
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_ortmodule_keeps_its_options():
    model = ORTModule(net(), DebugOptions(LogLevel.ERROR))
    trainer = make(model)
    assert trainer._trainer.model is model.module
    assert trainer._trainer.core.engine._debug_options.log_level == LogLevel.ERROR


def test_descriptions_that_contradict_the_data_warn_once():
    desc = ModelDescription(
        [IODescription("x", [8, 6], torch.int64), IODescription("label", [8, 3], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("logits", [8, 3])],
    )
    trainer = make(net(), model_desc=desc)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for x, y in batches(3):
            trainer.train_step(x, y, 0.1)
            trainer.eval_step(x, y)
    messages = [str(it.message) for it in told]
    assert messages == [
        "x: dtype: got torch.float32, described as torch.int64; the data is taken as it is",
        "label: shape: got [8], described as [8, 3]; the data is taken as it is",
        "logits: shape: got [9, 3], described as [8, 3]; the data is taken as it is",
    ]
    assert {it.filename for it in told} == {__file__}


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (1, {}, r"got 1 inputs, want 3: x, label, Learning_Rate; missing: label, Learning_Rate"),
        (2, {}, r"train_step: got 2 inputs, want 3: x, label, Learning_Rate"),
        (2, {"Learning_Rate": 0.1, "lr": 1}, "got an input 'lr', want one of x, label, Learn"),
        (2, {"label": 0}, "got an input 'label', twice"),
        (2, {"Learning_Rate": torch.ones(2)}, r"a tensor of shape \[2\], want one number"),
    ],
)
def test_wrong_calls(args, kwargs, words):
    with pytest.raises(RuntimeError, match=words):
        make(net()).train_step(*batches(1)[0][:args], **kwargs)
    with pytest.raises(RuntimeError, match="got 4 inputs, want 3: x, label, Learning_Rate"):
        make(net()).train_step(1, 2, 3, 4)


def test_unknown_outputs():
    with pytest.raises(ValueError, match="fetches: got 'probs', want some of loss, logits"):
        make(net()).train_step(*batches(1)[0], 0.1, fetches=["probs"])


@pytest.mark.hands_over
def test_models_that_give_other_than_described(monkeypatch):
    monkeypatch.delenv("TORCH_ORT_STRICT")
    desc = described()
    desc.outputs_.append(IODescription("more", []))
    with pytest.raises(RuntimeError, match="the model gave 1, the description has 2 of it: logits"):
        make(net(), model_desc=desc).train_step(*batches(1)[0], 0.1)
    with pytest.raises(ValueError, match=r"loss: got torch.float32 \[8\], want a floating number"):
        make(net(), loss_fn=lambda p, y: p.sum(1)).train_step(*batches(1)[0], 0.1)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"model": onnx.ModelProto()}, TypeError, "model: got ModelProto, want a torch.nn.Module:"),
        ({"model": 3}, TypeError, "model: got int, want a torch.nn.Module"),
        ({"loss_fn": lambda p: p}, RuntimeError, "loss_fn: want a function of two arguments"),
        ({"loss_fn": 3}, TypeError, "loss_fn: got int, want a function or None"),
        ({"model_desc": {}}, ValueError, "model_desc: got dict, want a ModelDescription"),
        ({"name": "Adam"}, ValueError, "training_optimizer_name: got 'Adam', want one of SGDOpt"),
        ({"learning_rate_description": None}, ValueError, "learning_rate_description: got None"),
        ({"attributes": lambda _: {"alpha": "a"}, "name": "AdamOptimizer"}, ValueError,
         "map_optimizer_attributes: alpha of 0.weight: got 'a', want a number"),
        ({"attributes": lambda _: {"gamma": 1}, "name": "AdamOptimizer"}, ValueError,
         "AdamConfig: group: got 'gamma', want some of alpha, beta"),
        ({"attributes": lambda _: {"alpha": 1}}, ValueError, "SGDOptimizer has no settings"),
        ({"attributes": lambda it: {"max_norm_clip": len(it)}, "name": "LambOptimizer"}, ValueError,
         "max_norm_clip: got several values, want one for all weights"),
        ({"deepspeed_zero_stage": 2}, ValueError, "deepspeed_zero_stage: got 2, want 0 or 1; for"),
        ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps: got 0"),
        ({"world_size": 0}, ValueError, "world_size: got 0, want at least 1"),
        ({"world_rank": 1}, ValueError, "world_rank: got 1, want one of 0 to 0"),
        ({"_opset_version": 7}, ValueError, "_opset_version: got 7, want from 12 to"),
        ({"enable_adasum": True}, ValueError, "enable_adasum: got True, which torch_ort does not"),
        ({"_extra_postprocess": print}, ValueError, "_extra_postprocess: .*register_graph_optimiz"),
        ({"optimized_model_filepath": "m"}, ValueError, "optimized_model_filepath: got 'm'.*save_"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(settings, error, words):
    with pytest.raises(error, match=words):
        make(settings.pop("model", None) or net(), **settings)


def test_what_changes_nothing_is_told_once(caplog):
    for _ in range(2):
        make(net(), use_invertible_layernorm_grad=True)
    told = [it.getMessage() for it in caplog.records if it.name == "torch_ort.trainers"]
    assert told == [
        "ORTTrainer: use_invertible_layernorm_grad changes nothing here: the planner keeps what "
        "backward reads, and nothing else"
    ]


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: IODescription("", []), "name: got '', want a string"),
        (lambda: IODescription("x", 3), "shape of x: got 3, want a list"),
        (lambda: IODescription("x", [], "float"), "dtype of x: got 'float', want a torch.dtype"),
        (lambda: ModelDescription([], [RATE]), "inputs: got .*, want IODescriptions"),
        (lambda: ModelDescription([RATE], [RATE, RATE]), "outputs: got names .*, want each one"),
        (lambda: LossScaler("s", True, 0.0), "loss_scale: got 0.0, want more than 0"),
        (lambda: LossScaler("s", True, 0.5), "loss_scale: got 0.5, want from 1.0 to"),
        (lambda: LossScaler("s", True, up_scale_window=0), "up_scale_window: got 0, want at leas"),
    ],
)
def test_descriptions_that_are_wrong(make_it, words):
    with pytest.raises(ValueError, match=words):
        make_it()
