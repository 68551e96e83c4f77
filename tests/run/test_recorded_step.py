"""The node of autograd that a recorded training graph is, where it enters the interpreter."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from torch_ort import _C, UserError


class Watcher:
    """Runs a first backward, and has its step forget it meanwhile."""

    def __init__(self, step: _C.RecordedStep) -> None:
        self.step = step

    def __call__(self, *args):
        """Run the engine's."""
        self.step.forget_first_backward()
        return _C.run_backward(*args)


def test_what_watches_is_let_go_of_once_it_is_forgotten_and_has_run(monkeypatch):
    make, watchers = _C.RecordedStep, []

    def make_watched(*args):
        step = make(*args)
        watcher = Watcher(step)
        watchers.append(weakref.ref(watcher))
        step.watch_first_backward(watcher)
        return step

    monkeypatch.setattr(_C, "RecordedStep", make_watched)
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    loss = torch.compile(model, backend="ort")(x).sum()
    assert [watcher() is None for watcher in watchers] == [False]
    loss.backward()
    assert [watcher() is None for watcher in watchers] == [True]
    torch.testing.assert_close(model.weight.grad, x.sum(0).expand(3, 4))


def test_an_error_of_ours_keeps_its_type():
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()), backend="ort")
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.Tensor.double):
        loss = compiled(torch.randn(2, 4)).pow(2).sum()
    with pytest.raises(
        UserError, match=r"hooks: got Double\[2, .* on cpu from a hook that unpacks, want Float"
    ):
        loss.backward()
