# Errors that scripts raise, and what a replay refuses, by their words.
import pytest
import torch
from torch import Tensor, nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.ortmodule import ORTModuleONNXModelException


class Checks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, limit: int = 8) -> Tensor:
        assert x.dim() == 2, "want two dims"
        if x.size(0) > limit:
            raise ValueError(f"got {x.size(0)} rows, want at most {limit}")
        return self.layer(x)


@pytest.mark.hands_over("nothing can capture it")
def test_errors_of_a_script_reach_the_user(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    ours = ORTModule(torch.jit.script(Checks()))
    ours(torch.ones(2, 4)).sum().backward()
    with pytest.raises(torch.jit.Error, match="ValueError: got 9 rows, want at most 8"):
        ours(torch.ones(9, 4))
    with pytest.raises(torch.jit.Error, match="AssertionError: want two dims"):
        ours(torch.ones(4))
    ours(torch.ones(3, 4)).sum().backward()
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["forward_runs"] == 2
    assert torch_ort.counters()["graphs_captured"] == 1


@pytest.mark.hands_over("nothing can capture it")
def test_strict_mode_says_what_the_script_raises():
    ours = ORTModule(torch.jit.script(Checks()))
    words = r"TorchScript raises builtins.ValueError: got 9 rows, want at most 8 \(.*errors.py:\d+"
    with pytest.raises(ORTModuleONNXModelException, match=words):
        ours(torch.ones(9, 4))


class Forks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        future = torch.jit.fork(torch.neg, x)
        return x + torch.jit.wait(future)


class Lists(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        values: list[float] = x.view(-1).tolist()
        return x + values[0]


class Autocasts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x


class Unwraps(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x + torch.jit._unwrap_optional(y)


@pytest.mark.hands_over("nothing can capture it")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Forks, r"TorchScript: prim::fork is not supported \(.*test_errors\.py:\d+: torch\.jit\.f"),
        (Autocasts, r"TorchScript: torch\.autocast inside of a script \(.*test_errors\.py:\d+"),
        (Lists, r"TorchScript: prim::tolist is not supported"),
        (Unwraps, r"TorchScript raises RuntimeError: Unwrapping null optional"),
    ],
)
def test_what_is_refused(kind, words):
    with pytest.raises(ORTModuleONNXModelException, match=words):
        ORTModule(torch.jit.script(kind()))(torch.ones(2, 2))


@pytest.mark.hands_over("nothing can capture it")
def test_an_object_as_result_is_refused():
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        @torch.jit.export
        def forward(self, x: Tensor):
            return Pair(self.inner(x))

    with pytest.raises(
        ORTModuleONNXModelException, match=r"an object of .*Pair cannot be a result of a graph"
    ):
        ORTModule(torch.jit.script(Gives()))(torch.ones(2, 2))


@torch.jit.script
class Pair:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class RaisesWithoutGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if bool(x.sum() > 0):
                x = x * 2
        return x * self.scale


@pytest.mark.hands_over("numbers read from tensors")
def test_an_error_leaves_grad_mode_as_it_was():
    with pytest.raises(ORTModuleONNXModelException, match="depends on the numbers"):
        ORTModule(torch.jit.script(RaisesWithoutGrad()))(torch.ones(2, 2))
    assert torch.is_grad_enabled()


@pytest.mark.hands_over("PyTorch words the error")
def test_errors_of_kernels_are_pytorchs(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    ours = ORTModule(torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        ours(torch.ones(2, 3))
    ours(torch.ones(2, 4))
    assert torch_ort.counters()["forward_runs"] == 1


def test_a_script_runs_plain_while_nothing_is_captured():
    scripted = torch.jit.script(nn.Linear(4, 4))
    ORTModule(scripted)(torch.ones(2, 4))
    method = type(torch.jit.script(nn.Linear(4, 4)).forward)
    assert "torch_ort" not in repr(method.__call__)
    assert torch_ort.counters()["forward_runs"] == 1
    scripted(torch.ones(2, 4))
    assert torch_ort.counters()["forward_runs"] == 1
