"""Files whose metadata is wrong: the engine says so, and reads and writes no memory but its own."""

from __future__ import annotations

import collections
import pathlib
import subprocess
import sys

import onnx
import onnx.parser
import pytest
import torch

import torch_ort
from torch_ort import _C

pytestmark = pytest.mark.ort_only

HEAD = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1, "torch_ort" : 1]>'
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
PROGRAM = pathlib.Path(__file__).parent / "mutate_files.py"
# Exceptions of PyTorch's own kernels: they check what they are given.
OF_KERNELS = ("RuntimeError", "IndexError", "TypeError", "NotImplementedError", "OutOfMemoryError")
OURS = ("UserError", "Unsupported", "InternalError")


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
    text = "g (float[2] x) => (float[2] y) <float[N] e> { e = Exp (x)  y = Exp (e) }"
    words = (
        rf"run: value 'e': got Float\[{size}\] with strides \[1\], want sizes and strides from 0"
    )
    with pytest.raises(torch_ort.UserError, match=words):
        run(text.replace("N", f"{size}"), x=torch.zeros(2))


def test_a_result_of_another_size_than_its_type_says() -> None:
    words = r"run: value 'y': got Float\[2, 3\] .*, want Float\[2, 4\] .* as its type says"
    with pytest.raises(torch_ort.UserError, match=words):
        run("g (float[2,3] x) => (float[2,4] y) { y = Exp (x) }")


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
        ("rows = 2", "rows = 1000", r"operand of sizes \[2,3\], want 1000 rows of 3 columns"),
        ("rows = 2", "rows = -2", r"operand of sizes \[2,3\], want -2 rows of 3 columns"),
        ('["full"]', '["scalar"]', r"operand of sizes \[2,3\], want 1 rows of 1 columns"),
        ("Exp (a)", 'Exp ("")', "Region: no instruction for Exp"),
        ("Exp (a)", "Add (a)", "Add: inputs of node 'b': got 1, want at least 2"),
        ("(float[2,3] y)", "(uint16[2,3] y)", "Region: got an operand of uint16"),
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
        ('["table", "ids"]', '["column", "ids"]', r"sizes \[2,3\], want 1 rows of 3 columns"),
        ('["table", "ids"]', '["table", "row"]', "operand 1 of 'b' is no input of the space ids"),
        ('["table", "ids"]', '["ids", "table"]', "got ids of float32, want int64 or int32"),
        ("Gather (a, i)", "Exp (a)", "value 'a' comes from nowhere"),
        ("rows = 4", "rows = 5", r"operand of sizes \[4\], want 5 rows of 1 columns"),
        (
            "columns = 3",
            "columns = 2",
            "want 4 rows of 2 columns",
        ),
    ],
)
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
        with pytest.raises(torch_ort.InternalError, match="EmbeddingGrad: the operands do not fit"):
            run(changed, strides, **given)


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
    with pytest.raises(torch_ort.UserError, match="YieldOp 'd': got an input that is left out"):
        run(text, x=x)


@pytest.mark.parametrize(("length", "works"), [(900, True), (20_000, False)])
def test_a_long_way_to_a_size(length: int, works: bool) -> None:
    model = onnx.parser.parse_model(
        HEAD + "g (float[N,2] x) => (float[A] y) { s0 = Shape (x)  y = Expand (x, s0) }"
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
    with pytest.raises(torch_ort.Unsupported, match=f"'s{length}' comes from data"):
        _C.run(graph, {"x": x})


@pytest.mark.parametrize("first", [0, 1_000_000])
def test_changed_files_never_crash(first: int) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(PROGRAM), str(first), "2500"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 0, f"after seed {lines[-1]}\n{result.stderr}"
    counts = collections.Counter()
    for line in lines:
        kind, _, message = line.split(" ", 1)[1].partition(":")
        counts[kind] += 1
        assert kind in ("works", *OURS, *OF_KERNELS), line
        assert not any(word in message for word in ("std::", "vector", "unordered_map")), line
    assert counts["works"] > 200, counts
    assert counts["UserError"] > 200, counts
