"""Modules of PyTorch as files of inference: for onnxruntime, and to be loaded again."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx_cases import MODELS, TWO_LAYERS, by_onnxruntime, model_of
from torch import nn

import torch_ort
from torch_ort import Unsupported, UserError

pytestmark = pytest.mark.ort_only


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x, mask=None):
        return self.head(self.inner(x, src_key_padding_mask=mask)), x.sum((1, 2))


@pytest.mark.parametrize("road", ["module", "compiled", "ortmodule"])
@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_gives_the_modules_results(name: str, road: str, tmp_path: Path) -> None:
    make, sample, names = MODELS[name]
    module, x = make(), sample()
    given = {"module": lambda m: m, "compiled": torch.compile, "ortmodule": torch_ort.ORTModule}
    path = tmp_path / "net.onnx"
    input_name = "x" if name in ("attention",) else "ids" if name == "tagger" else "input"
    dynamic = {input_name: names} if names else False
    torch_ort.export_onnx(given[road](module), path, (x,), dynamic=dynamic, output_names=["y"])
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {each.domain for each in model.opset_import} <= {"", "ai.onnx"}
    (value,) = model.graph.input
    assert value.name == input_name
    module.eval()
    for given_x in (x, *([torch.cat([x, x])] if names else [])):
        got = by_onnxruntime(path.read_bytes(), **{input_name: given_x})
        torch.testing.assert_close(got, module(given_x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch_ort.load_onnx(path)(x), module(x), rtol=1e-4, atol=1e-5)


def test_sizes_are_those_of_the_call_unless_they_are_named(tmp_path: Path) -> None:
    module, x = Encoder(), torch.randn(2, 5, 16)
    sizes = {}
    for name, dynamic in (("none", False), ("batch", {"x": {0: "batch"}}), ("all", True)):
        torch_ort.export_onnx(module, tmp_path / "net.onnx", (x,), dynamic=dynamic)
        (value,) = onnx.load(tmp_path / "net.onnx").graph.input
        dims = value.type.tensor_type.shape.dim
        sizes[name] = [dim.dim_param or dim.dim_value for dim in dims]
    assert sizes["none"] == [2, 5, 16]
    assert sizes["batch"] == ["batch", 5, 16]
    assert all(isinstance(size, str) for size in sizes["all"][:2])
    assert sizes["all"][2] == 16


def test_arguments_by_name_and_several_results(tmp_path: Path) -> None:
    module = Encoder().eval()
    x, mask = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    mask[1, 4:] = True
    path = tmp_path / "net.onnx"
    dynamic = {"x": {0: "n", 1: "length"}, "mask": {0: "n", 1: "length"}}
    torch_ort.export_onnx(module, path, {"x": x, "mask": mask}, dynamic=dynamic)
    outputs = [value.name for value in onnx.load(path).graph.output]
    assert outputs == ["output", "output_1"]
    for rows in (3, 2):
        given = {"x": x[:rows], "mask": mask[:rows]}
        results = by_onnxruntime(path.read_bytes(), all_results=True, **given)
        for got, want in zip(results, module(**given), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_it_is_written_as_it_evaluates_and_stays_in_its_mode(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    module[2].eval()
    x = torch.randn(6, 4)
    before = {name: each.clone() for name, each in module.state_dict().items()}
    torch_ort.export_onnx(module, tmp_path / "net.onnx", (x,))
    assert [each.training for each in module] == [True, True, False]
    for name, each in module.state_dict().items():
        torch.testing.assert_close(each, before[name], rtol=0, atol=0)
    got = by_onnxruntime((tmp_path / "net.onnx").read_bytes(), input=x)
    torch.testing.assert_close(got, module.eval()(x), rtol=1e-4, atol=1e-5)


def test_weights_have_the_names_of_the_module(tmp_path: Path) -> None:
    module = Encoder()
    torch_ort.export_onnx(module, tmp_path / "net.onnx", (torch.randn(2, 5, 16),))
    names = {each.name for each in onnx.load(tmp_path / "net.onnx").graph.initializer}
    assert {name for name, _ in module.named_parameters()} <= names


def test_trained_loaded_and_trained_again(tmp_path: Path) -> None:
    module, x = MODELS["perceptron"][0](), torch.randn(4, 6)
    path = tmp_path / "net.onnx"
    torch_ort.export_onnx(module, path, (x,))
    loaded = torch_ort.load_onnx(path)
    for model in (module, loaded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(loaded(x), module(x), rtol=1e-4, atol=1e-5)


# ---- what is refused


class Private(nn.Module):
    def forward(self, x):
        return torch.linalg.qr(x).R


def test_operators_that_onnx_has_not_are_named(tmp_path: Path) -> None:
    path, x = tmp_path / "net.onnx", torch.randn(3, 3)
    with pytest.raises(
        Unsupported,
        match=r"export_onnx: operators: got aten::linalg_qr, want those of ONNX; private=True",
    ):
        torch_ort.export_onnx(Private(), path, (x,))
    assert not path.exists()
    torch_ort.export_onnx(Private(), path, (x,), private=True)
    torch.testing.assert_close(torch_ort.load_onnx(path)(x), Private()(x))


class Branching(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


@pytest.mark.hands_over("numbers read from tensors")
def test_what_cannot_be_captured_says_why(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"test_export\.py"):
        torch_ort.export_onnx(Branching(), tmp_path / "net.onnx", (torch.ones(3),))
    assert not list(tmp_path.iterdir())


def test_what_is_no_module_and_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with pytest.raises(TypeError, match=r"module: got int, want a torch\.nn\.Module"):
        torch_ort.export_onnx(3, path)
    with pytest.raises(TypeError, match="inputs: got none, want arguments of a call to capture"):
        torch_ort.export_onnx(nn.Linear(3, 2), path)
    with pytest.raises(UserError, match="dynamic: got y, want some of input"):
        torch_ort.export_onnx(nn.Linear(3, 2), path, (torch.ones(2, 3),), dynamic={"y": {0: "n"}})
    with pytest.raises(UserError, match="output_names: got 2, want 1"):
        torch_ort.export_onnx(nn.Linear(3, 2), path, (torch.ones(2, 3),), output_names=["a", "b"])
    loaded = torch_ort.load_onnx(model_of(TWO_LAYERS))
    with pytest.raises(TypeError, match="a module of load_onnx is written as it was read"):
        torch_ort.export_onnx(loaded, path, (torch.ones(2, 3),))
    assert not path.exists()


class Numbered(nn.Module):
    def forward(self, x, n=2):
        return x * n


class WithOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x + self.output


def test_numbers_names_and_dims_that_cannot_be(tmp_path: Path) -> None:
    path, x = tmp_path / "net.onnx", torch.randn(2, 3)
    with pytest.raises(UserError, match="inputs: got a number, which would become an input"):
        torch_ort.export_onnx(Numbered(), path, (x, 3))
    with pytest.raises(UserError, match="output_names: got x, want names of their own"):
        torch_ort.export_onnx(Numbered(), path, (x,), output_names=["x"])
    with pytest.raises(UserError, match="dynamic: dim of 'x': got 5, want 0 to 1"):
        torch_ort.export_onnx(Numbered(), path, (x,), dynamic={"x": {5: "n"}})
    with pytest.raises(TypeError, match="inputs: got Tensor, want a tuple of arguments"):
        torch_ort.export_onnx(Numbered(), path, x)
    for names in ([3], [""]):
        with pytest.raises(TypeError, match=r"output_names: got .*, want texts"):
            torch_ort.export_onnx(Numbered(), path, (x,), output_names=names)
    with pytest.raises(TypeError, match="dynamic: got list, want True, or names by input and dim"):
        torch_ort.export_onnx(Numbered(), path, (x,), dynamic=["x"])
    for word in ("min", "a b"):
        with pytest.raises(UserError, match=f"got '{word}', want a name of letters and digits"):
            torch_ort.export_onnx(Numbered(), path, (x,), dynamic={"x": {0: word}})
    for named in (["n"], {"n": 0}, {0: 1}, "n"):
        with pytest.raises(TypeError, match=r"dynamic of 'x': got .*, want True, or names by"):
            torch_ort.export_onnx(Numbered(), path, (x,), dynamic={"x": named})
    assert not path.exists()
    torch_ort.export_onnx(WithOutput(), path, (x,))
    onnx.checker.check_model(path)
    torch.testing.assert_close(by_onnxruntime(path.read_bytes(), x=x), x + 1)


class Asks(nn.Module):
    """Something else for even numbers of rows, or from a number of rows on."""

    def __init__(self, question) -> None:
        super().__init__()
        self.question = question

    def forward(self, x):
        return x * 2 if self.question(x.size(0)) else x * 3


def test_conditions_on_named_sizes(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    named = {"x": {0: "n"}}
    with pytest.raises(UserError, match=r"dim 0 of 'x': got 'n', but .* else for some sizes: want"):
        torch_ort.export_onnx(Asks(lambda n: n % 2 == 0), path, (torch.ones(4, 2),), dynamic=named)
    assert not path.exists()
    with pytest.warns(UserWarning, match=r"dim 0 of 'x': the file is right for sizes from 3 on"):
        torch_ort.export_onnx(Asks(lambda n: n > 2), path, (torch.ones(4, 2),), dynamic=named)
    torch.testing.assert_close(
        by_onnxruntime(path.read_bytes(), x=torch.ones(9, 2)), torch.full((9, 2), 2.0)
    )
    with pytest.warns(
        UserWarning, match=r"right for sizes with the call's conditions, since .*% 2"
    ):
        torch_ort.export_onnx(Asks(lambda n: n % 2 == 0), path, (torch.ones(4, 2),), dynamic=True)
    torch_ort.export_onnx(Asks(lambda n: n % 2 == 0), path, (torch.ones(4, 2),))


class Listed(nn.Module):
    def forward(self, xs, **more):
        return xs[0] + xs[1] * more["scale"]


def test_sizes_in_lists_are_those_of_the_call(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    inputs = {"xs": [torch.ones(3, 4), torch.ones(3, 4)], "scale": torch.ones(4)}
    torch_ort.export_onnx(Listed(), path, inputs)
    shapes = [
        [dim.dim_value for dim in each.type.tensor_type.shape.dim]
        for each in onnx.load(path).graph.input
    ]
    assert shapes == [[3, 4], [3, 4], [4]]


class OfWidth(nn.Module):
    def forward(self, x):
        return x.exp() if x.shape[0] == 3 else x.sin()


class Joined(nn.Module):
    def forward(self, a, b):
        return torch.cat([a, b], 1) + 1


WRONG_NAMES = {
    "the width of a weight": (nn.Linear(3, 2), {"input": {1: "n"}}, "for the size of the call"),
    "a size in a branch": (OfWidth(), {"x": {0: "n"}}, "for the size of the call"),
    "no name": (Numbered(), {"x": {0: ""}}, "got '', want a name of letters and digits"),
    "two names": (Joined(), {"a": {0: "n"}, "b": {0: "m"}}, "as large as 'n'; want one name"),
    "one name": (
        Joined(), {"a": {1: "n"}, "b": {1: "n"}}, "got 'n' for a size of 4, which names one of 3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_names_of_sizes_that_are_none(name: str, tmp_path: Path) -> None:
    module, dynamic, words = WRONG_NAMES[name]
    inputs = [torch.randn(3, 3), torch.randn(3, 4)][: len(dynamic)]
    with pytest.raises(UserError, match=rf"export_onnx: dynamic: dim \d of '\w+': .*{words}"):
        torch_ort.export_onnx(module, tmp_path / "net.onnx", inputs, dynamic=dynamic)
    assert not list(tmp_path.iterdir())


class Rounded(nn.Module):
    def forward(self, x):
        return x.half().float() - x.bfloat16().float()


def test_casts_of_the_model_stay_in_the_file(tmp_path: Path) -> None:
    path, x = tmp_path / "net.onnx", torch.tensor([[1e5, 0.1, -0.7192]])
    torch_ort.export_onnx(Rounded(), path, (x,))
    torch.testing.assert_close(by_onnxruntime(path.read_bytes(), x=x), Rounded()(x))


class Selecting(nn.Module):
    def forward(self, x):
        return x[torch.tensor([0, 1]), torch.tensor([1, -1])]


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.weight, x


def test_files_of_named_and_fixed_sizes_can_be_read(tmp_path: Path) -> None:
    path, x = tmp_path / "net.onnx", torch.randn(3, 4)
    torch_ort.export_onnx(Selecting(), path, (x,), dynamic={"x": {0: "n"}})
    x = torch.randn(5, 4)
    torch.testing.assert_close(torch_ort.load_onnx(path)(x), Selecting()(x))
    torch.testing.assert_close(by_onnxruntime(path.read_bytes(), x=x), Selecting()(x))


def test_short_floats_that_nothing_computes_with(tmp_path: Path) -> None:
    path, x = tmp_path / "net.onnx", torch.tensor([1.5, 2.0], dtype=torch.bfloat16)
    torch_ort.export_onnx(Given().bfloat16(), path, (x,))
    onnx.checker.check_model(path, full_check=True)
    torch.testing.assert_close(torch_ort.load_onnx(path)(x), Given().bfloat16()(x))
