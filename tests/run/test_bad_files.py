"""Files whose metadata is wrong: the engine says so, and reads and writes no memory but its own."""

from __future__ import annotations

import contextlib
import pathlib

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import pytest
import torch

import torch_ort
from torch_ort import _C

pytestmark = pytest.mark.ort_only

HEAD = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1, "torch_ort" : 1, '
HEAD += '"org.pytorch.aten" : 1]>'
# No rule tells what an operator of PyTorch gives, so what a file says of it stands.
EXP = 'org.pytorch.aten.ATen <operator="aten::exp", overload_name="", tensor_args=["self"]>'
# Without `t`, the reshape is no view: it copies what a kernel has written before.
VIEW = """
    g (float[2,3] x) => (float[6] y) <int64[1] six = {6}, float[2,3] e, float[3,2] t, float[6] r>
    { e = Exp (x)  t = Transpose (e)  r = Reshape (t, six)  y = Exp (r) }
"""
REGION = """
    g (float[2,3] x) => (float[2,3] y) {
        y = torch_ort.Region <rows = 2, columns = 3, spaces = ["full"],
            body = body (float[2,3] a) => (float[2,3] b) { b = Exp (a) }> (x)
    }
"""
LOOKUP = """
    g (float[2,3] x, int64[4] z) => (float[4,3] y) {
        y = torch_ort.Region <rows = 4, columns = 3, spaces = ["table", "ids"],
            body = body (float[2,3] a, int64[4] i) => (float[4,3] b) { b = Gather (a, i) }> (x, z)
    }
"""


def read(text: str, strides: dict[str, str] | None = None) -> _C.Graph:
    model = onnx.parser.parse_model(HEAD + text)
    graph = model.graph
    for value in (*graph.value_info, *graph.input, *graph.output):
        if value.name in (strides or {}):
            value.metadata_props.add(key="strides", value=strides[value.name])
    return _C.Graph.from_onnx(model.SerializeToString())


def run(text: str, strides: dict[str, str] | None = None, **inputs: torch.Tensor) -> torch.Tensor:
    graph = read(text, strides)
    return _C.run(graph, inputs or {"x": torch.arange(6.0).reshape(2, 3)})["y"]


def test_right_strides_change_nothing() -> None:
    want = torch.arange(6.0).reshape(2, 3).exp().T.reshape(6).exp()
    torch.testing.assert_close(run(VIEW, {"t": "[1,3]"}), want)


def test_a_reshape_whose_strides_no_rule_can_tell() -> None:
    # With symbols it is row-major by its type, and could be a view with other strides.
    text = """
        g (float[N,6] x) => (float[6,N] y) <int64[2] to = {6, -1}>
        { e = Exp (x)  t = Transpose (e)  r = Reshape (t, to)  s = Tanh (r)  y = Neg (s) }
    """
    x = torch.randn(3, 6)
    torch.testing.assert_close(run(text, x=x), -x.exp().T.tanh())


@pytest.mark.parametrize("strides", ["[2,1]", "[0,0]", "[1,0]", "[1,4]"])
def test_strides_that_a_view_has_not(strides: str) -> None:
    got, want = r"\[3, 2\] with strides \[1, 3\]", strides.replace(",", ", ")
    want = want.replace("[", r"\[").replace("]", r"\]")
    words = rf"run: value 't': got Float{got}, want Float\[3, 2\] with strides {want} as its type"
    with pytest.raises(torch_ort.UserError, match=words):
        run(VIEW, {"t": strides})


@pytest.mark.parametrize("name", ["t", "e", "y"])
@pytest.mark.parametrize("stride", [-1, 2**62, 2**63 - 1])
def test_strides_that_no_tensor_has(name: str, stride: int) -> None:
    strides = f"[{stride}]" if name == "y" else f"[{stride},1]"
    words = (
        f"run: value '{name}': got Float.* with strides .*{stride}.*, want sizes and strides from 0"
    )
    with pytest.raises(torch_ort.UserError, match=words):
        run(VIEW, {name: strides})


def test_initializers_get_the_strides_that_they_should_have() -> None:
    text = """
        g () => (float[2,3] y) <float[3,2] w = {1, 2, 3, 4, 5, 6}, float[2,3] t, float[3,2] w_type>
        { t = Transpose (w)  y = Neg (t) }
    """
    model = onnx.parser.parse_model(HEAD + text)
    for value in model.graph.value_info:
        if value.name == "w_type":
            value.name = "w"
            value.metadata_props.add(key="strides", value="[1,3]")
    results = _C.run(_C.Graph.from_onnx(model.SerializeToString()), {})
    torch.testing.assert_close(results["y"], -torch.tensor([[1.0, 3, 5], [2, 4, 6]]))


@pytest.mark.parametrize(("name", "strides"), [("t", "[1]"), ("y", "[1,1]"), ("six", "[1,1]")])
def test_a_number_of_strides_that_is_not_that_of_the_dims(name: str, strides: str) -> None:
    text = VIEW.replace("float[2,3] e", "float[2,3] e, int64[1] six_type")
    model = onnx.parser.parse_model(HEAD + text)
    for value in (*model.graph.value_info, *model.graph.output):
        value.name = value.name.removesuffix("_type")
        if value.name == name:
            value.metadata_props.add(key="strides", value=strides)
    words = f"onnx: type of value '{name}': got {strides.count(',') + 1} strides, want"
    with pytest.raises(torch_ort.UserError, match=words):
        _C.Graph.from_onnx(model.SerializeToString())


@pytest.mark.parametrize("size", [2**58, 2**62])
def test_sizes_that_fit_in_no_memory(size: int) -> None:
    text = VIEW.replace("float[2,3] e", f"float[{size},{size}] e")
    with pytest.raises(torch_ort.UserError, match=f"dim: overflow: got {size} . {size}, want"):
        run(text)
    text = f"g (float[2] x) => (float[2] y) <float[N] e> {{ e = {EXP} (x)  y = {EXP} (e) }}"
    words = (
        rf"run: value 'e': got Float\[{size}\] with strides \[1\], want sizes and strides from 0"
    )
    with pytest.raises(torch_ort.UserError, match=words):
        run(text.replace("N", f"{size}"), x=torch.zeros(2))


def test_a_result_of_another_size_than_its_type_says() -> None:
    words = r"aten::exp.out \(y\): result 0: got \[2, 3\] .*, want \[2, 4\] "
    with pytest.raises(torch_ort.UserError, match=words):
        run(f"g (float[2,3] x) => (float[2,4] y) {{ y = {EXP} (x) }}")


def test_a_view_of_another_size_than_its_type_says() -> None:
    """No rule tells that the sizes differ before N is known."""
    text = """
        g (float[N,6] x) => (float[6,N] y, float[N,6] z)
            <float[N,6] e, float[6,N] t, float[6,"99*N*N"] v, float["6*N"] f, float["6*N"] d>
        {
            e = Exp (x)  t = Transpose (e)  six = Constant <value_ints = [-1]> ()
            f = Reshape (t, six)  d = com.microsoft.YieldOp (f)
            v = Transpose (e)  y = Mul (v, v)  z = Mul (e, e)
        }
    """
    words = r"value 'v': got Float\[6, 3\] .*, want Float\[6, 891\] .* as its type says"
    with pytest.raises(torch_ort.UserError, match=words):
        run(text, x=torch.zeros(3, 6), d=torch.zeros(18))


def test_inputs_of_sizes_that_one_symbol_cannot_have() -> None:
    model = onnx.parser.parse_model(
        HEAD + "g (float[N] x, float[M] z) => (float[N] y) { y = Exp (x) }"
    )
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "2*N"
    graph = _C.Graph.from_onnx(model.SerializeToString())
    _C.run(graph, {"x": torch.zeros(3), "z": torch.zeros(6)})
    with pytest.raises(torch_ort.UserError, match=r"input 'z': dim 0: got 5, want 6 as '2\*N' is"):
        _C.run(graph, {"x": torch.zeros(3), "z": torch.zeros(5)})
    text = "g (float[N] x, float[N] z) => (float[N] y) { y = Add (x, z) }"
    with pytest.raises(torch_ort.UserError, match="input 'z': dim 0: got 5, want 3 as 'N' is"):
        run(text, x=torch.zeros(3), z=torch.zeros(5))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rows = 2", "rows = 1000", "want it and its operands to stand in 1000 rows of 3 columns"),
        ("rows = 2", "rows = -2", "want it and its operands to stand in -2 rows of 3 columns"),
        ('["full"]', '["scalar"]', "space of 'a': got scalar, want full as it is read"),
        ("Exp (a)", 'Exp ("")', "Exp: input 0 is missing"),
        ("Exp (a)", "Add (a)", "Add: inputs of node 'b': got 1, want at least 2"),
        ("Exp (a)", "Transpose (a)", "file: node 'y': Region: no instruction for Transpose"),
        ("(float[2,3] y)", "(uint16[2,3] y)", "Region: got an operand of uint16"),
        ("(float[2,3] a)", "(double[2,3] a)", r"body: got float64\[2,3\], want float32\[2,3\] as"),
        ("(float[2,3] a)", "(float[3,2] a)", r"want it and its operands to stand in 2 rows of 3"),
        ("> (x)", '> ("")', "torch_ort.Region: input 0 is missing"),
    ],
)
def test_regions_that_do_not_fit_their_operands(old: str, new: str, words: str) -> None:
    text = REGION.replace(old, new)
    assert text != REGION
    with pytest.raises(torch_ort.Error, match=words):
        run(text)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('["table", "ids"]', '["column", "ids"]',
         "space of 'a': got column, want table as it is read"),
        ('["table", "ids"]', '["table", "row"]', "space of 'i': got row, want ids as it is read"),
        ('["table", "ids"]', '["ids", "table"]', "space of 'a': got ids, want table as it is read"),
        ("Gather (a, i)", "Exp (a)",
         r"node 'b': got a result of \[4,3\], want it and its operands"),
        ("rows = 4", "rows = 5", "want it and its operands to stand in 5 rows of 3 columns"),
        ("columns = 3", "columns = 2", "to stand in 4 rows of 2 columns"),
    ],
)  # fmt: skip
def test_lookups_that_do_not_fit_their_operands(old: str, new: str, words: str) -> None:
    text = LOOKUP.replace(old, new)
    assert text != LOOKUP
    given = {"x": torch.randn(2, 3), "z": torch.tensor([0, 1, 1, 0])}
    torch.testing.assert_close(run(LOOKUP, **given), given["x"][given["z"]])
    with pytest.raises(torch_ort.Error, match=words):
        run(text, **given)


def test_a_table_of_embeddings_that_is_not_row_major() -> None:
    text = """
        g (float[4,3] x, int64[4] z) => (float[5,3] y) { y = torch_ort.EmbeddingGrad (x, z) }
    """
    given = {"x": torch.ones(4, 3), "z": torch.tensor([0, 4, 4, 1])}
    want = torch.zeros(5, 3).index_add(0, given["z"], given["x"])
    torch.testing.assert_close(run(text, **given), want)
    for changed, strides in ((text, {"y": "[1,5]"}), (text.replace("int64[4]", "int64[2,2]"), {})):
        given["z"] = given["z"].reshape(2, 2) if strides == {} else given["z"]
        with pytest.raises(torch_ort.UserError, match="EmbeddingGrad: the operands do not fit"):
            run(changed, strides, **given)


TAKE = """
    g (float[2,3] x, int64[4] z) => (float[2,4] y) { y = torch_ort.Take <axis = 1> (x, z) }
"""
TAKE_GRAD = """
    g (float[2,4] x, int64[4] z) => (float[2,3] y) { y = torch_ort.TakeGrad <axis = 1> (x, z) }
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("axis = 1", "axis = 2", "got axis 2 of 2 dims"),
        ("axis = 1", "axis = -1", "got axis -1 of 2 dims"),
        ("axis = 1", "axis = 0", "the operands do not fit together"),
        ("float[2,3]", "float[2,2,3]", "the operands do not fit together"),
        ("float[2,4]", "float[2,5]", "the operands do not fit together"),
        ("float[2,3]", "double[2,3]", "the operands do not fit together"),
        ("int64[4] z", "double[4] z", "dtype of the places: got float64, want int64 or int32"),
    ],
)
@pytest.mark.parametrize("op", ["Take", "TakeGrad"])
def test_places_that_do_not_fit_their_operands(op: str, old: str, new: str, words: str) -> None:
    text, z = {"Take": TAKE, "TakeGrad": TAKE_GRAD}[op], torch.tensor([0, 1, 2, 0])
    graph = read(text.replace(old, new))
    dtype, sizes = graph.types()["x"][:2]
    x = torch.zeros([int(size) for size in sizes], dtype=getattr(torch, dtype))
    z = z.to(getattr(torch, graph.types()["z"][0]))
    with pytest.raises(torch_ort.UserError, match=f"file: node 'y': {op}: {words}"):
        _C.run(graph, {"x": x, "z": z})


LOOKUPS = """
    g (float[3,2] a, float[4,2] b, int64[2] i) => (float[2,4] y) {
      y = torch_ort.Lookups <axis = 1, tables = [1, 1]> (a, i, b, i)
    }
"""
GRADS = """
    g (float[2,2] a, float[2,2] b, int64[2] i) => (float[3,2] y, float[4,2] z) {
      y, z = torch_ort.EmbeddingGrads <padding_idxs = [-1, -1]> (a, i, b, i)
    }
"""
DEPTHWISE = """
    g (float[1,1,2,2] a, float[1,1,4,4] b, int64[2] i) => (float[1,1,3,3] y) {
      y = torch_ort.DepthwiseWeightGrad <strides = [1, 1], pads = [0, 0], dilations = [1, 1]> (a, b)
    }
"""


@pytest.mark.parametrize(
    ("text", "old", "new", "words"),
    [
        (LOOKUPS, "axis = 1", "axis = 2", "Lookups: got axis 2 of a result of 2 dims"),
        (LOOKUPS, "[1, 1]", "[1, 0]", "Lookups: got a part of 8 float32, want 2 rows"),
        (LOOKUPS, "[1, 1]", "[1, 1, 1]", "Lookups: got 4 inputs, want one for each part"),
        (LOOKUPS, "float[2,4]", "float[2,5]", "Lookups: got parts of 4 columns, want 5"),
        (GRADS, "[-1, -1]", "[-1]", "EmbeddingGrads: got 4 inputs and 1 paddings for 2 tables"),
        (GRADS, "float[3,2] y", "float[3,3] y", "EmbeddingGrad: the operands do not fit"),
        (GRADS, "(a, i, b, i)", "(a, i, b)", "EmbeddingGrads: got 3 inputs and 2 paddings"),
        (DEPTHWISE, "pads = [0, 0]", "pads = [0]", "pads: got 1 numbers, want 2"),
        (DEPTHWISE, "pads = [0, 0]", "pads = [0, 4]", "pads: got 4, want at most the 3 pixels"),
        (DEPTHWISE, "float[1,1,3,3]", "float[1,2,3,3]", "the operands do not fit together"),
    ],
)
def test_kernels_that_do_not_fit_their_operands(text: str, old: str, new: str, words: str) -> None:
    def inputs(graph: _C.Graph) -> dict[str, torch.Tensor]:
        return {
            name: torch.zeros([int(size) for size in sizes], dtype=getattr(torch, dtype))
            for name, (dtype, sizes, *_) in graph.types().items()
            if name in ("a", "b", "i")
        }

    whole, changed = read(text), read(text.replace(old, new))
    _C.run(whole, inputs(whole))
    with pytest.raises(torch_ort.UserError, match=words):
        _C.run(changed, inputs(changed))


@pytest.mark.parametrize("place", [3, -1, 2**62])
def test_places_that_do_not_exist(place: int) -> None:
    z = torch.tensor([0, place, 2, 0])
    with pytest.raises(RuntimeError, match=f"out of DATA bounds, id={place} axis_dim=3"):
        run(TAKE, x=torch.randn(2, 3), z=z)
    with pytest.raises(RuntimeError, match=f"index {place} is out of bounds for dimension 1"):
        run(TAKE_GRAD, x=torch.randn(2, 4), z=z)


def test_attributes_and_inputs_that_name_nothing() -> None:
    x = torch.randn(4)
    text = "g (float[4] x) => (float[2] y) { y, z = Split <num_outputs = 1099511627776> (x) }"
    with pytest.raises(torch_ort.UserError, match="Split: outputs: got 2, want 1099511627776"):
        run(text, x=x)
    text = "g (float[4] x) => (float[2,2] y) <int64[2] to = {2, -9}> { y = Reshape (x, to) }"
    with pytest.raises(torch_ort.UserError, match="Reshape: size at 1: got -9, want -1 or more"):
        run(text, x=x)
    text = """
        g (float[4] x) => (float[4] y) { a = Exp (x)  d = com.microsoft.YieldOp ("")  y = Exp (x) }
    """
    with pytest.raises(torch_ort.UserError, match="YieldOp 'd': an input is left out"):
        run(text, x=x)


@pytest.mark.parametrize(("length", "works"), [(900, True), (20_000, False)])
def test_a_long_way_to_a_size(length: int, works: bool) -> None:
    model = onnx.parser.parse_model(
        HEAD + "g (float[N,2] x) => (float[A,B] y) { s0 = Shape (x)  y = Expand (x, s0) }"
    )
    steps = [onnx.helper.make_node("Identity", [f"s{i}"], [f"s{i + 1}"]) for i in range(length)]
    model.graph.node[1].input[1] = f"s{length}"
    last = model.graph.node.pop()
    model.graph.node.extend([*steps, last])
    graph = _C.Graph.from_onnx(model.SerializeToString())
    x = torch.ones(3, 2)
    if works:
        torch.testing.assert_close(_C.run(graph, {"x": x})["y"], x)
        return
    with pytest.raises(torch_ort.Unsupported, match=f"'s{length}' depends on data"):
        _C.run(graph, {"x": x})


# ---- what every node of a file is held to


def of_node(node: str, **inputs: str) -> str:
    given = ", ".join(f"{kind} {name}" for name, kind in inputs.items())
    return f"g ({given}) => (y) {{ y = {node} }}"


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ('HardSigmoid ("")', "HardSigmoid: input 0 is missing"),
        ("HardSigmoid ()", "HardSigmoid: inputs of node 'y': got 0, want at least 1"),
        ("Gather (x)", "Gather: inputs of node 'y': got 1, want at least 2"),
        ('Concat <axis = 0> (x, "")', "Concat: input 1 is missing"),
        ('Max (x, "")', "Max: input 1 is missing"),
        ("Concat (x, x)", "Concat: attributes of node 'y': got too few, want 'axis'"),
        ("Exp <alpha = 1.0> (x)", "Exp: attributes of node 'y': got 'alpha', want none"),
        ("Elu <alfa = 1.0> (x)", "Elu: attributes of node 'y': got 'alfa', want alpha"),
        ("Elu <alpha = 1> (x)", "Elu: attribute 'alpha' of node 'y': got .*, want a float"),
        ("Softmax <axis = 0.5> (x)", "attribute 'axis' of node 'y': got .*, want an integer"),
        ("Softmax <axis = [1]> (x)", "attribute 'axis' of node 'y': got .*, want an integer"),
        ('Softmax <axis = "N"> (x)', "attribute 'axis' of node 'y': got .*, want an integer"),
        ("Transpose <perm = 1> (x)", "attribute 'perm' of .*: got .*, want a list of integers"),
        ("Cast <to = 99> (x)", "Cast: to: got 99, want the number of a data type"),
        ("Cast <to = -1> (x)", "Cast: to: got -1, want the number of a data type"),
        ("Gelu <approximate = 2> (x)", "attribute 'approximate' of node 'y': .*, want a string"),
        ("ConstantOfShape <value = 2> (x)", "attribute 'value' of node 'y': .*, want a tensor"),
        ("torch_ort.Dims <dims = 2> ()", "attribute 'dims' of node 'y': .* want a list of sizes"),
        ("MaxPool <kernel_shape = [0, 2]> (x)", "MaxPool: kernel_shape: got 0, want 1 to"),
        ("MaxPool <kernel_shape = [2, 2], strides = [0, 1]> (x)", "strides: got 0, want 1 to"),
        ("MaxPool <kernel_shape = [2, 2], pads = [-1, 0, 0, 0]> (x)", "pads: got -1, want 0 to"),
        ("Conv <group = 0> (x, x)", "group: got 0, want 1 to"),
        ("Conv <kernel_shape = [3, 2]> (x, x)", "kernel_shape: got other sizes than those of the"),
        ("Gather (x, x)", "Gather: dtype of the indices: got float32, want int64 or int32"),
    ],
)
def test_nodes_that_are_not_as_their_ops_are(node: str, words: str) -> None:
    text = of_node(node, x="float[2,3,4,5]").replace("(y)", "(float[2,3,4,5] y)", 1)
    with pytest.raises(torch_ort.UserError, match=words):
        run(text.replace("(float[2,3,4,5] y) {", "(y) {"), x=torch.ones(2, 3, 4, 5))


def test_attributes_of_older_opsets_are_named_by_the_opset() -> None:
    text = HEAD.replace('"" : 20', '"" : 6') + of_node("Add <axis = 0> (x, x)", x="float[2]")
    model = onnx.parser.parse_model(text.replace("(y)", "(float[2] y)"))
    graph = _C.Graph.from_onnx(model.SerializeToString())
    with pytest.raises(torch_ort.Unsupported, match="Add: opset of the graph: got 6, want 7 or"):
        _C.run(graph, {"x": torch.ones(2)})


def test_shape_of_nothing() -> None:
    model = onnx.parser.parse_model(HEAD + "g (float[2] x) => (float[2] y) { y = Exp (x) }")
    model.graph.node.append(onnx.helper.make_node("Shape", ["x"], [""]))
    with pytest.raises(torch_ort.UserError, match=r"Shape: outputs of node .*got 1 left out of 1"):
        _C.Graph.from_onnx(model.SerializeToString())
    model.graph.node[1].output.pop()
    with pytest.raises(torch_ort.UserError, match=r"Shape: outputs of node .*got 0 left out of 0"):
        _C.Graph.from_onnx(model.SerializeToString())


@pytest.mark.parametrize("start", [0, 1, -1, 2**62, -(2**63)])
def test_a_part_of_the_shape_of_a_number(start: int) -> None:
    text = f"""
        g (float[2] x) => (int64[A] y) <float one = {{1}}>
        {{ y = Shape <start = {start}> (one) }}
    """
    assert run(text, x=torch.ones(2)).shape == (0,)


def test_convolution_with_a_number_for_a_weight() -> None:
    text = of_node("Conv (x, w)", x="float[1,2,3,3]", w="float").replace("(y)", "(float[A] y)")
    with pytest.raises(torch_ort.UserError, match=r"Conv: weight: got \[\], want rank 4"):
        run(text, x=torch.ones(1, 2, 3, 3), w=torch.ones(()))


@pytest.mark.parametrize("sizes", [(2, 3, 0, 4), (0, 3, 5, 4), (2, 3, 5, 0)])
@pytest.mark.parametrize("names", ["2,3,N,4", "A,B,C,D", None])
def test_attention_of_nothing(sizes: tuple[int, ...], names: str | None) -> None:
    named = ",".join(map(str, sizes)) if names != "A,B,C,D" else names
    if names == "2,3,N,4" and sizes[2] == 0:
        named = names
    head = HEAD.replace('"" : 20', '"" : 23')
    text = f"g (float[{named}] x) => (float[{named}] y) {{ y = Attention (x, x, x) }}"
    graph = _C.Graph.from_onnx(onnx.parser.parse_model(head + text).SerializeToString())
    x = torch.randn(sizes)
    want = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(_C.run(graph, {"x": x})["y"], want)


@pytest.mark.parametrize("length", [0, 4, 10_000])
def test_external_data_that_is_cut_off_after_reading(length: int, tmp_path: pathlib.Path) -> None:
    w = np.arange(4096, dtype=np.float32)
    text = "g (float[4096] x) => (float[4096] y) { y = Add (x, w) }"
    model = onnx.parser.parse_model(HEAD + text.replace("Add (x, w)", "Exp (x)"))
    model.graph.node[0].op_type = "Add"
    model.graph.node[0].input.append("w")
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    onnx.save(
        model, tmp_path / "m.onnx", save_as_external_data=True, location="w", size_threshold=0
    )
    graph = _C.Graph.from_onnx((tmp_path / "m.onnx").read_bytes(), str(tmp_path))
    with open(tmp_path / "w", "r+b") as file:
        file.truncate(length)
    y = _C.run(graph, {"x": torch.zeros(4096)})["y"]
    torch.testing.assert_close(y, torch.from_numpy(w))
    with pytest.raises(torch_ort.UserError, match=f"one within the {length} bytes of the file"):
        _C.Graph.from_onnx((tmp_path / "m.onnx").read_bytes(), str(tmp_path))


@pytest.mark.parametrize("strides", ["[1,1]", "[0,1]", "[0,0]", "[4,2]", "[1,2]", "[9,1]"])
@pytest.mark.parametrize("node", ["MatMul (x, x)", "Exp (x)", "Softmax (x)", "Transpose (x)"])
@pytest.mark.parametrize("name", ["a", "y"])
def test_results_that_fill_no_block_of_memory(name: str, node: str, strides: str) -> None:
    text = f"""
        g (float[2,2] x) => (float[2,2] y) <float[2,2] a>
        {{ a = {node}  y = {node.replace("(x", "(a")} }}
    """
    x = torch.randn(2, 2)
    want = run(text, x=x)
    with contextlib.suppress(torch_ort.UserError):
        torch.testing.assert_close(run(text, {name: strides}, x=x), want)


def test_a_norm_of_a_tensor_of_any_rank() -> None:
    text = "g (float[2,3] x, float[3] w) => (float[2,3] y) { y = RMSNormalization (x, w) }"
    model = onnx.parser.parse_model(HEAD.replace('"" : 20', '"" : 23') + text)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    graph = _C.Graph.from_onnx(model.SerializeToString())
    with pytest.raises(torch_ort.Unsupported, match="the shape of 'x' is unknown"):
        _C.run(graph, {"x": torch.ones(2, 3), "w": torch.ones(3)})


def test_two_borders() -> None:
    text = """
        g (float[2] x) => (float[2] y) {
            a = Exp (x)  d = com.microsoft.YieldOp (a)  e = com.microsoft.YieldOp (a)  y = Neg (d)
        }
    """
    with pytest.raises(torch_ort.UserError, match="YieldOp: got nodes 'd' and 'e', want at most"):
        read(text)


def test_a_gradient_that_nobody_reads() -> None:
    text = """
        g (float[2] x) => (float[2] y)
        { a = Exp (x)  "" = com.microsoft.YieldOp (a)  y = Neg (x) }
    """
    results = _C.run(read(text), {"x": torch.ones(2)})
    torch.testing.assert_close(results["a"], torch.ones(2).exp())
    torch.testing.assert_close(results["y"], -torch.ones(2))


@pytest.mark.parametrize(
    ("node", "declared", "words"),
    [
        ("Exp (x)", "float[3]", r"Exp: type of output 'y' .* got float32\[3\], want float32\[1,3,"),
        ("Exp (x)", "double[1,3,8,8]", r"got float64\[1,3,8,8\], want float32\[1,3,8,8\]"),
        ("Exp (x)", "float[1,3,N,7]", r"got float32\[1,3,N,7\], want float32\[1,3,8,8\]"),
        # Lowered into several calls, which count on the rank.
        ("AveragePool <kernel_shape = [3, 3], pads = [2, 2, 2, 2]> (x)", "float[3]",
         r"got float32\[3\], want float32\[1,3,10,10\]"),
    ],
)  # fmt: skip
def test_outputs_are_declared_as_they_are(node: str, declared: str, words: str) -> None:
    text = f"g (float[1,3,8,8] x) => ({declared} y) {{ y = {node} }}"
    with pytest.raises(torch_ort.UserError, match=words):
        _C.run(read(text), {"x": torch.ones(1, 3, 8, 8)})


def test_flags_are_no_numbers() -> None:
    node = (
        'org.pytorch.aten.ATen <operator="aten::native_layer_norm_backward", overload_name="", '
        'tensor_args=["grad_out", "input", "mean", "rstd"], normalized_shape=[4], '
        "output_mask=[1, 1, 1]> (x, x, m, m)"
    )
    text = f"g (float[2,4] x, float[2] m) => (float[2,4] y) {{ y = {node} }}"
    with pytest.raises(torch_ort.UserError, match=r"argument 'output_mask' of .*, want bool\[\]"):
        read(text)


COPY = (
    'org.pytorch.aten.ATen <operator="aten::copy_", overload_name="", tensor_args=["self", "src"]>'
)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("d = com.microsoft.YieldOp (a)  y = Mul (d, c)", "Mul: input 1 of node 'y': got 'c'"),
        (
            "v = Transpose (c)  w = Transpose (v)  d = com.microsoft.YieldOp (a)  y = Mul (w, d)",
            "Mul: input 0 of node 'y': got 'w'",
        ),
        ("y = Transpose (c)  d = com.microsoft.YieldOp (a)", "output of the graph: got 'y'"),
    ],
    ids=["value", "view", "output"],
)
def test_backward_reads_nothing_that_is_written_in_place(steps: str, words: str) -> None:
    text = f"""
        g (float[2,2] x, float[2,2] b) => (float[2,2] y)
        {{ a = Exp (x)  c = {COPY} (b, a)  {steps} }}
    """
    with pytest.raises(
        torch_ort.UserError, match=words + ", which the forward half writes in place"
    ):
        read(text)


@pytest.mark.parametrize(
    ("spaces", "words"),
    [
        ("", "Region: attributes of node 'y': got too few, want 'spaces'"),
        (", spaces : strings = []", "Region: spaces of node 'y': got 0, want 1, as many as"),
        (', spaces = ["full", "full"]', "Region: spaces of node 'y': got 2, want 1, as many as"),
    ],
)
def test_regions_with_too_few_spaces_or_too_many(spaces: str, words: str) -> None:
    text = REGION.replace(', spaces = ["full"]', spaces)
    assert text != REGION
    with pytest.raises(torch_ort.UserError, match=words):
        read(text)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("(x)", "(x, x)", "Region: inputs of node 'y': got 2, want 1, as many as its"),
        ("y = t", "y, z = t", "Region: outputs of node 'y': got 2, want 1, as many as its"),
    ],
)
def test_regions_of_another_number_of_operands(old: str, new: str, words: str) -> None:
    text = REGION.replace(old, new)
    assert text != REGION
    with pytest.raises(torch_ort.UserError, match=words):
        read(text)


def test_symbols_without_a_value() -> None:
    text = """
        g (float[N] x) => (float[A] y) { s = torch_ort.Dims <dims = ["Q"]> ()  y = Reshape (x, s) }
    """
    with pytest.raises(torch_ort.UserError, match="symbol 'Q': got no value"):
        run(text, x=torch.ones(3))


# ---- where ONNX means something else than PyTorch


def reference(text: str, **inputs: torch.Tensor) -> torch.Tensor:
    given = {name: x.numpy() for name, x in inputs.items()}
    evaluator = onnx.reference.ReferenceEvaluator(onnx.parser.parse_model(HEAD + text))
    return torch.from_numpy(np.asarray(evaluator.run(None, given)[0]))


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("sizes", ["3,4", "N,M"])
@pytest.mark.parametrize(
    ("op", "index"),
    [
        ("Gather <axis = 0>", [-1, 0, -3]),
        ("Gather <axis = 1>", [[-1, -4], [1, 3]]),
        ("Gather <axis = -1>", -2),
        ("GatherElements <axis = 0>", [[-1, -2, 0, 1], [-3, 2, -1, 0]]),
        ("GatherElements <axis = 1>", [[-1, 0], [3, -4], [-2, -3]]),
        ("ScatterElements <axis = 0>", [[-1, -2, 0, 1], [-3, 2, -2, 0]]),
        ('ScatterElements <axis = 1, reduction = "add">', [[-1, -1], [3, -4], [0, 0]]),
    ],
)
@pytest.mark.parametrize("is_constant", [False, True])
def test_indices_count_from_the_end(
    op: str, index: list, sizes: str, dtype: str, is_constant: bool
) -> None:
    x, i = torch.randn(3, 4), torch.tensor(index, dtype=getattr(torch, dtype))
    dims = f"[{','.join(map(str, i.shape))}]" if i.dim() else ""
    more = ", u" if op.startswith("Scatter") else ""
    inputs = {"x": x, "i": i} | ({"u": torch.randn(i.shape)} if more else {})
    numbers = ", ".join(map(str, i.flatten().tolist()))
    given = "" if is_constant else f", {dtype}{dims} i"
    held = f"<{dtype}{dims} i = {{{numbers}}}>" if is_constant else ""
    u = f", float{dims} u" if more else ""
    text = f"g (float[{sizes}] x{given}{u}) => (float[A,B] y) {held} {{ y = {op} (x, i{more}) }}"
    if i.dim() != 2 and not op.startswith(("GatherE", "Scatter")):
        rank = 1 + i.dim()
        text = text.replace("float[A,B] y", f"float[{','.join('ABC'[:rank])}] y")
    elif op.startswith("Gather <"):
        text = text.replace("float[A,B] y", "float[A,B,C] y")
    if is_constant:
        del inputs["i"]
    torch.testing.assert_close(run(text, **inputs), reference(text, **inputs))
    if not is_constant:
        for bad in (-5, 4):
            with pytest.raises((RuntimeError, IndexError)):
                run(text, **(inputs | {"i": torch.full_like(i, bad)}))


def test_a_captured_lookup_refuses_negative_ids() -> None:
    table = torch.nn.Embedding(5, 3)
    compiled = torch.compile(table, backend="ort")
    compiled(torch.tensor([1, 2]))
    with pytest.raises((IndexError, RuntimeError)):
        compiled(torch.tensor([1, -1]))


@pytest.mark.parametrize("sizes", ["2,3,5,6", "N,3,H,6"])
@pytest.mark.parametrize("pads", [[2, 2, 2, 2], [0, 1, 2, 1], [1, 0, 0, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize(
    "op",
    ["MaxPool <", "AveragePool <count_include_pad = 1,", "AveragePool <count_include_pad = 0,"],
)
def test_pools_with_any_padding(op: str, pads: list[int], sizes: str) -> None:
    node = f"{op} kernel_shape = [3, 3], strides = [2, 1], pads = {pads}> (x)"
    text = f"g (float[{sizes}] x) => (float[A,B,C,D] y) {{ y = {node} }}"
    x = torch.randn(2, 3, 5, 6)
    torch.testing.assert_close(run(text, x=x), reference(text, x=x))
