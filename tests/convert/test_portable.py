"""Graphs on their way into files: ATen nodes spelled out, sizes as nodes, data and names."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.checker
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from conversion import NEWEST, PINS, convert, floats, model_of, text_of
from graph_text import lines, proto, read_body

from torch_ort import _C

X, WEIGHT, BIAS = floats(2, 3, 8), floats(8), floats(8) + 1
HEADS = floats(2, 4, 5, 8), floats(2, 4, 6, 8), floats(2, 4, 6, 8) * 0.3


def attention(**settings):
    return lambda *heads: F.scaled_dot_product_attention(*heads, **settings)


FORMULAS = {
    "gelu": (F.gelu, X),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), X),
    "silu": (F.silu, X),
    "rsqrt": (torch.rsqrt, X.abs() + 0.1),
    "copy of a transpose": (lambda x: x.transpose(0, 1).clone(), X),
    "hardswish": (F.hardswish, 4 * X),
    "mish": (F.mish, X),
    "softmax": (lambda x: x.softmax(1), X),
    "log_softmax": (lambda x: 100 * x.log_softmax(-1), X),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), X, WEIGHT, BIAS),
    "layer_norm without a bias": (lambda x, w: F.layer_norm(x, (8,), w), X, WEIGHT),
    "layer_norm alone, two axes": (lambda x: F.layer_norm(x, (3, 8), eps=0.1), X),
    "attention": (attention(), *HEADS),
    "attention, scale": (attention(scale=0.3), *HEADS),
    "attention, causal": (attention(is_causal=True), *HEADS),
    "attention, more queries": (attention(is_causal=True), HEADS[1], HEADS[0], HEADS[0]),
    "attention, mask": (
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask), *HEADS, floats(5, 6)
    ),
    "places": (lambda x, i, j: x[i, j], X, torch.tensor([[1], [-1]]), torch.tensor([0, -3, 2])),
    "cumsum of truths": (lambda x: (x > 0).cumsum(-1), X),
    "promotion": (lambda x, n: (x + n) / (n * 3), X, torch.tensor([3])),
    "quotient of integers": (lambda x, n: x / n, torch.arange(1, 7), torch.tensor(4)),
}  # fmt: skip
SIZES = {
    "range": lambda x: x[:, 0] + torch.arange(x.shape[0]),
    "range of floats": lambda x: x[:, 0] * torch.arange(x.shape[0], dtype=torch.float32),
    "range by steps": lambda x: torch.arange(1, x.shape[0] * x.shape[1], x.shape[0]),
    "number": lambda x: x * x.shape[0] - x.shape[1],
    "mean": lambda x: x.sum(0) / x.shape[0],
    "window": lambda x: x[x.shape[0] // 2 :, : x.shape[1] - 1].reshape(-1),
    "repeat": lambda x: x.repeat(x.shape[1], 2).view(x.shape[0], -1),
}


def portable(graph: _C.Graph, opset: int) -> _C.Graph:
    graph = graph.clone()
    _C.spell_out(graph, opset)
    _C.expand_sizes(graph)
    graph.verify("test")
    assert _C.spell_out(graph, opset) == _C.expand_sizes(graph) == 0
    return graph


def run_in_onnxruntime(model: onnx.ModelProto, *inputs: torch.Tensor) -> list[torch.Tensor]:
    onnx.checker.check_model(model, full_check=True)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    given = {each.name: x.numpy() for each, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(np.asarray(result)) for result in session.run(None, given)]


def assert_agrees(graph: _C.Graph, pin: int, function, *inputs, rtol=1e-4, atol=1e-5) -> None:
    domains = {node["domain"] for node in graph.nodes()}
    assert domains == {""}, text_of(graph)
    assert _C.required_opset(graph) <= pin
    want = function(*inputs)
    (got,) = run_in_onnxruntime(model_of(graph), *inputs)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("pin", PINS)
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name: str, pin: int) -> None:
    function, *inputs = FORMULAS[name]
    graph = portable(convert(function, *inputs, opset=pin), pin)
    assert_agrees(graph, pin, function, *inputs)


@pytest.mark.parametrize("name", [name for name in FORMULAS if "quotient" not in name])
def test_formulas_in_other_dtypes(name: str) -> None:
    function, *given = FORMULAS[name]
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float16, 5e-3)):
        if dtype == torch.float64 and name in ("gelu", "hardswish", "mish"):
            continue  # onnxruntime has no such kernels
        inputs = [x.to(dtype) if x.is_floating_point() else x for x in given]
        graph = portable(convert(function, *inputs, opset=13), 13)
        assert_agrees(graph, 13, function, *inputs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pin", [12, NEWEST])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_serve_all_inputs(name: str, pin: int) -> None:
    graph = portable(convert(SIZES[name], floats(6, 4), opset=pin, dynamic=True), pin)
    for shape in ((6, 4), (2, 7), (9, 2)):
        assert_agrees(graph, pin, SIZES[name], floats(*shape))


def test_what_has_no_formula_stays() -> None:
    graph = convert(lambda x: F.silu(x).cummax(0).values + x.median(), X, opset=20)
    assert _C.spell_out(graph, 20) == 1
    left = {node["attrs"]["operator"] for node in graph.nodes() if node["op"] == "ATen"}
    assert left == {"aten::cummax", "aten::median"}


def test_an_index_with_a_gap_stays() -> None:
    graph = convert(lambda x, i, j: x[i, :, j], X, torch.tensor([0, 1]), torch.tensor([2, 3]))
    assert _C.spell_out(graph, NEWEST) == 0


def test_attention_with_dropout_stays() -> None:
    graph = convert(attention(dropout_p=0.5), *HEADS, opset=17)
    assert _C.spell_out(graph, 17) == 0


# ---- sizes


def dims_graph(*dims: str, types: str = "float[N,M] x") -> _C.Graph:
    graph = read_body(f"""
        g ({types}) => (int64[{len(dims)}] y)
        {{ [sizes] y = torch_ort.Dims <dims: strings = [{", ".join(f'"{d}"' for d in dims)}]> () }}
    """)
    _C.infer_types(graph)
    return graph


def test_sizes_as_nodes() -> None:
    graph = dims_graph("N", "4", "2*N*M")
    assert _C.expand_sizes(graph) == 1
    graph.verify()
    assert lines(graph) == [
        "x_shape = Shape(x)",
        "N = Gather(x_shape, ints)",
        "M = Gather(x_shape, ints_3)",
        "size = Mul(M, N)",
        "size_1 = Mul(ints_2, size)",
        "y = Concat(N, ints_1, size_1)",
    ]


EXPRESSIONS = [
    "N + M - 3", "-N", "N // M", "(1 - N) // 2", "(1 - N) % 3", "N % M", "N**M", "min(N, 3)",
    "max(N, M) + min(N, M)", "N*M // 2 + 1", "(N + 1) // 2*M",
]  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions(text: str) -> None:
    graph = dims_graph(text, "7", text)
    assert _C.expand_sizes(graph) == 1
    for n, m in ((5, 2), (2, 5), (1, 1), (8, 3)):
        value = _C.testing.dim_evaluate(text, {"N": n, "M": m})
        (got,) = run_in_onnxruntime(proto(graph, 12), torch.zeros(n, m))
        assert got.tolist() == [value, 7, value]


def test_equal_sizes_are_computed_once() -> None:
    graph = read_body("""
        g (float[N] x) => (int64[1] y, int64[2] z)
        {
           y = torch_ort.Dims <dims: strings = ["N // 2"]> ()
           z = torch_ort.Dims <dims: strings = ["N // 2", "N"]> ()
        }
    """)
    assert _C.expand_sizes(graph) == 2
    ops = [node["op"] for node in graph.nodes()]
    assert sorted(ops) == ["Concat", "Div", "Gather", "Mod", "Shape", "Sub"]


@pytest.mark.parametrize("text", ["N == 3", "U + N", "min(N, N < 4)"])
def test_sizes_that_no_node_says_stay(text: str) -> None:
    graph = dims_graph("N", text)
    assert _C.expand_sizes(graph) == 0
    assert [node["op"] for node in graph.nodes()] == ["Dims"]


def test_symbols_that_no_shape_tells_become_inputs() -> None:
    model = proto(dims_graph("N", "K", types="float[N] x"))
    model.graph.metadata_props.add(key="symbol_inputs", value="N,K,L")
    graph = _C.Graph.from_onnx(model.SerializeToString())
    assert _C.expand_sizes(graph) == 1
    assert graph.input_names == ["x", "K"]
    assert graph.symbol_inputs == ["L"]
    (got,) = run_in_onnxruntime(proto(graph), torch.zeros(4), torch.tensor(9))
    assert got.tolist() == [4, 9]


# ---- data and names


PAIR = """
g (float[2] a, float[2] b, float[2] c) => (float[2] y)
<float[2] s>
{
   s = Add (a, b)
   y = Mul (s, c)
}
"""


def test_inputs_get_data() -> None:
    graph = read_body(PAIR)
    values = torch.tensor([[1.0, 2], [3, 4]])
    # Not as they lie in memory, but as they read.
    _C.give_data(graph, {"a": values[:, 1], "c": values.t()[0]})
    graph.verify()
    assert (graph.input_names, graph.initializer_names) == (["b"], ["a", "c"])
    (got,) = _C.run(graph, {"b": torch.tensor([10.0, 20])}).values()
    assert got.tolist() == [12, 72]


def test_data_goes_to_no_value_that_has_it_or_is_made() -> None:
    graph = read_body(PAIR)
    with pytest.raises(_C.InternalError, match="files: no value 'z'"):
        _C.give_data(graph, {"z": torch.ones(2)})
    words = "edit: value 's' gets data: want an input, or an initializer without"
    with pytest.raises(_C.InternalError, match=words):
        _C.give_data(graph, {"s": torch.ones(2)})


def test_values_take_names_from_others() -> None:
    graph = read_body(PAIR)
    _C.take_names(graph, {"a": "b", "b": "s", "c": "c", "gone": "y"})
    graph.verify()
    assert graph.input_names == ["b", "s", "c"]
    assert lines(graph) == ["s_1 = Add(b, s)", "y = Mul(s_1, c)"]
