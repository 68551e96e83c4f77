"""Graphs of torch.compile that the recorder made, where a first run shows that a rule is wrong."""

import pytest
import torch
from torch import nn

import torch_ort
from torch_ort.fallback import FallbackWarning
from torch_ort.rules import shape_rules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return nn.functional.pad(nn.functional.dropout(self.linear(x)), (1, 1)).exp()


@pytest.fixture
def wrong_rule(monkeypatch):
    monkeypatch.setitem(
        shape_rules.RULES, torch.ops.aten.constant_pad_nd.default, lambda x, *rest: x
    )


def train(call, module, shapes) -> list:
    found = []
    torch.manual_seed(1)
    for shape in shapes:
        module.zero_grad()
        result = call(torch.ones(shape))
        result.sum().backward()
        found.append([result.detach(), module.linear.weight.grad.clone(), module.calls.clone()])
    return found


@pytest.mark.hands_over("a rule is made wrong")
@pytest.mark.parametrize("strict", ["0", "1"])
def test_aotautograd_captures_what_a_rule_has_spoilt(wrong_rule, monkeypatch, strict):
    monkeypatch.setenv("TORCH_ORT_STRICT", strict)
    torch.manual_seed(0)
    module = Net()
    eager = Net()
    eager.load_state_dict(module.state_dict())
    shapes = [(3, 4)] * 3
    got = train(torch.compile(module, backend="ort"), module, shapes)
    torch.testing.assert_close(got, train(eager, eager, shapes))
    counters = torch_ort.counters()
    assert (counters["graphs_captured"], counters["graphs_recorded"]) == (2, 1)
    assert (counters["recordings_handed_over"], counters["fallbacks"]) == (1, 0)
    assert counters["backward_runs"] == 3


@pytest.mark.hands_over("a rule is made wrong")
def test_with_symbolic_sizes_eager_runs(wrong_rule, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = Net()
    compiled = torch.compile(module, backend="ort", dynamic=True)
    with pytest.warns(FallbackWarning, match="this graph runs in eager PyTorch"):
        assert compiled(torch.ones(3, 4)).shape == (3, 6)
    assert torch_ort.counters()["fallbacks_forward"] == 1


def test_a_kernels_own_error_is_raised():
    embedding = nn.Embedding(5, 3)
    compiled = torch.compile(embedding, backend="ort")
    with pytest.raises(IndexError, match="out of range"):
        compiled(torch.tensor([1, 7]))
    assert torch.equal(compiled(torch.tensor([1, 2])), embedding(torch.tensor([1, 2])))
    assert torch_ort.counters()["fallbacks"] == 0
