# Gradients that leave while backward goes on: in what order hooks and steps of the engine run, and
# that numbers are those of eager PyTorch whatever hooks do. Orders are seen, times are not.
from __future__ import annotations

import copy
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from processes import run_script
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_ort
from torch_ort import _C

pytestmark = pytest.mark.ort_only

WIDTH, DEPTH = 32, 6
SEGMENT = 4 * WIDTH * WIDTH  # bytes: about one layer
OPTIONS = {"gradient_segment_bytes": SEGMENT, "strict": True}


def make_model(depth: int = DEPTH, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [each for _ in range(depth) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3)).to(dtype)


def by_recorder(model: nn.Module, **options: object) -> Callable:
    return torch.compile(model, backend="ort", options={**OPTIONS, **options})


def by_aot_autograd(model: nn.Module, **options: object) -> Callable:
    return by_recorder(model, disable="recorder", **options)


def by_ortmodule(model: nn.Module, **options: object) -> Callable:
    config = {**OPTIONS, **options}
    return torch_ort.ORTModule(model, torch_ort.DebugOptions(config=config))


ROADS = pytest.mark.parametrize("road", [by_recorder, by_aot_autograd, by_ortmodule])


def batch(rows: int = 8, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_of(call: Callable, x: torch.Tensor) -> torch.Tensor:
    return call(x).pow(2).mean()


@contextmanager
def events() -> Iterator[list[str]]:
    """List the engine's steps as they run; whoever else wants to adds its own."""
    seen: list[str] = []
    _C.set_failpoint(lambda place: seen.append("step"))
    try:
        yield seen
    finally:
        _C.set_failpoint(None)


def add_hooks(model: nn.Module, seen: list[str], kind: str = "post_accumulate") -> None:
    for name, parameter in model.named_parameters():
        if kind == "post_accumulate":
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        elif kind == "tensor":
            parameter.register_hook(lambda _, name=name: seen.append(name))
        else:
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, name=name: seen.append(name))
            parameter.accumulator = node  # as a reducer keeps it


def eager_gradients(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    copied = copy.deepcopy(model)
    loss_of(copied, *inputs).backward()
    return [parameter.grad for parameter in copied.parameters()]


def watched(road: Callable) -> tuple[nn.Module, list[torch.Tensor], Callable]:
    """Give a model with hooks, the gradients of a batch in eager PyTorch, and the call."""
    model = make_model()
    wanted = eager_gradients(model, batch())
    add_hooks(model, [])
    return model, wanted, road(model)


def check(model: nn.Module, wanted: list[torch.Tensor]) -> None:
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], wanted)


def backward(call: Callable, model: nn.Module, *inputs: torch.Tensor) -> None:
    model.zero_grad()
    loss_of(call, *inputs).backward()


@ROADS
@pytest.mark.parametrize("kind", ["post_accumulate", "tensor", "accumulator"])
def test_hooks_are_called_between_the_steps_of_backward(road, kind):
    model = make_model()
    wanted = eager_gradients(model, batch())
    call = road(model)
    seen: list[str] = []
    add_hooks(model, seen, kind)
    backward(call, model, batch())
    check(model, wanted)
    model.zero_grad()
    loss = loss_of(call, batch())
    seen.clear()
    with events() as steps:
        seen = steps
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        loss.backward()
    check(model, wanted)
    hooks = [i for i, event in enumerate(steps) if event != "step"]
    assert len(hooks) == 2 * (DEPTH + 1)
    assert hooks[0] < len(steps) / 3
    # Each segment's hooks come before the steps of the next one.
    groups = sum(1 for i in hooks if steps[i - 1] == "step")
    assert groups >= DEPTH - 1
    order = [steps[i] for i in hooks]
    assert order.index(f"{2 * DEPTH}.weight") < order.index("0.weight")


def test_without_hooks_there_is_one_segment():
    model = make_model()
    call = by_recorder(model)
    for _ in range(2):
        backward(call, model, batch())
    results = call(batch())
    names = {type(each).__name__ for each, _ in results.grad_fn.next_functions}
    assert names == {"AccumulateGrad"}


@pytest.mark.parametrize("switch", ["option", "variable"])
def test_gradients_leave_early_without_hooks_where_that_is_asked_for(switch, monkeypatch):
    options = {"early_gradients": True} if switch == "option" else {}
    if switch == "variable":
        monkeypatch.setenv("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", "1")
    model = make_model()
    wanted = eager_gradients(model, batch())
    call = by_recorder(model, **options)
    for _ in range(3):
        backward(call, model, batch())
        check(model, wanted)
    names = {each.name() for each, _ in call(batch()).grad_fn.next_functions}
    assert "torch_ort::GradientSegment" in names


def test_no_bytes_for_a_segment_mean_one_segment():
    model = make_model()
    seen: list[str] = []
    add_hooks(model, seen)
    call = by_recorder(model, gradient_segment_bytes=0)
    backward(call, model, batch())
    names = {each.name() for each, _ in call(batch()).grad_fn.next_functions}
    assert "torch_ort::GradientSegment" not in names


@ROADS
def test_hooks_that_change_gradients(road):
    model, plain = make_model(), make_model()
    for each in (model, plain):
        for i, parameter in enumerate(each.parameters()):
            parameter.register_hook(lambda gradient, i=i: gradient * (i + 2))
            parameter.register_hook(lambda gradient: gradient.mul_(0.5))
    call = road(model)
    for _ in range(3):
        backward(call, model, batch())
        backward(plain, plain, batch())
        check(model, [parameter.grad for parameter in plain.parameters()])


def steps_in_backward(model: nn.Module, make: Callable) -> None:
    for parameter in model.parameters():
        optimizer = make([parameter])

        def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


@ROADS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_optimizer_that_steps_in_backward(road, dtype):
    model, plain = make_model(dtype=dtype), make_model(dtype=dtype)
    for each in (model, plain):
        steps_in_backward(each, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    call = road(model)
    for seed in range(6):
        x = batch(dtype=dtype, seed=seed)
        loss_of(call, x).backward()
        loss_of(plain, x).backward()
    tolerance = {"rtol": 0.05, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), **tolerance)
    assert all(parameter.grad is None for parameter in model.parameters())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = make_model()[:-1]
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(ids)))


OPTIMIZERS = pytest.mark.parametrize("make", [
    lambda parameters, **more: torch_ort.optim.AdamW(parameters, lr=1e-2, **more),
    lambda parameters, **more: torch_ort.optim.Adam(parameters, lr=1e-2, amsgrad=True, **more),
    lambda parameters, **more: torch_ort.optim.SGD(parameters, lr=0.1, momentum=0.9, **more),
])  # fmt: skip


@OPTIMIZERS
def test_optimizers_that_step_in_backward_by_themselves(make):
    model, plain = make_model(), make_model()
    head = list(model[-1].parameters())
    optimizer = make(list(model[:-1].parameters()), in_backward=True)
    optimizer.add_param_group({"params": head, "lr": 1e-3})
    wanted = make(list(plain[:-1].parameters()))
    wanted.add_param_group({"params": list(plain[-1].parameters()), "lr": 1e-3})
    call = by_recorder(model)
    for seed in range(5):
        for group in (*optimizer.param_groups, *wanted.param_groups):
            group["lr"] *= 0.9
        loss_of(call, batch(seed=seed)).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.step()  # finds nothing to do
        wanted.zero_grad()
        loss_of(plain, batch(seed=seed)).backward()
        wanted.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), wanted.state_dict())
    again = pickle.loads(pickle.dumps(optimizer))
    again.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize("road", [by_recorder, by_aot_autograd])
def test_compiled_autograd_passes_gradients_on(road):
    model = make_model()
    wanted = eager_gradients(model, batch())
    call = road(model, early_gradients=True, strict=False)
    backward(call, model, batch())
    loss = loss_of(call, batch())
    model.zero_grad()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    check(model, wanted)


@ROADS
def test_tied_parameters_are_ready_at_their_last_use(road):
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        steps_in_backward(each, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    call = road(model)
    ids = torch.randint(64, (4, 5), generator=torch.Generator().manual_seed(2))
    for _ in range(4):
        loss_of(call, ids).backward()
        loss_of(plain, ids).backward()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_a_hook_that_writes_what_is_still_read_raises():
    model = make_model()
    call = by_recorder(model)
    first, last = model[0].weight, model[-1].weight
    handle = last.register_post_accumulate_grad_hook(lambda _: None)
    backward(call, model, batch())
    handle.remove()

    def write(_: torch.Tensor) -> None:
        with torch.no_grad():
            model[2].weight.mul_(2)

    handle = last.register_post_accumulate_grad_hook(write)
    loss = loss_of(call, batch())
    with pytest.raises(RuntimeError, match="modified by an inplace operation while backward"):
        loss.backward()
    handle.remove()
    first.register_post_accumulate_grad_hook(lambda _: None)
    wanted = eager_gradients(model, batch())
    backward(call, model, batch())
    check(model, wanted)


@ROADS
def test_retained_graphs(road):
    model, wanted, call = watched(road)
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(call, batch())
        loss.backward(retain_graph=True)
        check(model, wanted)
        model.zero_grad()
        loss.backward(retain_graph=True)
        check(model, wanted)
        loss.backward()
        check(model, [2 * each for each in wanted])
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@ROADS
def test_calls_alive_at_once(road):
    model = make_model()
    wanted = [eager_gradients(model, batch(seed=seed)) for seed in range(2)]
    add_hooks(model, [])
    call = road(model)
    for _ in range(3):
        model.zero_grad()
        losses = [loss_of(call, batch(seed=seed)) for seed in range(2)]
        (losses[0] + losses[1]).backward()
        check(model, [a + b for a, b in zip(*wanted, strict=True)])


@ROADS
def test_backward_inside_of_a_hook(road):
    model = make_model()
    wanted = eager_gradients(model, batch())
    call = road(model)
    nested: list[list[torch.Tensor]] = []
    inner = {}

    def run_again(_: torch.Tensor) -> None:
        if inner:
            loss = inner.pop("loss")
            nested.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))

    model[-1].weight.register_post_accumulate_grad_hook(run_again)
    for _ in range(3):
        model.zero_grad()
        loss = inner["loss"] = loss_of(call, batch())
        loss.backward(retain_graph=True)
        check(model, wanted)
        torch.testing.assert_close(list(nested.pop()), wanted)


@ROADS
def test_gradients_of_some_inputs(road):
    model, wanted, call = watched(road)
    backward(call, model, batch())
    parameters = list(model.parameters())
    for positions in ([-1], [0], [3, 8], list(range(len(parameters)))):
        loss = loss_of(call, batch())
        found = torch.autograd.grad(loss, [parameters[i] for i in positions], retain_graph=True)
        torch.testing.assert_close(list(found), [wanted[i] for i in positions])
        model.zero_grad()
        loss.backward(inputs=[parameters[i] for i in positions])
        for i in positions:
            torch.testing.assert_close(parameters[i].grad, wanted[i])
    loss = loss_of(call, batch())
    live = torch_ort.counters()["contexts_live"]
    torch.autograd.grad(loss, parameters[-1:], retain_graph=True)
    del loss
    assert torch_ort.counters()["contexts_live"] == live - 1


@ROADS
def test_inputs_that_require_gradients(road):
    model = make_model()
    plain = copy.deepcopy(model)
    add_hooks(model, [])
    call = road(model)
    for seed in range(3):
        found = []
        for module, run in ((model, call), (plain, plain)):
            leaf = batch(seed=seed).requires_grad_()
            module.zero_grad()
            loss_of(run, leaf * 2).backward()
            found.append([leaf.grad, *(each.grad for each in module.parameters())])
        torch.testing.assert_close(*found)


def test_gradients_that_are_differentiated():
    model = make_model()
    add_hooks(model, [])
    call = by_recorder(model, strict=False)
    backward(call, model, batch())
    found = []
    for run in (model, call):
        gradients = torch.autograd.grad(
            loss_of(run, batch()), list(model.parameters()), create_graph=True
        )
        model.zero_grad()
        sum(each.pow(2).sum() for each in gradients[:2]).backward()
        found.append([None if each.grad is None else each.grad.clone()
                      for each in model.parameters()])  # fmt: skip
    torch.testing.assert_close(*found)


def test_gradients_of_a_graph_of_aot_autograd_are_not_differentiated():
    model = make_model()
    add_hooks(model, [])
    call = by_aot_autograd(model, strict=False)
    backward(call, model, batch())
    gradients = torch.autograd.grad(
        loss_of(call, batch()), list(model.parameters()), create_graph=True
    )
    torch.testing.assert_close(list(gradients), eager_gradients(model, batch()))
    with pytest.raises(RuntimeError, match="double backward"):
        gradients[0].pow(2).sum().backward()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = make_model()[:-1]
        self.left, self.right = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


@ROADS
def test_outputs_without_a_gradient(road):
    torch.manual_seed(0)
    model = TwoHeads()
    plain = copy.deepcopy(model)
    seen: list[str] = []
    add_hooks(model, seen, "tensor")
    call = road(model)
    for heads in ([0, 1], [0], [0], [1], [0, 1], [0]):
        for module, run in ((model, call), (plain, plain)):
            module.zero_grad()
            outputs = run(batch())
            sum(outputs[i].pow(2).mean() for i in heads).backward()
        # Hooks of parameters that no gradient comes to are called with zeros.
        for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            expected = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
            torch.testing.assert_close(parameter.grad, expected)
    assert len(seen) == 6 * len(list(model.parameters()))


@ROADS
def test_under_a_checkpoint(road):
    model, wanted, call = watched(road)
    for _ in range(3):
        backward(lambda x: checkpoint(call, x, use_reentrant=False), model, batch())
        check(model, wanted)


@ROADS
def test_a_hook_that_raises(road):
    model = make_model()
    wanted = eager_gradients(model, batch())
    call = road(model)
    seen: list[str] = []
    add_hooks(model, seen)
    for _ in range(2):
        backward(call, model, batch())

    def fail(_: torch.Tensor) -> None:
        raise ValueError("no more")

    handle = model[4].weight.register_post_accumulate_grad_hook(fail)
    for _ in range(2):
        model.zero_grad()
        with pytest.raises(ValueError, match="no more"):
            loss_of(call, batch()).backward()
        assert model[-1].weight.grad is not None
        assert model[0].weight.grad is None
    handle.remove()
    backward(call, model, batch())
    check(model, wanted)


@ROADS
def test_backward_in_other_threads(road):
    model, wanted, call = watched(road)
    backward(call, model, batch())
    parameters = list(model.parameters())
    found: list[list[torch.Tensor]] = []

    def run(loss: torch.Tensor) -> None:
        found.append(list(torch.autograd.grad(loss, parameters, retain_graph=True)))

    loss = loss_of(call, batch())
    threads = [threading.Thread(target=run, args=(loss,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for each in found:
        torch.testing.assert_close(each, wanted)


@ROADS
def test_sizes_that_change(road):
    model = make_model()
    add_hooks(model, [])
    call = road(model)
    for rows in (8, 3, 8, 1, 0):
        wanted = eager_gradients(model, batch(rows)) if rows else None
        backward(call, model, batch(rows))
        if rows:
            check(model, wanted)


def test_saved_tensor_hooks_and_accumulation():
    model, wanted, call = watched(by_recorder)
    backward(call, model, batch())
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        loss = loss_of(call, batch())
    loss.backward()
    check(model, [2 * each for each in wanted])


@pytest.mark.parametrize("keeps", [False, True])
def test_dropped_gradients_need_the_memory_of_a_segment(keeps):
    width, depth = 256, 12
    torch.manual_seed(0)
    layers = [each for _ in range(depth) for each in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(*layers)
    bytes_of_layer = 4 * width * width
    call = by_recorder(model, gradient_segment_bytes=bytes_of_layer)
    x = torch.randn(4, width)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: None if keeps else setattr(p, "grad", None)
        )
    for _ in range(3):
        model.zero_grad()
        loss_of(call, x).backward()
    torch_ort.empty_cache()
    model.zero_grad()
    torch_ort.reset_counters()
    loss_of(call, x).backward()
    counted = torch_ort.counters()
    assert (counted["gradients_delivered"] > 0) == keeps
    assert (counted["arena_bytes_peak"] > depth * bytes_of_layer) == keeps


BEFORE_THE_END = """
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel
    import torch_ort
    from torch_ort import _C

    rank, folder, road = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    torch.manual_seed(0)
    layers = [each for _ in range(6) for each in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers)
    options = {"gradient_segment_bytes": 1 << 20, "strict": True}
    if road == "ortmodule":
        module = torch_ort.ORTModule(model, torch_ort.DebugOptions(config=options))
        parallel = call = DistributedDataParallel(module, bucket_cap_mb=1)
    else:
        torch._dynamo.config.optimize_ddp = False
        parallel = DistributedDataParallel(model, bucket_cap_mb=1)
        if road == "aot_autograd":
            options["disable"] = "recorder"
        call = torch.compile(parallel, backend="ort", options=options)
    events = []

    def reduce(group, bucket):
        events.append("reduce")
        return allreduce_hook(group, bucket)

    parallel.register_comm_hook(None, reduce)
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(rank))
    for _ in range(4):
        model.zero_grad()
        loss = call(x).pow(2).mean()
        events.clear()
        _C.set_failpoint(lambda place: events.append("step"))
        loss.backward()
        _C.set_failpoint(None)
    gradients = [parameter.grad for parameter in model.parameters()]
    torch.save((events, gradients, model.state_dict()), f"{folder}/rank_{rank}.pt")
    dist.barrier()
"""


@pytest.mark.parametrize("road", ["recorder", "aot_autograd", "ortmodule"])
def test_buckets_are_reduced_before_backward_ends(road, tmp_path):
    results = run_script(BEFORE_THE_END, tmp_path, road, ranks=2)
    layers = [each for _ in range(6) for each in (nn.Linear(512, 512), nn.GELU())]
    plain = nn.Sequential(*layers)
    state = results[0][2]
    plain.load_state_dict({name.removeprefix("_original."): state[name] for name in state})
    for rank in range(2):
        x = torch.randn(16, 512, generator=torch.Generator().manual_seed(rank))
        (loss_of(plain, x) / 2).backward()
    for events, gradients, _ in results:
        torch.testing.assert_close(gradients, [parameter.grad for parameter in plain.parameters()])
        reduced = [i for i, event in enumerate(events) if event == "reduce"]
        assert len(reduced) >= 5
        assert reduced[0] < len(events) / 3
        # Between each bucket and the next one the engine runs.
        assert sum("step" in events[a:b] for a, b in itertools.pairwise(reduced)) >= 4
