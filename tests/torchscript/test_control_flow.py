# Branches, loops and containers of scripts: what is known at capture is guarded, data is refused.
import copy
import enum
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import ORTModuleONNXModelException


def rows(step: int) -> Tensor:
    return torch.randn(2 + step, 4)


def graphs() -> int:
    assert torch_ort.counters()["fallbacks"] == 0
    return torch_ort.counters()["graphs_captured"]


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, ORTModule]:
    eager = make()
    return eager, ORTModule(torch.jit.script(copy.deepcopy(eager)))


def assert_same_step(eager: nn.Module, ours: ORTModule, *args: object, **kwargs: object) -> None:
    """Compare outputs and gradients of one call."""
    eager.zero_grad()
    ours.zero_grad()
    want, got = eager(*args, **kwargs), ours(*args, **kwargs)
    torch.testing.assert_close(got, want)
    want.sum().backward()
    got.sum().backward()
    for (name, parameter), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, msg=name)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class BySize(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.size(0) > 3 and x.size(1) == 4:
            x = self.layer(x) * 2
        elif x.numel() == 8:
            return self.layer(x) - 1
        return self.layer(x)


def test_conditions_on_sizes_are_guards(compare):
    compare(BySize, rows, steps=6, graphs=3)


def test_going_back_captures_nothing():
    eager, ours = pair(BySize)
    for step in (0, 3, 0, 4, 1, 0):
        assert_same_step(eager, ours, rows(step))
    assert graphs() == 3


class ByAttribute(Net):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * self.factor if self.is_on else x


def test_conditions_on_attributes_are_guards():
    eager, ours = pair(ByAttribute)
    x = rows(0)
    for factor, is_on in ((2, True), (3, True), (3, False), (2, True)):
        eager.factor = ours.factor = factor
        eager.is_on = ours.is_on = is_on
        assert_same_step(eager, ours, x)
    assert graphs() == 3
    assert ours.module.factor == 2


class ByOptional(Net):
    def forward(self, x: Tensor, mask: Tensor | None = None, bias: float = 0.0) -> Tensor:
        y = self.layer(x)
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return y + bias


def test_optional_arguments():
    eager, ours = pair(ByOptional)
    for step in range(3):
        x = rows(step)
        assert_same_step(eager, ours, x)
        assert_same_step(eager, ours, x, x > 0)
        assert_same_step(eager, ours, x, mask=x > 0)
    assert graphs() == 3  # without, by position, by name


def test_a_float_that_changes_becomes_a_number_of_the_graph():
    eager, ours = pair(ByOptional)
    for step in range(6):
        assert_same_step(eager, ours, rows(step), bias=0.5 * step)
    assert graphs() == 2


class Loops(Net):
    def forward(self, x: Tensor, count: int) -> Tensor:
        states = torch.jit.annotate(list[Tensor], [])
        for i in range(count):
            if i == 4:
                break
            x = torch.tanh(self.layer(x)) * (i + 1)
            states.append(x)
        return torch.stack(states).sum(0)


def test_the_number_of_rounds_is_a_guard():
    eager, ours = pair(Loops)
    for step, count in enumerate((2, 2, 3, 2, 6, 3)):
        assert_same_step(eager, ours, rows(step), count)
    assert graphs() == 3


class OverTime(nn.Module):
    """A recurrent cell over the steps of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.size(0), 4, device=x.device)
        outputs: list[Tensor] = []
        for t in range(x.size(1)):
            state = self.cell(x[:, t], state)
            outputs.append(state)
        return torch.stack(outputs, 1)


def test_a_loop_over_a_sequence(compare):
    compare(OverTime, lambda step: torch.randn(2 + step, 3, 4))


class While(Net):
    def forward(self, x: Tensor) -> Tensor:
        size, count = x.size(0), 0
        while size > 1:
            size = size // 2
            count += 1
            if count % 2 == 0:
                continue
            x = self.layer(x)
        return x * count


def test_while_loops(compare):
    compare(While, lambda step: torch.randn(8, 4))


class ByData(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if bool(y.sum() > 0):
            y = y * 2
        return y


@pytest.mark.hands_over("numbers read from tensors")
def test_conditions_on_data_are_refused_by_name_and_line():
    _, ours = pair(ByData)
    words = r"aten::Bool depends on the numbers in a tensor.*test_control_flow\.py:\d+: bool"
    with pytest.raises(ORTModuleONNXModelException, match=words):
        ours(rows(0))


@pytest.mark.hands_over("numbers read from tensors")
def test_conditions_on_data_run_in_pytorch(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager, ours = pair(ByData)
    with pytest.warns(FallbackWarning, match="depends on the numbers in a tensor"):
        ours(rows(0))
    for step in range(3):
        assert_same_step(eager, ours, rows(step))
        assert_same_step(eager, ours, -rows(step))


class WithoutGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.layer(x).mean()
        return self.layer(x) * scale


def test_no_grad_in_a_script(compare):
    compare(WithoutGradient, rows)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()})
        self.steps = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) + i
        for name, module in self.named.items():
            if name == "a":
                x = module(x)
        for weight in self.weights:
            x = x * weight
        return self.steps(x) + self.layers[1](x)


def test_lists_of_modules(compare):
    compare(Lists, rows)


@torch.jit.interface
class OneTensor(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        pass


class ByIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])

    def forward(self, x: Tensor, which: int) -> Tensor:
        layer: OneTensor = self.layers[which]
        return layer.forward(x) + self.layers[0](x)


def test_modules_by_index():
    scripted = torch.jit.script(ByIndex())
    ours = ORTModule(scripted)
    for which in (0, 1, 0):
        x = rows(0)
        torch.testing.assert_close(ours(x, which), scripted(x, which))
    assert graphs() == 2


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Plain(Net):
    """What TorchScript does on numbers, strings and containers."""

    def __init__(self) -> None:
        super().__init__()
        self.color = Color.BLUE
        self.words = ["one", "two"]

    def forward(self, x: Tensor) -> Tensor:
        sizes = [d * 2 for d in x.shape][::-1]
        sizes.append(3)
        table: dict[str, int] = {"rows": x.size(0), "two": 2}
        table["sum"] = sum(sizes) + max(len(sizes), 2) - min(1, 5)
        name = "{}-{}".format("a", 1).upper() + self.words[1]
        y = self.layer(x)
        if name == "A-1two" and "two" in table and self.color == Color.BLUE:
            y = y * table["two"] ** 2 / (5 // 2) + 7 % 4
        if not name.startswith("B") and name.find("1") == 2 and len(name) == 6:
            y = y + float(table["sum"]) + int("3") + abs(-1) + round(2.6)
        total, (first, last) = 0.0, (1, 2.5)
        for key, value in table.items():
            if key != "rows":
                total += value * first + last
        return y + total


@pytest.mark.hands_over("floats that depend on sizes")
def test_numbers_strings_and_containers(compare):
    compare(Plain, rows)


class ByType(Net):
    def forward(self, x: Tensor, y: int | Tensor | list[int]) -> Tensor:
        if isinstance(y, int):
            return self.layer(x) + y
        elif isinstance(y, Tensor):
            return self.layer(x) * y
        return self.layer(x) - y[0]


def test_conditions_on_types():
    eager, ours = pair(ByType)
    x = rows(0)
    for y in (2, 3, x, [4, 5]):
        assert_same_step(eager, ours, x, y)
    assert graphs() == 3


class Indexing(Net):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        y = self.layer(x).clone()
        y[:, 0] = 1.5
        y[index] = y[index] * 2
        z = y[..., None].squeeze(-1).unsqueeze(0).squeeze()
        return z.index_select(0, index) + y[0:1, 1:].sum() + y.T.sum() + x.new_zeros([1])


def test_indexing_and_squeezing(compare):
    compare(Indexing, lambda step: (torch.randn(3 + step, 4), torch.tensor([0, 2])))


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.interpolate(self.conv(x), scale_factor=2.0, mode="nearest")
        y = y.view(y.size(0), -1, x.shape[-1]).to(torch.float64).to(x.dtype).to(x.device)
        return y.squeeze(1) + torch.arange(x.size(2), dtype=x.dtype, device=x.device)


def test_shapes(compare):
    compare(Shapes, lambda step: torch.randn(2 + step, 2, 4 + step))


@torch.jit.script
class Accumulator:
    def __init__(self, start: Tensor) -> None:
        self.total = start
        self.count = 0

    def add(self, x: Tensor) -> None:
        self.total = self.total + x
        self.count += 1


class WithObject(Net):
    def forward(self, x: Tensor) -> Tensor:
        sums = Accumulator(torch.zeros_like(x))
        for _ in range(3):
            sums.add(self.layer(x))
        return sums.total / sums.count


def test_objects_of_script_classes():
    scripted = torch.jit.script(WithObject())
    ours = ORTModule(scripted)
    for step in range(2):
        torch.testing.assert_close(ours(rows(step) * 0 + 1), scripted(rows(step) * 0 + 1))
    assert graphs() == 1


def traced(function: Callable[..., Tensor], *example: Tensor) -> nn.Module:
    class Calls(Net):
        def forward(self, *args: Tensor) -> Tensor:
            return function(self.layer, *args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return torch.jit.trace(Calls(), example, check_trace=False)


def reshaped(layer: nn.Module, x: Tensor) -> Tensor:
    rows, columns = x.shape
    y = layer(x).view(rows * columns).reshape(columns, rows // 1)
    y = y + x.size(0) * 0.5 + torch.ones(columns, rows, device=x.device) * rows
    return y.expand(2, columns, rows) - torch.arange(rows, device=x.device)


@pytest.mark.hands_over("floats that depend on sizes")
def test_sizes_of_a_traced_module_stay_open():
    module = traced(reshaped, rows(0))
    ours = ORTModule(module)
    for step in range(3):
        x = rows(step)
        torch.testing.assert_close(ours(x), module(x))
    assert graphs() == 1


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 10 * ctx.factor * grad * x**2, None  # not the true one


def cubed(layer: nn.Module, x: Tensor) -> Tensor:
    return Cube.apply(layer(x), 2.0)


def test_functions_in_a_traced_module_keep_their_backward():
    module = traced(cubed, rows(0))
    ours = ORTModule(module)
    x = rows(1)
    ours(x).sum().backward()
    y = F.linear(x, module.layer.weight, module.layer.bias).detach()
    want = (20 * y**2).sum(0)
    torch.testing.assert_close(module.layer.bias.grad, want)
    assert graphs() == 1


class Converts(Net):
    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        y = self.layer(x).to(like, non_blocking=False)
        y = y.to(dtype=torch.float32).to(x.device, torch.float64).to("cpu").to(torch.float32, False)
        return y * 2


def test_conversions(compare):
    compare(Converts, lambda step: (rows(step), torch.ones(1, dtype=torch.float64)))
