"""Files that PyTorch exports, and graphs by hand, as modules: against onnxruntime, and trained
beside the model that they come from.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx_cases import MODELS, TWO_LAYERS, Tagger, by_onnxruntime, export, model_of
from torch import nn

import torch_ort
from torch_ort import Unsupported, UserError
from torch_ort.onnx.load import OnnxModule

pytestmark = pytest.mark.ort_only


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_onnxruntimes(name, opset):
    make, sample, names = MODELS[name]
    data = export(make(), sample(), names, opset)
    loaded = torch_ort.load_onnx(data)
    for x in (sample(), *([torch.cat([sample()] * 2)] if names else [])):
        torch.testing.assert_close(loaded(x), by_onnxruntime(data, x=x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("road", ["eager", "aot_eager", "ort", "ortmodule"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_the_source_does(name, road):
    make, sample, names = MODELS[name]
    source, x = make(), sample()
    data = export(source, x, names, 17)
    loaded = torch_ort.load_onnx(data)
    assert len(list(loaded.parameters())) == len(list(source.parameters()))
    in_file = {each.name for each in onnx.load_from_string(data).graph.initializer}
    assert set(loaded.state_dict()) <= in_file
    if road == "ortmodule":
        call = torch_ort.ORTModule(loaded)
    else:
        call = loaded if road == "eager" else torch.compile(loaded, backend=road)

    def train(model: nn.Module, run) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(20):
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses = train(loaded, call)
    assert losses == pytest.approx(train(source, source), rel=2e-4)
    assert losses[-1] < losses[0]
    torch.testing.assert_close(loaded(x), source(x), rtol=1e-3, atol=1e-4)
    if road in {"ort", "ortmodule"}:
        assert torch_ort.counters()["fallbacks"] == 0
        assert torch_ort.counters()["forward_runs"] == 20


def test_a_copy_and_a_pickle_are_modules_of_their_own():
    data = export(Tagger(), MODELS["tagger"][1](), {0: "batch", 1: "length"}, 17)
    loaded, x = torch_ort.load_onnx(data, trainable="head.*"), torch.randint(0, 50, (2, 9))
    want = loaded(x)
    for other in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        torch.testing.assert_close(other(x), want, rtol=0, atol=0)
        assert other.state_dict().keys() == loaded.state_dict().keys()
        assert [n for n, _ in other.named_parameters()] == [n for n, _ in loaded.named_parameters()]
        assert isinstance(other, OnnxModule)
        assert other.onnx_names == loaded.onnx_names
        with torch.no_grad():
            other.get_parameter("head.bias").add_(1)
    torch.testing.assert_close(loaded(x), want, rtol=0, atol=0)


def test_frozen_weights_of_a_pickle_can_change():
    loaded = torch_ort.load_onnx(model_of(TWO_LAYERS), trainable=False)
    other = pickle.loads(pickle.dumps(loaded))
    other.load_state_dict({**loaded.state_dict(), "second.bias": torch.tensor([5.0, 7.0])})
    x = torch.randn(2, 3)
    torch.testing.assert_close(other(x) - loaded(x), torch.tensor([[4.0, 5.0]] * 2))


def test_in_float64():
    source = MODELS["attention"][0]()
    x = torch.randn(2, 5, 16)
    loaded = torch_ort.load_onnx(export(source, x, {0: "batch", 1: "length"}, 17)).double()
    torch.testing.assert_close(loaded(x.double()), source.double()(x.double()), rtol=1e-5, atol=0)


# ---- names, and what is trained

WEIGHTS = {"first.weight", "second.weight", "second.bias"}


@pytest.mark.parametrize(
    ("trainable", "want"),
    [
        (True, WEIGHTS),
        (False, set()),
        ("second.*", {"second.weight", "second.bias"}),
        (["*.bias", "first.weight"], {"second.bias", "first.weight"}),
        (lambda name, tensor: tensor.ndim == 2, {"first.weight", "second.weight"}),
    ],
    ids=["all", "none", "pattern", "patterns", "function"],
)
def test_what_is_trained(trainable, want):
    loaded = torch_ort.load_onnx(model_of(TWO_LAYERS), trainable)
    assert {name for name, _ in loaded.named_parameters()} == want
    assert {name for name, _ in loaded.named_buffers() if "constant" not in name} >= WEIGHTS - want
    assert loaded.state_dict().keys() == WEIGHTS
    loaded(torch.ones(5, 3)).sum().backward() if want else loaded(torch.ones(5, 3))
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_a_pattern_that_matches_nothing():
    with pytest.raises(
        UserError,
        match=r"load_onnx: trainable: 'third\.\*' matches no weight; there are first\.weight, "
        r"second\.bias, second\.weight$",
    ):
        torch_ort.load_onnx(model_of(TWO_LAYERS), ["first.*", "third.*"])


def test_numbers_and_statistics_are_not_trained():
    model = model_of("""(float[N, 3] y)
    <float[3] scale = {1, 2, 3}, float[3] shift = {1, 1, 1}, float[3] mean = {0, 1, 0},
     float[3] var = {1, 2, 1}, float factor = {0.5}> {
      n = BatchNormalization(x, scale, shift, mean, var)
      y = Mul(n, factor)
    }""")
    loaded = torch_ort.load_onnx(model)
    assert {name for name, _ in loaded.named_parameters()} == {"scale", "shift"}
    assert {"mean", "var"} <= {name for name, _ in loaded.named_buffers()}


def test_names_that_modules_have_taken():
    model = model_of("""(float[N, 3] y)
    <float[3] forward = {1, 2, 3}, float[3] training = {1, 1, 1}, float[3] a__forward = {2, 2, 2}> {
      h = Mul(x, forward)
      g = Add(h, training)
      y = Add(g, a__forward)
    }""")
    loaded = torch_ort.load_onnx(model)
    assert loaded.onnx_names == {
        "forward_": "forward", "training_": "training", "a.forward_": "a.forward",
    }  # fmt: skip
    torch.testing.assert_close(loaded(torch.ones(1, 3)), torch.tensor([[4.0, 5.0, 6.0]]))


def test_names_that_collide():
    model = model_of("""(float[N, 3] y) <float[3] a = {1, 2, 3}, float[3] a__b = {1, 1, 1}> {
      h = Mul(x, a)
      y = Add(h, a__b)
    }""")
    with pytest.raises(
        UserError, match=r"initializer 'a\.b': another one needs the attribute 'a\.b' or a part of"
    ):
        torch_ort.load_onnx(model)


def test_names_of_inputs_and_several_outputs():
    model = model_of(
        """(float[N, 3] total, float[N, 3] product) {
          total = Add(in__1, class)
          product = Mul(in__1, class)
        }""",
        "float[N, 3] in__1, float[N, 3] class",
    )
    loaded = torch_ort.load_onnx(model)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(loaded(in_1=x, input_class=y), (x + y, x * y), rtol=0, atol=0)
    torch.testing.assert_close(loaded(x, y)[1], x * y, rtol=0, atol=0)


# ---- sizes


def test_sizes_that_are_computed():
    model = model_of(
        """(float[M, 2] y) <int64[1] last = {-1}, int64[1] zero = {0}, int64 one = {1},
        int64[1] two = {2}> {
          shape = Shape(x)
          length = Gather(shape, one)
          half = Div(length, two)
          part = Slice(x, zero, half, last)
          rest = Concat<axis = 0>(last, two)
          y = Reshape(part, rest)
        }""",
        "float[N, L] x",
    )
    loaded = torch_ort.load_onnx(model)
    for rows, length in ((2, 8), (3, 5), (4, 12)):
        x = torch.randn(rows, length)
        want = x[:, : length // 2].reshape(-1, 2)
        torch.testing.assert_close(loaded(x), want, rtol=0, atol=0)


def test_sizes_that_data_decides(tmp_path: Path):
    options = {"save_onnx": True, "onnx_prefix": str(tmp_path / "m")}
    with torch.no_grad():
        torch.compile(lambda x: x[x > 0] * 2, backend="ort", options=options)(torch.randn(3, 4))
    (path,) = tmp_path.glob("*_captured.onnx")
    loaded = torch_ort.load_onnx(path)
    for x in (torch.randn(3, 4), torch.ones(3, 4), -torch.ones(3, 4)):
        torch.testing.assert_close(loaded(x), x[x > 0] * 2, rtol=0, atol=0)


# ---- where models come from


def test_a_path_with_external_data(tmp_path: Path):
    model = model_of(TWO_LAYERS)
    for each in model.graph.initializer:  # as bytes, which alone can stand elsewhere
        each.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(each), each.name))
    want = torch_ort.load_onnx(model)(torch.ones(2, 3))
    path = tmp_path / "net.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="net.data")
    for given in (path, str(path)):
        torch.testing.assert_close(torch_ort.load_onnx(given)(torch.ones(2, 3)), want)
    (tmp_path / "net.data").unlink()
    with pytest.raises(UserError, match=r"'net\.data'"):
        torch_ort.load_onnx(path)


def test_what_is_no_model(tmp_path: Path):
    with pytest.raises(TypeError, match="load_onnx: model: got int, want a path, bytes or a Model"):
        torch_ort.load_onnx(3)
    with pytest.raises(UserError, match="onnx"):
        torch_ort.load_onnx(b"no model")
    with pytest.raises(FileNotFoundError):
        torch_ort.load_onnx(tmp_path / "none.onnx")


def test_what_cannot_be_loaded():
    private = model_of("(float[N, 3] y) { y = mine.Twice(x) }", domains='"" : 20, "mine" : 1')
    with pytest.raises((Unsupported, UserError), match=r"mine\.Twice"):
        torch_ort.load_onnx(private)


def test_a_training_graph_is_refused(tmp_path: Path):
    prefix = str(tmp_path / "m")
    options = {"save_onnx": True, "onnx_prefix": prefix}
    model = torch.compile(nn.Linear(3, 2), backend="ort", options=options)
    model(torch.randn(4, 3)).sum().backward()
    (path,) = tmp_path.glob("*_captured.onnx")
    with pytest.raises(Unsupported, match="training graph"):
        torch_ort.load_onnx(path)


def test_sizes_that_are_others_than_those_of_the_file():
    model = model_of(
        """(float[2, 4, 3] y) <float[4] scale = {1, 2, 3, 4}, float[4] shift = {0, 1, 0, 1}> {
          y = GroupNormalization <num_groups = 2> (x, scale, shift)
        }""",
        "float[2, 4, 3] x",
        domains='"" : 21',
    )
    loaded = torch_ort.load_onnx(model)
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(loaded(x), by_onnxruntime(model.SerializeToString(), x=x))
    with pytest.raises(RuntimeError, match="Expected weight to be a vector"):
        loaded(torch.randn(2, 2, 3))


@pytest.mark.parametrize("road", ["eager", "ort", "ortmodule"])
def test_a_size_that_divides_by_another_one(road):
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 20]>
    net (float[N] x, float[K] w) => (float[M, K] y) <int64[1] rest = {-1}> {
      size = Shape(w)
      sizes = Concat <axis = 0> (rest, size)
      rows = Reshape(x, sizes)
      y = Mul(rows, w)
    }""")
    loaded = torch_ort.load_onnx(model)
    call = torch_ort.ORTModule(loaded) if road == "ortmodule" else loaded
    if road == "ort":
        call = torch.compile(loaded, backend="ort", dynamic=True)
    x = torch.randn(12, requires_grad=True)
    for columns in (3, 4):
        w = torch.randn(columns)
        y = call(x, w)
        torch.testing.assert_close(y, x.reshape(-1, columns) * w)
        torch.testing.assert_close(
            *(
                torch.autograd.grad(each.square().sum(), x)
                for each in (y, x.reshape(-1, columns) * w)
            )
        )
    if road == "eager":
        with pytest.raises(UserError, match="a size of the model: got a division by 0"):
            call(x, torch.randn(0))


@pytest.mark.parametrize("layout", [0, 1])
def test_the_sizes_of_recurrent_layers_are_found_by_one_position(layout, monkeypatch):
    first, states = ("B, L", "[B, 1, 4]") if layout else ("L, B", "[1, B, 4]")
    result = "[B, L, 1, 4]" if layout else "[L, 1, B, 4]"
    model = onnx.parser.parse_model(f"""
    <ir_version: 10, opset_import: ["" : 20]>
    net (float[{first}, 3] x, float[1, 16, 3] w, float[1, 16, 4] r)
      => (float{result} y, float{states} h, float{states} c) {{
      y, h, c = LSTM <hidden_size = 4, layout = {layout}> (x, w, r)
    }}""")
    lengths, theirs = [], torch.lstm

    def counted(x, *others):
        lengths.append(len(x))
        return theirs(x, *others)

    monkeypatch.setattr(torch, "lstm", counted)
    loaded = torch_ort.load_onnx(model)
    assert set(lengths) == {1}
    sizes = (2, 5, 3) if layout else (5, 2, 3)
    y, h, _ = loaded(torch.randn(sizes), torch.randn(1, 16, 3), torch.randn(1, 16, 4))
    assert y.shape == ((2, 5, 1, 4) if layout else (5, 1, 2, 4))
    torch.testing.assert_close(h.flatten(), (y[:, -1] if layout else y[-1]).flatten())


def test_inputs_that_are_missing_and_too_many():
    for nodes, words in (
        ('y = Celu("")', "Celu: input 0, 'x': got none, want one"),
        ("y = GridSample(x)", "GridSample: input 1, 'grid': got none, want one"),
        ("y = Celu(x, x)", "Celu: inputs: got 2, want at most 1"),
    ):
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : 20]> net (float[2, 3] x) => (float[2, 3] y)'
            f" {{ {nodes} }}"
        )
        with pytest.raises(UserError, match=words):
            torch_ort.load_onnx(model)


def test_kernels_that_check_nothing_are_refused():
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 20, "org.pytorch.aten" : 1]>
    net (float[3, 4] g, float[3, 4] y) => (float[3, 4] x) {
      x = org.pytorch.aten.ATen <operator = "aten::_softmax_backward_data", overload_name = "",
        tensor_args = ["grad_output", "output"], dim = 1, input_dtype = "float32"> (g, y)
    }""")
    with pytest.raises(
        Unsupported, match="_softmax_backward_data: want an operator that checks its arguments"
    ):
        torch_ort.load_onnx(model)


@pytest.mark.parametrize("name", ["value", "value__weight", "onnx_names", "onnx_file", "graph"])
def test_names_of_weights_that_the_module_has_itself(name: str):
    model = model_of(f"(float[N, 3] y) <float[3] {name} = {{1, 2, 3}}> {{ y = Mul(x, {name}) }}")
    loaded = torch_ort.load_onnx(model)
    assert [*loaded.onnx_names.values()] == [name.replace("__", ".")]
    assert loaded(torch.ones(1, 3)).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("name", ["torch", "device", "getattr", "self"])
def test_names_of_inputs_that_code_uses(name: str):
    model = model_of(f"(float[N, 3] y) {{ y = Celu({name}) }}", f"float[N, 3] {name}")
    torch.testing.assert_close(torch_ort.load_onnx(model)(torch.ones(1, 3)), torch.ones(1, 3))


def test_a_pickle_of_a_module_with_an_integer_that_is_a_size():
    model = model_of(
        """(float[K, M] y) <int64[1] rest = {-1}, int64[1] zero = {0}> {
          rows = Unsqueeze(k, zero)
          shape = Concat <axis = 0> (rows, rest)
          y = Reshape(x, shape)
        }""",
        "int64 k, float[N] x",
    )
    loaded = torch_ort.load_onnx(model)
    for each in (loaded, pickle.loads(pickle.dumps(loaded))):
        assert each(torch.tensor(2), torch.arange(6.0)).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_floats_of_8_bits_are_not_trained():
    model = model_of("""(float[N, 3] y) <float scale = {0.5}> {
      d = DequantizeLinear(w, scale)
      y = Mul(x, d)
    }""")
    data = torch.tensor([1.0, 2.0, 3.0]).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    tensor = onnx.helper.make_tensor("w", 17, [3], data.tobytes(), raw=True)
    model.graph.initializer.append(tensor)
    loaded = torch_ort.load_onnx(model)
    assert not list(loaded.parameters())
    assert loaded(torch.ones(1, 3)).tolist() == [[0.5, 1.0, 1.5]]


def test_a_file_that_marks_nodes_itself_is_refused():
    model = model_of(
        "(float[N, 3] y) { y = torch_ort.onnx.linear.MatMul(x, x) }",
        domains='"" : 20, "torch_ort.onnx.linear" : 1',
    )
    with pytest.raises(UserError, match="got a domain of this package's"):
        torch_ort.load_onnx(model)
