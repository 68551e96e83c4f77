"""Hooks of saved tensors: what crosses from forward to backward are ordinary saved tensors."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import torch_ort
from torch_ort import UserError


def by_aot(module: nn.Module) -> Callable[..., Any]:
    return torch.compile(module, backend="ort", options={"disable": "recorder"})


ROADS = {
    "compile": lambda module: torch.compile(module, backend="ort"),
    "ortmodule": torch_ort.ORTModule,
    "aot": by_aot,
}
each_road = pytest.mark.parametrize("road", ROADS)


class Net(nn.Module):
    """Saves activations, a mask, a result, and integers that select rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, ids):
        hidden = torch.tanh(self.first(self.table(ids)))
        return self.second(hidden.masked_fill(hidden > 0.4, 0).sigmoid().cumsum(0))


IDS = torch.tensor([[0, 3], [5, 3], [1, 0]])


def pair(road: str) -> list[Any]:
    """Give eager and compiled calls of equal modules, each with its module."""
    torch.manual_seed(0)
    eager = Net()
    ours = copy.deepcopy(eager)
    return [(eager, eager), (ROADS[road](ours), ours)]


def backward(loss: torch.Tensor, module: nn.Module, **how: bool) -> list[torch.Tensor]:
    module.zero_grad()
    loss.backward(**how)
    return [each.grad for each in module.parameters()]


def check(road: str, hooks: Callable[[], Any], **tolerance: float) -> None:
    results = []
    for call, module in pair(road):
        for _ in range(3):
            with hooks():
                loss = call(IDS).pow(2).sum()
            gradients = backward(loss, module)
        results.append(gradients)
    torch.testing.assert_close(results[1], results[0], **tolerance)


def as_list(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.flatten().tolist()


def from_list(packed):
    dtype, shape, numbers = packed
    return torch.tensor(numbers, dtype=dtype).reshape(shape)


KINDS = {
    "offload": (
        lambda x: (x.device, x.to("cpu", copy=True).pin_memory() if x.is_cuda else x.clone()),
        lambda packed: packed[1].to(packed[0]),
    ),
    "list": (as_list, from_list),
    "other strides": (lambda x: x.mT.contiguous() if x.dim() > 1 else x.clone(),
                      lambda x: x.mT if x.dim() > 1 else x),
    "as it is": (lambda x: x, lambda x: x),
}  # fmt: skip


@each_road
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_give_back_what_they_got(road, kind):
    check(road, lambda: saved_tensors_hooks(*KINDS[kind]))


@each_road
def test_hooks_that_keep_fewer_digits(road):
    def pack(x):
        return (x.dtype, x.bfloat16() if x.is_floating_point() else x.clone())

    hooks = (pack, lambda packed: packed[1].to(packed[0]))
    check(road, lambda: saved_tensors_hooks(*hooks), rtol=0.05, atol=0.05)


@each_road
def test_hooks_in_files(road, tmp_path):
    def pack(x):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pt"
        torch.save(x, path)
        return path

    check(road, lambda: saved_tensors_hooks(pack, torch.load))


@each_road
def test_of_nested_hooks_the_inner_ones_are_called(road):
    for call, module in pair(road):
        outer, inner = [], []
        for _ in range(2):
            outer.clear(), inner.clear()
            with (
                saved_tensors_hooks(lambda x, seen=outer: seen.append(x), lambda x: x),
                saved_tensors_hooks(lambda x, seen=inner: seen.append(x) or x, lambda x: x),
            ):
                loss = call(IDS).sum()
        assert inner
        assert not outer
        assert all(each.isfinite().all() for each in backward(loss, module))


@each_road
def test_hooks_get_the_tensors_themselves(road):
    seen = []
    call, _ = pair(road)[1]
    for _ in range(2):
        seen.clear()
        with saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
            call(IDS).sum().backward()
    # The hidden rows, or what they are computed from; no block of bytes in which all stands.
    assert {(each.dtype, *each.shape) for each in seen} >= {(torch.float32, 3, 2, 16)}
    assert torch.uint8 not in {each.dtype for each in seen}


@each_road
def test_what_was_packed_goes_with_backward(road):
    class Packed:
        def __init__(self, tensor):
            self.tensor = tensor.clone()

    def unpack(packed):
        return packed.tensor

    call, module = pair(road)[1]
    for _ in range(2):
        made: weakref.WeakSet = weakref.WeakSet()

        def pack(tensor, made=made):
            packed = Packed(tensor)
            made.add(packed)
            return packed

        with saved_tensors_hooks(pack, unpack):
            loss = call(IDS).pow(2).sum()
        assert len(made) > 2
        first = [each.clone() for each in backward(loss, module, retain_graph=True)]
        torch.testing.assert_close(backward(loss, module), first, rtol=0, atol=0)
        gc.collect()
        assert not made  # though `loss` is alive
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@each_road
def test_calls_outlive_what_compiled_them(road):
    (call, module), eager = pair(road)[1], pair(road)[0]
    with saved_tensors_hooks(torch.clone, lambda x: x):
        loss, wanted = call(IDS).pow(2).sum(), eager[0](IDS).pow(2).sum()
    del call
    torch.compiler.reset()
    gc.collect()
    torch.testing.assert_close(backward(loss, module), backward(wanted, eager[1]))


@each_road
def test_a_trace_of_the_backward_pass(road):
    """Compiled autograd traces what hooks give back."""
    results = []
    for call, module in pair(road):
        with saved_tensors_hooks(torch.clone, lambda x: x):
            loss = call(IDS).pow(2).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            results.append(backward(loss, module))
    torch.testing.assert_close(results[1], results[0])


class HookError(Exception):
    """What a hook raises."""


def raising(x):
    raise HookError("the hook has failed")


@each_road
@pytest.mark.parametrize("warm", [False, True])
def test_a_hook_that_raises_in_forward(road, warm, live_contexts):
    call, module = pair(road)[1]
    if warm:
        backward(call(IDS).sum(), module)
    with (
        pytest.raises(HookError, match="the hook has failed"),
        saved_tensors_hooks(raising, lambda x: x),
    ):
        call(IDS)
    assert live_contexts() == 0
    assert all(each.isfinite().all() for each in backward(call(IDS).sum(), module))


@each_road
@pytest.mark.parametrize("warm", [False, True])
def test_a_hook_that_raises_in_backward(road, warm, live_contexts, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    call, module = pair(road)[1]
    if warm:
        backward(call(IDS).sum(), module)
    fails = [True, False]
    with saved_tensors_hooks(lambda x: x, lambda x: raising(x) if fails[0] else x):
        loss = call(IDS).pow(2).sum()
    with pytest.raises(HookError, match="the hook has failed"):
        loss.backward()
    fails.pop(0)
    eager, other = pair(road)[0]
    torch.testing.assert_close(backward(loss, module), backward(eager(IDS).pow(2).sum(), other))
    del loss
    assert live_contexts() == 0


@each_road
def test_a_hook_that_gives_back_another_tensor(road):
    for unpack, words in (
        (torch.Tensor.double, r"got Double\[.* from a hook that unpacks, want Float\["),
        (lambda x: x.flatten()[:1], r"got .*\[1\] on cpu from a hook that unpacks, want"),
    ):
        call, _ = pair(road)[1]
        with saved_tensors_hooks(torch.clone, unpack):
            loss = call(IDS).pow(2).sum()
        with pytest.raises((UserError, RuntimeError), match=words):
            loss.backward()


@each_road
def test_a_hook_that_gives_back_no_tensor(road):
    for call, _ in pair(road):
        with saved_tensors_hooks(torch.clone, lambda x: "text"):
            loss = call(IDS).pow(2).sum()
        with pytest.raises(TypeError, match="unpack_hook expected to be a Tensor"):
            loss.backward()
