"""The trainer around a live optimizer: the same training as a loop in eager PyTorch."""

from __future__ import annotations

import copy
import io

import onnx
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import module_with
from processes import run_script
from torch import nn

import torch_ort
from torch_ort import DebugOptions, LogLevel, ORTModule
from torch_ort.trainers import Trainer, trainer

pytestmark = pytest.mark.ort_only


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))


def batches(count=6):
    numbers = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8 + i, 6, generator=numbers), torch.randint(3, (8 + i,), generator=numbers))
        for i in range(count)
    ]


def make(model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if settings.pop("scheduled", False):
        settings["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return Trainer(model, F.cross_entropy, optimizer, **settings)


def train_in_eager(model, accumulation=1, max_norm=None, scheduled=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    results = []
    for i, (x, y) in enumerate(batches(), 1):
        prediction = model(x)
        loss = F.cross_entropy(prediction, y)
        (loss / accumulation).backward()
        results.append((loss.detach(), prediction.detach()))
        if i % accumulation == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            if scheduled:
                scheduler.step()
    return results


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("scheduled", [False, True])
def test_steps_are_those_of_a_loop(accumulation, max_norm, scheduled):
    eager, model = net(), net()
    want = train_in_eager(eager, accumulation, max_norm, scheduled)
    torch_ort.reset_counters()
    run = make(
        model, gradient_accumulation_steps=accumulation, max_grad_norm=max_norm,
        scheduled=scheduled,
    )  # fmt: skip
    got = [run.step(x, y) for x, y in batches()]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-5)
    assert not any(it.requires_grad for pair in got for it in pair)
    assert (run.num_calls, run.num_updates) == (6, 6 // accumulation)
    counters = torch_ort.counters()
    assert (counters["fallbacks"], counters["backward_runs"]) == (0, 6)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch_ort.optim.FusedAdam])
def test_gradients_that_are_not_finite_are_clipped_as_in_a_loop(kind, number):
    """Where one is infinite, all others become 0; where one is NaN, all are NaN."""
    models = [nn.Linear(3, 2, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.tensor([[1.0, 2.0, number]])
    eager, ours = (kind(model.parameters(), lr=0.1) for model in models)
    models[0](x).sum().backward()
    nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
    eager.step()
    run = Trainer(models[1], lambda y, label: (y + label).sum(), ours, max_grad_norm=1.0)
    run.step(x, torch.zeros(2))
    torch.testing.assert_close(models[1].weight, models[0].weight, equal_nan=True)


def test_groups_that_are_added_later_are_clipped():
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
    eager = copy.deepcopy(model)
    updates = []
    for each in (eager, model):
        optimizer = torch.optim.SGD(each[0].parameters(), lr=1.0)
        run = Trainer(each, F.cross_entropy, optimizer, max_grad_norm=1e-3)
        optimizer.add_param_group({"params": [*each[1].parameters()]})
        before = [it.detach().clone() for it in each.parameters()]
        x, y = batches(1)[0]
        if each is model:
            run.step(x * 10, y)
        else:
            F.cross_entropy(eager(x * 10), y).backward()
            nn.utils.clip_grad_norm_(eager.parameters(), 1e-3)
            optimizer.step()
        updates.append([a - b for a, b in zip(before, each.parameters(), strict=True)])
    torch.testing.assert_close(*reversed(updates), rtol=1e-3, atol=1e-7)


def test_the_criterion_is_in_the_graph():
    run = make(net())
    torch_ort.reset_counters()
    run.step(*batches(1)[0])
    assert torch_ort.counters()["graphs_captured"] == 1
    assert type(run.core.engine.module).__name__ == "ModuleWithLoss"


def test_several_inputs_and_results():
    model = module_with(
        lambda self, x, scale: {"logits": self.linear(x) * scale, "mean": x.mean()},
        linear=nn.Linear(6, 3),
    )
    run = Trainer(
        model,
        lambda it, y: F.cross_entropy(it["logits"], y),
        torch.optim.SGD(model.parameters(), 0.1),
    )
    x, y = batches(1)[0]
    loss, prediction = run.step(x, torch.tensor(2.0), y)
    assert loss.shape == ()
    assert {name: it.requires_grad for name, it in prediction.items()} == {
        "logits": False, "mean": False,
    }  # fmt: skip


def test_evaluation_leaves_everything_as_it_was():
    model = net()
    model[1].eval()  # as a caller may have chosen
    run = make(model)
    x, y = batches(1)[0]
    run.step(x, y)
    before = copy.deepcopy(run.state_dict())
    loss, prediction = run.eval_step(x, y)
    assert [module.training for module in model] == [True, False, True, True]
    torch.testing.assert_close(run.state_dict(), before, rtol=0, atol=0)
    with torch.no_grad():
        want = copy.deepcopy(model).eval()(x)
    torch.testing.assert_close((loss, prediction), (F.cross_entropy(want, y), want))


@pytest.mark.hands_over
def test_a_failed_evaluation_leaves_the_mode_as_it_was():
    model = net()
    x, y = batches(1)[0]
    with pytest.raises(Exception, match="must have same reduction dim"):
        make(model).eval_step(x[:, :2], y)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("stop", [2, 3])
def test_training_goes_on_from_a_file_bit_by_bit(stop):
    settings = {"gradient_accumulation_steps": 2, "scheduled": True}
    through = make(net(), **settings)
    want = [through.step(x, y) for x, y in batches()]
    first = make(net(), **settings)
    for x, y in batches()[:stop]:
        first.step(x, y)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make(nn.Sequential(*net()).apply(_forget), **settings)
    second.load_state_dict(torch.load(file, weights_only=True))
    got = [second.step(x, y) for x, y in batches()[stop:]]
    torch.testing.assert_close(got, want[stop:], rtol=0, atol=0)
    torch.testing.assert_close(second.state_dict(), through.state_dict(), rtol=0, atol=0)
    assert (second.num_calls, second.num_updates) == (6, 3)


def _forget(module):
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.weight)


def test_a_state_with_another_schedule():
    state = make(net()).state_dict()
    with pytest.raises(ValueError, match="lr_scheduler: the state has no, this trainer wants one"):
        make(net(), scheduled=True).load_state_dict(state)
    state = make(net(), scheduled=True).state_dict()
    with pytest.raises(
        ValueError, match="lr_scheduler: the state has one, this trainer wants none"
    ):
        make(net()).load_state_dict(state)


def test_an_ortmodule_keeps_its_options():
    model = ORTModule(net(), DebugOptions(LogLevel.ERROR))
    run = make(model)
    assert run.model is model.module
    assert run.core.engine._debug_options.log_level == LogLevel.ERROR
    run.step(*batches(1)[0])
    assert trainer is Trainer


@pytest.mark.parametrize(
    ("model", "settings", "error", "words"),
    [
        (onnx.ModelProto(), {}, TypeError, "model: got ModelProto, want a torch.nn.Module"),
        (nn.DataParallel(net()), {}, TypeError, "model: got DataParallel, want the module inside"),
        (net(), {"gradient_accumulation_steps": 0}, ValueError, "steps: got 0, want at least 1"),
        (net(), {"max_grad_norm": 0.0}, ValueError, r"max_grad_norm: got 0\.0, want None or more"),
        (nn.Linear(1, 1), {}, ValueError, "optimizer: got no parameter of the model among those"),
    ],
)
def test_arguments_that_do_not_fit(model, settings, error, words):
    known = model if isinstance(model, nn.Sequential) else net()
    optimizer = torch.optim.SGD(known.parameters(), lr=0.1)
    with pytest.raises(error, match=words):
        Trainer(model, F.cross_entropy, optimizer, **settings)


RANKS = """
    import sys
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    import torch_ort
    from torch_ort.trainers import trainer

    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    numbers = torch.Generator().manual_seed(1)
    run = trainer(model, F.cross_entropy, optimizer, gradient_accumulation_steps=2)
    for _ in range(4):
        x, y = torch.randn(8, 6, generator=numbers), torch.randint(3, (8,), generator=numbers)
        run.step(x[rank::2], y[rank::2])
    assert torch_ort.counters()["fallbacks"] == 0
    torch.save(model.state_dict(), f"{folder}/rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_two_ranks_train_as_one(tmp_path):
    first, second = run_script(RANKS, tmp_path, ranks=2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    numbers = torch.Generator().manual_seed(1)
    run = Trainer(model, F.cross_entropy, optimizer, gradient_accumulation_steps=2)
    for _ in range(4):
        x = torch.randn(8, 6, generator=numbers)
        run.step(x, torch.randint(3, (8,), generator=numbers))
    torch.testing.assert_close(first, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
