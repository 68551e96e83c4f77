# torch_ort.compile: scripts become ORTModules, all else goes to torch.compile.
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_ort
from torch_ort import ORTModule, UserError
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import ORTModuleONNXModelException


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def rows(step: int) -> Tensor:
    return torch.randn(3 + step, 8)


def test_a_script_trains_as_the_plain_module(compare):
    compare(net, rows, wrap=torch_ort.compile)


def test_a_trace_trains_as_the_plain_module(compare, traced):
    compare(net, rows, traced(rows(0)), wrap=torch_ort.compile)


def test_options_reach_the_engine(compare, tmp_path):
    prefix = str(tmp_path / "net")
    options = {"save_onnx": True, "onnx_prefix": prefix, "disable": ["fuse_regions"]}
    compare(net, rows, wrap=lambda model: torch_ort.compile(model, options=options))
    assert list(tmp_path.glob("net_*_captured.onnx"))


def test_parameters_keep_their_names():
    scripted = torch.jit.script(net())
    compiled = torch_ort.compile(scripted)
    assert isinstance(compiled, ORTModule)
    assert compiled.module is scripted
    assert list(compiled.state_dict()) == list(scripted.state_dict())


@torch.jit.script
def gelu_loss(x: Tensor, weight: Tensor, scale: float = 2.0) -> Tensor:
    return F.gelu(x @ weight).pow(2).mean() * scale


def test_a_scripted_function():
    compiled = torch_ort.compile(gelu_loss)
    weight = torch.randn(8, 4, requires_grad=True)
    other = weight.detach().clone().requires_grad_()
    for step in range(3):
        x = rows(step)
        want, got = gelu_loss(x, weight, scale=3.0), compiled(x, other, scale=3.0)
        torch.testing.assert_close(got, want)
        want.backward()
        got.backward()
        torch.testing.assert_close(other.grad, weight.grad)
    counters = torch_ort.counters()
    assert counters["graphs_captured"] == 1
    assert counters["forward_runs"] == counters["backward_runs"] == 3
    assert counters["fallbacks"] == 0


def test_a_plain_module_with_a_script_inside(compare):
    def script_inner(module: nn.Module) -> nn.Module:
        module[0] = torch.jit.script(module[0])
        return module

    compare(lambda: nn.Sequential(net(), nn.Linear(4, 2)), rows, script_inner,
            wrap=torch_ort.compile)  # fmt: skip


def test_everything_else_goes_to_torch_compile():
    model = net()
    compiled = torch_ort.compile(model, fullgraph=True, options={"check": 1})
    assert isinstance(compiled, torch._dynamo.OptimizedModule)
    x = rows(0)
    torch.testing.assert_close(compiled(x), model(x))
    assert torch_ort.counters()["graphs_captured"] == 1

    @torch_ort.compile(dynamic=True)
    def function(x: Tensor) -> Tensor:
        return x.sin().sum()

    torch.testing.assert_close(function(x), x.sin().sum())
    assert torch_ort.counters()["graphs_captured"] == 2


def test_disabled():
    scripted = torch.jit.script(net())
    assert torch_ort.compile(scripted, disable=True) is scripted


class ByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if bool(x.sum() > 0) else x


@pytest.mark.hands_over("numbers read from tensors")
def test_fullgraph_raises_instead_of_falling_back(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    scripted = torch.jit.script(ByData())
    with pytest.raises(ORTModuleONNXModelException, match="depends on the numbers in a tensor"):
        torch_ort.compile(scripted, fullgraph=True)(rows(0))
    with pytest.warns(FallbackWarning, match="depends on the numbers in a tensor"):
        torch_ort.compile(scripted)(rows(0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"options": {"sav_onnx": True}}, "unknown option: got 'sav_onnx'.*save_onnx"),
        ({"mode": "fastest"}, "mode: got 'fastest'"),
        ({"mode": "default", "options": {}}, "got both mode and options, want one of them"),
    ],
)
def test_wrong_settings(settings, words):
    with pytest.raises(UserError, match=words):
        torch_ort.compile(torch.jit.script(net()), **settings)


def test_torch_compile_itself_refuses_scripts():
    with pytest.raises(RuntimeError, match=r"does not support compiling torch\.jit\.script"):
        torch.compile(torch.jit.script(net()), backend="ort")(rows(0))
