"""FP16_Optimizer on classes of ours with the methods of Apex and Megatron, and on unknown ones.

DeepSpeed's own optimizer is tried in tests/ecosystem.
"""

from __future__ import annotations

import copy
import math
import types
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_ort.onnxruntime_training.optim import of_apex
from torch_ort.onnxruntime_training.optim.replacing import NotReplaced, check_source
from torch_ort.optim import FP16_Optimizer


def quietly(optimizer: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return FP16_Optimizer(optimizer, **kwargs)


# Unknown ones.


def test_an_unknown_optimizer_stays_as_it_is() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    before = dict(vars(optimizer))
    with pytest.warns(UserWarning, match=r"got a torch\.optim\.adamw\.AdamW, want .*as it is"):
        assert FP16_Optimizer(optimizer) is optimizer
    assert vars(optimizer) == before


def test_unknown_keywords_raise() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match="FP16_Optimizer: got 'rank', want get_horizontal_model"):
        FP16_Optimizer(optimizer, rank=0)


def make_class(module: str, name: str, **members: Any) -> type:
    return type(name, (), {"__module__": module, **members})


def zero_optimizer(**members: Any) -> Any:
    return make_class("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", **members)()


def other_source(self: Any, *_: Any) -> None:
    """Stand where DeepSpeed has another method."""


def test_another_source_than_the_known_one_stays() -> None:
    names = ("has_overflow_serial", "get_grad_norm_direct", "has_overflow_partitioned_grads_serial")
    optimizer = zero_optimizer(**dict.fromkeys(names, other_source))
    with pytest.warns(UserWarning, match="stays as it is: its other_source is not one that"):
        assert FP16_Optimizer(optimizer) is optimizer
    assert vars(optimizer) == {}


def test_a_missing_method_is_told() -> None:
    with pytest.warns(UserWarning, match="stays as it is: it has no method has_overflow_serial"):
        FP16_Optimizer(zero_optimizer())


def test_the_wrapper_of_accelerate_is_looked_into() -> None:
    wrapper = make_class("accelerate.utils.deepspeed", "DeepSpeedOptimizerWrapper")()
    wrapper.optimizer = zero_optimizer()
    with pytest.warns(UserWarning, match="DeepSpeedZeroOptimizer stays as it is"):
        assert FP16_Optimizer(wrapper) is wrapper


def test_a_source_that_cannot_be_read_is_told() -> None:
    made = {}
    exec("def made(self): pass", made)
    with pytest.raises(NotReplaced, match="the source of made cannot be read"):
        check_source(made["made"], [])


# Apex: each method does slowly, one by one, what ours is to do.


class Scaler:
    """What Apex' optimizers ask of its loss scaler."""

    def __init__(self, dynamic: bool = True) -> None:
        self.dynamic = dynamic
        self._has_overflow = False
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    def loss_scale(self) -> float:
        return 8.0

    def unscaled(self, grad: Tensor) -> Tensor:
        if self.dynamic and not grad.isfinite().all():
            self._has_overflow = True
        return grad.float() / 8.0


def add_up(scaler: Scaler, params: list, stash: list) -> None:
    for i, param in enumerate(params):
        if param.grad is not None:
            param.grad = scaler.unscaled(param.grad).to(param.dtype)
            if stash[i] is not None:
                param.grad = param.grad + stash[i]
        else:
            param.grad = stash[i]
        stash[i] = None


def post_backward_with_master_weights(self: Any, scaler: Scaler) -> None:
    self._amp_lazy_init()
    stash = self._amp_stash
    for model, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        if model.grad is not None:
            grad = scaler.unscaled(model.grad)
            master.grad = grad if master.grad is None else master.grad + grad
    add_up(scaler, stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash)


def post_backward_no_master_weights(self: Any, scaler: Scaler) -> None:
    self._amp_lazy_init()
    stash = self._amp_stash
    add_up(scaler, stash.all_fp16_params, stash.all_fp16_grad_stash)
    add_up(scaler, stash.all_fp32_params, stash.all_fp32_grad_stash)


def post_backward_with_master_weights_FusedSGD(self: Any, scaler: Scaler) -> None:
    """Do what Apex' FusedSGD asks for; ours leaves it alone."""


def _amp_lazy_init(self: Any) -> None:
    self._amp_stash.lazy_init_called = True


def apex_optimizer(post: Callable[..., None], module: str = "apex.amp") -> torch.optim.Optimizer:
    torch.manual_seed(0)
    half = [nn.Parameter(torch.randn(n).half()) for n in (3, 3000, 1, 5)]
    single = [nn.Parameter(torch.randn(n)) for n in (4, 2000, 2)]
    optimizer = torch.optim.SGD(half + single, lr=0.1)
    optimizer._amp_stash = SimpleNamespace(
        all_fp16_params=half,
        all_fp32_from_fp16_params=[nn.Parameter(p.detach().float()) for p in half],
        all_fp32_from_fp32_params=single,
        all_fp32_params=single,
        all_fp16_grad_stash=[None] * 4,
        all_fp32_from_fp32_grad_stash=[None] * 3,
        all_fp32_grad_stash=[None] * 3,
    )
    post = types.FunctionType(post.__code__, post.__globals__, post.__name__)
    post.__module__ = module
    optimizer._post_amp_backward = types.MethodType(post, optimizer)
    optimizer._amp_lazy_init = types.MethodType(_amp_lazy_init, optimizer)
    return optimizer


def give(optimizer: torch.optim.Optimizer, seed: int, bad: float = 0.0) -> None:
    """Let there be new gradients, older ones, both, and none."""
    stash = optimizer._amp_stash
    torch.manual_seed(seed)
    for params in (stash.all_fp16_params, stash.all_fp32_params):
        for param in params[:-1]:
            param.grad = torch.randn_like(param) + bad
        params[-1].grad = None
    older = [torch.randn(4), None, torch.randn(2)]
    stash.all_fp32_from_fp32_grad_stash[:] = copy.deepcopy(older)
    stash.all_fp32_grad_stash[:] = older
    stash.all_fp16_grad_stash[:] = [torch.randn(3).half(), None, None, torch.randn(5).half()]
    stash.all_fp32_from_fp16_params[1].grad = torch.randn(3000)


def all_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor | None]:
    stash = optimizer._amp_stash
    params = (*stash.all_fp16_params, *stash.all_fp32_from_fp16_params, *stash.all_fp32_params)
    stashed = (*stash.all_fp16_grad_stash, *stash.all_fp32_grad_stash)
    return [*(param.grad for param in params), *stashed, *stash.all_fp32_from_fp32_grad_stash]


@pytest.mark.parametrize(
    "post", [post_backward_with_master_weights, post_backward_no_master_weights]
)
@pytest.mark.parametrize("dynamic", [True, False])
def test_apex_gradients_come_out_the_same(post: Callable[..., None], dynamic: bool) -> None:
    theirs, ours = apex_optimizer(post), apex_optimizer(post)
    assert quietly(ours) is ours
    assert ours._post_amp_backward.__func__.__module__ == of_apex.__name__
    for seed, bad in enumerate((0.0, math.inf, math.nan)):
        scalers = Scaler(dynamic), Scaler(dynamic)
        for optimizer, scaler in zip((theirs, ours), scalers, strict=True):
            give(optimizer, seed, bad)
            optimizer._post_amp_backward(scaler)
        assert scalers[0]._has_overflow == scalers[1]._has_overflow == (dynamic and bad != 0)
        assert scalers[1]._overflow_buf.item() == int(dynamic and bad != 0)
        torch.testing.assert_close(
            all_gradients(ours), all_gradients(theirs), rtol=1e-6, atol=1e-7, equal_nan=True
        )
    assert ours._amp_stash.lazy_init_called


@pytest.mark.parametrize("set_to_none", [True, False])
def test_apex_zero_grad(set_to_none: bool) -> None:
    optimizer = quietly(apex_optimizer(post_backward_with_master_weights))
    give(optimizer, 0)
    optimizer.zero_grad(set_to_none=set_to_none)
    stash = optimizer._amp_stash
    assert all(master.grad is None for master in stash.all_fp32_from_fp16_params)
    grads = [param.grad for param in (*stash.all_fp16_params[:-1], *stash.all_fp32_params[:-1])]
    assert all((grad is None) if set_to_none else not grad.any() for grad in grads)


def test_apex_own_fused_optimizers_keep_their_method() -> None:
    optimizer = apex_optimizer(post_backward_with_master_weights_FusedSGD)
    before = optimizer._post_amp_backward
    assert quietly(optimizer) is optimizer
    assert optimizer._post_amp_backward is before
    assert optimizer.zero_grad.__func__.__module__ == of_apex.__name__


def test_what_only_looks_like_apex_stays() -> None:
    optimizer = apex_optimizer(post_backward_with_master_weights, module="elsewhere")
    with pytest.warns(UserWarning, match="SGD stays as it is: its _post_amp_backward is not of"):
        FP16_Optimizer(optimizer)
    optimizer = apex_optimizer(post_backward_with_master_weights)
    optimizer._post_amp_backward.__func__.__name__ = "post_backward"
    with pytest.warns(UserWarning, match="its _post_amp_backward is post_backward"):
        FP16_Optimizer(optimizer)


def test_a_second_call_does_nothing() -> None:
    optimizer = quietly(apex_optimizer(post_backward_no_master_weights))
    before = dict(vars(optimizer))
    assert quietly(optimizer) is optimizer
    assert vars(optimizer) == before


# Megatron.


class LossScaler:
    """Megatron's scaler asks each parameter, and then the other ranks."""

    def __init__(self, dynamic: bool = True) -> None:
        self.dynamic = dynamic

    def has_overflow(self, params: list) -> bool:
        grads = [param.grad for param in params if param.grad is not None]
        return self.dynamic and not all(grad.data.isfinite().all() for grad in grads)


class Megatron:
    """The methods and attributes of Megatron's FP16_Optimizer that are looked at."""

    def __init__(self, dynamic: bool = True) -> None:
        torch.manual_seed(0)
        half = [nn.Parameter(torch.randn(n).half()) for n in (3, 3000)]
        masters = [nn.Parameter(p.detach().float()) for p in half]
        single = [nn.Parameter(torch.randn(n)) for n in (4, 2000)]
        self.fp16_groups, self.fp32_from_fp32_groups = [half], [single]
        self.optimizer = torch.optim.SGD([*masters, *single], lr=0.1)
        masters[1].model_parallel = single[1].model_parallel = True
        self.loss_scaler = LossScaler(dynamic)
        self.overflow = False

    def _check_overflow(self) -> None:
        groups = (*self.fp16_groups, *self.fp32_from_fp32_groups)
        params = [param for group in groups for param in group]
        self.overflow = self.loss_scaler.has_overflow(params)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        if self.overflow:
            return -1
        params = self.optimizer.param_groups[0]["params"]
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type).item()

    def gradients(self) -> list[Tensor]:
        params = self.optimizer.param_groups[0]["params"]
        return [param.grad for param in params if param.grad is not None]


def megatron_optimizer(dynamic: bool = True) -> Any:
    kind = type("FP16_Optimizer", (Megatron,), {"__module__": "megatron.fp16.fp16"})
    return kind(dynamic)


def give_to(optimizer: Any, bad: float = 0.0) -> None:
    torch.manual_seed(1)
    for params in (optimizer.fp16_groups[0], optimizer.optimizer.param_groups[0]["params"]):
        for param in params:
            param.grad = torch.randn_like(param)
    optimizer.fp16_groups[0][0].grad[1] += bad
    optimizer.optimizer.param_groups[0]["params"][0].grad = None


@pytest.fixture
def one_rank(tmp_path) -> Any:
    """Give a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0,
                            world_size=1)  # fmt: skip
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("dynamic", [True, False])
def test_megatron(bad: float, dynamic: bool, one_rank: Any) -> None:
    theirs, ours = megatron_optimizer(dynamic), megatron_optimizer(dynamic)
    functions = {
        "get_horizontal_model_parallel_rank": lambda: 0,
        "get_horizontal_model_parallel_group": lambda: one_rank,
    }
    assert quietly(ours, **functions) is ours
    results = []
    for optimizer in (theirs, ours):
        give_to(optimizer, bad)
        optimizer._check_overflow()
        norms = [optimizer.clip_master_grads(max_norm) for max_norm in (1000.0, 1.0)]
        norms.append(optimizer.clip_master_grads(0.5, norm_type=1))
        results.append((optimizer.overflow, norms))
    assert results[0][0] == results[1][0] == (dynamic and bad != 0)
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5)
    torch.testing.assert_close(ours.gradients(), theirs.gradients(), rtol=1e-5, atol=1e-7)


def test_other_ranks_of_megatron_count_their_own_parameters_alone(one_rank: Any) -> None:
    optimizer = megatron_optimizer()
    quietly(
        optimizer,
        get_horizontal_model_parallel_rank=lambda: 1,
        get_horizontal_model_parallel_group=lambda: one_rank,
    )
    give_to(optimizer)
    params = optimizer.optimizer.param_groups[0]["params"]
    divided = [param.grad for param in params if getattr(param, "model_parallel", False)]
    want = torch.cat(divided).double().norm().item()
    assert optimizer.clip_master_grads(1e9) == pytest.approx(want, rel=1e-12)


def test_megatron_without_its_functions_keeps_its_clipping() -> None:
    optimizer = megatron_optimizer()
    with pytest.warns(UserWarning, match="clip_master_grads stays as it is without get_horiz"):
        FP16_Optimizer(optimizer)
    assert optimizer.clip_master_grads.__func__ is Megatron.clip_master_grads
    assert optimizer._check_overflow.__func__ is not Megatron._check_overflow


def test_other_arguments_of_megatron_are_told() -> None:
    optimizer = megatron_optimizer()
    optimizer.clip_master_grads = types.MethodType(lambda self, most: -1, optimizer)
    with pytest.warns(UserWarning, match="stays as it is: its <lambda> takes most"):
        FP16_Optimizer(optimizer)
