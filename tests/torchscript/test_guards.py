# What changes in a script between calls: it is seen, or refused with a reason.
import copy

import pytest
import torch
from torch import Tensor, nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import ORTModuleONNXModelException


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = 2.0
        self.sizes = [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + sum(self.sizes)


def graphs() -> int:
    assert torch_ort.counters()["fallbacks"] == 0
    return torch_ort.counters()["graphs_captured"]


@pytest.fixture
def wrapped():
    """Return a script in the engine that has run once, and the script."""
    scripted = torch.jit.script(Net())
    ours = ORTModule(scripted)
    ours(torch.ones(2, 4)).sum().backward()
    assert graphs() == 1
    return ours, scripted


def assert_same(ours: ORTModule, scripted: nn.Module, captured: int) -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(ours(x), scripted(x))
    assert graphs() == captured


def test_attributes(wrapped):
    ours, scripted = wrapped
    scripted.scale = 3.0
    assert_same(ours, scripted, 2)
    scripted.sizes = [1, 2, 3]
    assert_same(ours, scripted, 3)
    scripted.scale, scripted.sizes = 2.0, [1, 2]
    assert_same(ours, scripted, 3)


def test_the_reason_for_another_capture_names_the_attribute(wrapped, caplog):
    ours, scripted = wrapped
    (captured,) = ours._calls._captured
    scripted.scale = 3.0
    words = "attribute 'scale' of the module has changed from 2.0 to 3.0"
    assert captured.capture.mismatch((torch.ones(2, 4),), {}) == words
    scripted.scale = 2.0
    scripted.layer.eval()
    assert captured.capture.mismatch((torch.ones(2, 4),), {}) == ""  # linear layers do not ask


def test_numbers_of_parameters(wrapped):
    ours, scripted = wrapped
    with torch.no_grad():
        scripted.layer.weight.mul_(2)
    assert_same(ours, scripted, 1)


def test_a_parameter_replaced(wrapped):
    ours, scripted = wrapped
    scripted.layer.weight = nn.Parameter(torch.randn(4, 4))
    assert_same(ours, scripted, 1)  # of the same kind: the graph takes it
    ours(torch.ones(2, 4)).sum().backward()
    assert scripted.layer.weight.grad is not None


def test_requires_grad(wrapped):
    ours, scripted = wrapped
    scripted.layer.weight.requires_grad_(False)
    assert_same(ours, scripted, 2)
    scripted.zero_grad()
    ours(torch.ones(2, 4)).sum().backward()
    assert scripted.layer.weight.grad is None
    assert scripted.layer.bias.grad is not None


def test_dtype(wrapped):
    ours, scripted = wrapped
    ours.double()
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(ours(x), scripted(x))
    assert graphs() == 2


def test_a_module_swapped_for_one_of_its_type(wrapped):
    ours, scripted = wrapped
    scripted.layer = copy_of(scripted.layer)
    with torch.no_grad():
        scripted.layer.bias.add_(1)
    assert_same(ours, scripted, 2)


def copy_of(scripted: nn.Module) -> nn.Module:
    with torch.no_grad():
        copied = copy.deepcopy(scripted)
    for parameter in copied.parameters():
        parameter.requires_grad_()
    return copied


def test_the_mode_of_a_part():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    ours = ORTModule(torch.jit.script(plain))
    x = torch.ones(2, 4)
    ours(x)
    getattr(ours.module, "1").eval()  # `[1]` is the module it was made from
    torch.testing.assert_close(ours(x), ours.module(x))
    assert graphs() == 2


class Optional_(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask
        return self.layer(x) if mask is None else self.layer(x) * mask


def test_a_buffer_that_is_none():
    ours = ORTModule(torch.jit.script(Optional_()))
    assert_same(ours, ours.module, 1)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.sizes = [1]

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(x.size(0))
        return self.layer(x) * len(self.sizes)


class Keeps(nn.Module):
    kept: list[Tensor]

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kept = [torch.ones(4), self.layer.bias]
        self.grows = grows

    def forward(self, x: Tensor) -> Tensor:
        if self.grows:
            self.kept.append(x)
        return self.layer(x) * self.kept[0] + self.kept[1]


class KeepsTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = {"one": torch.ones(4)}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table["one"]


REFUSED = {
    Counts: r"forward assigns 'calls' of the module, which a captured graph cannot do \(.*\.py:\d+",
    Appends: r"forward changes 'sizes' of the module, which a captured graph cannot do",
}


@pytest.mark.hands_over("nothing can capture it")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_graph_cannot_assign(kind, monkeypatch):
    scripted = torch.jit.script(kind())
    with pytest.raises(ORTModuleONNXModelException, match=REFUSED[kind]):
        ORTModule(scripted)(torch.ones(2, 4))
    assert getattr(scripted, "calls", 0) == 0
    assert getattr(scripted, "sizes", [1]) == [1]
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager = kind()
    eager.load_state_dict(scripted.state_dict())
    ours = ORTModule(scripted)
    x = torch.randn(2, 4)
    with pytest.warns(FallbackWarning, match="a captured graph cannot do"):
        torch.testing.assert_close(ours(x), eager(x))
    torch.testing.assert_close(ours(x), eager(x))


def test_tensors_in_a_list_attribute():
    scripted = torch.jit.script(Keeps())
    ours = ORTModule(scripted)
    assert_same(ours, scripted, 1)
    gradients = []
    for run in (ours, scripted):
        scripted.zero_grad()
        run(torch.ones(3, 4)).sum().backward()
        gradients.append(scripted.layer.bias.grad.clone())
    torch.testing.assert_close(*gradients)  # of both places where it hangs
    scripted.kept = [torch.full((4,), 2.0), scripted.layer.bias]
    assert_same(ours, scripted, 1)
    scripted.kept = [torch.ones(4), torch.ones(4)]  # shared no more
    assert_same(ours, scripted, 2)
    scripted.kept = [torch.ones(4), torch.ones(4), torch.ones(4)]
    assert_same(ours, scripted, 3)


@pytest.mark.hands_over("nothing can capture it")
def test_a_list_of_tensors_that_grows_is_refused():
    scripted = torch.jit.script(Keeps(grows=True))
    with pytest.raises(ORTModuleONNXModelException, match="forward changes 'kept' of the module"):
        ORTModule(scripted)(torch.ones(2, 4))
    assert len(scripted.kept) == 2
    assert scripted.kept[1] is scripted.layer.bias


@pytest.mark.hands_over("nothing can capture it")
def test_tensors_in_a_dict_attribute_are_refused():
    words = r"attribute 'table' of the module holds tensors in a dict.*test_guards\.py:\d+"
    with pytest.raises(ORTModuleONNXModelException, match=words):
        ORTModule(torch.jit.script(KeepsTable()))(torch.ones(2, 4))


class Ignores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.factor = 2.0

    @torch.jit.ignore
    def in_python(self, x: Tensor, deep: bool) -> Tensor:
        return torch.sin(x) * self.factor + self.layer.bias

    @torch.jit.unused
    def never(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, never: bool = False) -> Tensor:
        if never:
            return self.never(x)
        return self.in_python(self.layer(x), True)


def test_ignored_methods_are_traced_and_what_they_read_is_guarded():
    scripted = torch.jit.script(Ignores())
    ours = ORTModule(scripted)
    assert_same(ours, scripted, 1)
    scripted.layer.bias = nn.Parameter(torch.ones(4))
    assert_same(ours, scripted, 1)
    scripted.factor = 4.0
    assert_same(ours, scripted, 2)
    scripted.zero_grad()
    ours(torch.ones(2, 4)).sum().backward()
    got = [parameter.grad.clone() for parameter in scripted.parameters()]
    scripted.zero_grad()
    scripted(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in scripted.parameters()])


class IgnoresTable(KeepsTable):
    @torch.jit.ignore
    def in_python(self, x: Tensor) -> Tensor:
        return x * self.table["one"]

    def forward(self, x: Tensor) -> Tensor:
        return self.in_python(x)


@pytest.mark.hands_over("nothing can capture it")
def test_a_table_of_tensors_that_python_may_read_is_refused():
    words = "attribute 'table' of the module holds tensors in a dict"
    with pytest.raises(ORTModuleONNXModelException, match=words):
        ORTModule(torch.jit.script(IgnoresTable()))(torch.ones(2, 4))


def test_other_attributes_of_the_wrapper_do_not_matter(wrapped):
    ours, scripted = wrapped
    scripted.note = "set after the first call"
    assert_same(ours, scripted, 1)


def doubled(self, args: tuple[Tensor], output: Tensor) -> Tensor:
    return output * 2


def test_hooks_that_were_scripted():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for module in (plain, plain[1]):
        module.register_forward_hook(doubled)
    scripted = torch.jit.script(plain)
    assert_same(ORTModule(scripted), scripted, 1)


def test_the_script_is_as_before_after_a_capture(wrapped):
    _, scripted = wrapped
    assert all(type(parameter) is nn.Parameter for parameter in scripted.parameters())
    assert torch.jit.ScriptModule is type(scripted).__mro__[1]
    torch.testing.assert_close(scripted(torch.zeros(1, 4)), 2 * scripted.layer.bias[None] + 3)
