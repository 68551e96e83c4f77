# Graphs as ONNX: the laws of the round trip, every kind of tensor, and what is refused.
from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest
from graph_text import proto, read, read_body, show
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ort import _C

TensorProto = onnx.TensorProto

TEXTS = {
    "symbols": """
        g (float[N,4] x, bfloat16[N,"max(N, 2) + 1"] z) => (float["2*N",4] y)
        <float["N // 2",4] s>
        {
           [first] s = torch_ort.Half (x)
           [second] y = torch_ort.Twice <axis = 1> (s, "", z)
        }
    """,
    "attributes": """
        g (float[4] x) => (float[4] y)
        {
           [n] y = org.pytorch.aten.ATen <operator = "aten::foo", i = -3, f = 1e-05,
              is = [1, 2, 3], fs = [0.1, -2.5, 1e30], ss = ["a", "b c"], none: ints = [],
              t = float[2] {1.5, 2.5}, nf: floats = []> (x)
        }
    """,
    "constants": """
        g (float[4] x) => (float[4] y, int64[2] k)
        <float[4] w = {1, 2, 3, 4}, int64[2] k = {5, 6}, float e = {0.1}, bool[2] m = {1, 0}>
        {
           [n] y = torch_ort.Use (x, w, e, m)
        }
    """,
    "subgraph": """
        g (bool c, float[4] x) => (float[4] y)
        <float[4] a>
        {
           [neg] a = Neg (x)
           [if] y = If (c) <
             then_branch = yes () => (float[4] p) { [p] p = Relu (a) },
             else_branch = no () => (float[4] q) <float[4] w = {1, 2, 3, 4}> {
                [d] d = Add (a, w)
                [q] q = If (c) <
                  then_branch = deep () => (float[4] r) { [r] r = Add (d, x) },
                  else_branch = deep2 () => (float[4] u) { [u] u = Identity (a) }
                >
             }
           >
        }
    """,
    "training": """
        g (float[N,4] x, float[4] w) => (float[4] dw)
        <float[N,4] s, float[N,4] ds>
        {
           [mul] s = Mul (x, w)
           [yield] ds = com.microsoft.YieldOp (s)
           [sum] m, "" = torch_ort.Two (ds, x)
           [red] dw = ReduceSum <keepdims = 0> (m)
        }
    """,
    "odd names": """
        g (float[4] "%0", float[4] "a b") => (float[4] "y:0")
        {
           ["n 1"] "y:0" = Add ("%0", "a b")
        }
    """,
}


@pytest.mark.parametrize("name", TEXTS)
def test_round_trip_laws(name: str) -> None:
    graph = read_body(TEXTS[name])
    graph.verify()
    again = read(show(graph))
    again.verify()
    assert_same_graph(again, graph)
    assert show(again) == show(graph)
    # In bytes: what is written is read as the same, and written again as the same bytes.
    assert _C.Graph.from_onnx(graph.to_onnx()).to_onnx() == graph.to_onnx()


def assert_same_graph(got: _C.Graph, want: _C.Graph) -> None:
    assert listed(got) == listed(want)
    assert got.types() == want.types()
    for names in ("input_names", "output_names", "initializer_names"):
        assert getattr(got, names) == getattr(want, names)


def listed(graph: _C.Graph) -> list[dict]:
    nodes = graph.nodes()
    for node in nodes:
        for name, value in node["attrs"].items():
            if isinstance(value, _C.Graph):
                node["attrs"][name] = listed(value)
    return nodes


def test_text_is_kept() -> None:
    text = show(read_body(TEXTS["symbols"]))
    assert '["2*N",4] y' in text
    assert '[second] y = torch_ort.Twice <axis: int = 1> (s, "", z)' in text
    assert '<float["N // 2",4] s>' in text
    attributes = show(read_body(TEXTS["attributes"]))
    assert "f: float = 1e-05, fs: floats = [0.1, -2.5, 1e+30]" in attributes


def test_what_onnx_cannot_say_is_kept_in_metadata() -> None:
    model = proto(read_body(TEXTS["symbols"]))
    set_metadata(model.graph.input[1], strides="[1,N + 8]", device="cuda:1")
    set_metadata(model.graph.value_info[0], strides="[1,max(N, 2)]", device="cuda:1")
    set_metadata(model.graph.output[0], device="cuda")
    set_metadata(model.graph.node[0], origin="net.py:3", recompute="must_save", checkpoint="0")
    set_metadata(model.graph, symbol_inputs="u0,N")
    graph = _C.Graph.from_onnx(model.SerializeToString())
    assert graph.types()["z"][2:] == ([1, "N + 8"], "cuda:1")
    assert graph.types()["s"][2:] == ([1, "max(N, 2)"], "cuda:1")
    assert graph.types()["y"][2:] == (None, "cuda")
    assert graph.symbol_inputs == ["u0", "N"]
    node = graph.nodes()[0]
    assert (node["origin"], node["recompute"], node["checkpoint"]) == ("net.py:3", "must_save", 0)
    written = _C.Graph.from_onnx(graph.to_onnx())
    assert_same_graph(written, graph)
    assert written.symbol_inputs == ["u0", "N"]


def set_metadata(message, **entries: str) -> None:
    for key, value in entries.items():
        message.metadata_props.add(key=key, value=value)


def test_types_of_constants_keep_their_metadata() -> None:
    model = proto(read_body(TEXTS["constants"]))
    info = model.graph.value_info.add(name="w")
    set_metadata(info, strides="[1]", device="cuda:0")
    graph = _C.Graph.from_onnx(model.SerializeToString())
    assert graph.types()["w"] == ("float32", [4], [1], "cuda:0")
    assert _C.Graph.from_onnx(graph.to_onnx()).types() == graph.types()


def test_unknown_dims_leave_the_shape_unknown() -> None:
    graph = read_body("g (float[N,?] x, float[] z, float w) => (float y) { y = Add (x, z) }")
    assert graph.types()["x"][1] is None
    assert graph.types()["z"][1] is None
    assert graph.types()["w"][1] == []


def test_a_parameter_without_data_is_written_as_an_input() -> None:
    graph = read_body("g (float[4] x) => (float[4] y) { y = Neg (x) }")
    _C.testing.add_parameter(graph, "layer.weight", "x")
    model = proto(graph)
    assert [value.name for value in model.graph.input] == ["x", "layer.weight"]
    assert model.graph.input[1].metadata_props[0].key == "parameter"
    onnx.checker.check_model(model, full_check=True)
    assert _C.Graph.from_onnx(graph.to_onnx()).input_names == ["x", "layer.weight"]


# --- attributes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", ["", "com.microsoft.", "org.pytorch.aten."])
def test_floats_keep_their_digits_where_the_format_allows(domain: str) -> None:
    graph = read_body(f"g (float[4] x) => (float[4] y) {{ [n] y = {domain}Op (x) }}")
    values = [0.1, 1e-5, 3.0, 1e-5 + 1e-14, float(np.float32(0.1)), float("inf")]
    for i, value in enumerate(values):
        _C.testing.set_attr(graph, "n", f"v{i}", value)
    _C.testing.set_attr(graph, "n", "list", values)
    again = _C.Graph.from_onnx(graph.to_onnx())
    read_back = [_C.testing.read_attr(again, "n", f"v{i}", "float") for i in range(len(values))]
    read_list = _C.testing.read_attr(again, "n", "list", "floats")
    if domain == "org.pytorch.aten.":
        assert read_back == values
        assert read_list == values
    else:
        # FLOAT has 32 bits, and shows the shortest decimal of them.
        shortest = [0.1, 1e-5, 3.0, 1e-5, 0.1, float("inf")]
        assert read_back == shortest
        assert read_list == shortest
    kinds = {a.name: a.type for a in proto(graph).graph.node[0].attribute}
    exact = onnx.AttributeProto.STRING if "aten" in domain else onnx.AttributeProto.FLOAT
    assert kinds["v0"] == onnx.AttributeProto.FLOAT
    assert kinds["v3"] == exact


def test_symbolic_integers_become_text() -> None:
    graph = read_body("g (float[4] x) => (float[4] y) { [n] y = torch_ort.Op (x) }")
    _C.testing.set_dim_attr(graph, "n", "one", "N + 1")
    _C.testing.set_dim_attr(graph, "n", "known", "7")
    _C.testing.set_shape_attr(graph, "n", "dims", "[2,N // 2]")
    _C.testing.set_shape_attr(graph, "n", "ints", "[2,3]")
    text = show(graph)
    assert 'dims: strings = ["2", "N // 2"], ints: ints = [2, 3], known: int = 7' in text
    assert 'one: string = "N + 1"' in text
    again = _C.Graph.from_onnx(graph.to_onnx())
    assert _C.testing.read_attr(again, "n", "one", "dim") == "N + 1"
    assert _C.testing.read_attr(again, "n", "dims", "ints") == [2, "N // 2"]
    assert _C.testing.read_attr(again, "n", "dims", "strings") == ["2", "N // 2"]
    assert _C.testing.read_attr(again, "n", "known", "int") == 7
    with pytest.raises(_C.InternalError, match=r"attribute 'one': got 'N \+ 1', want an integer"):
        _C.testing.read_attr(again, "n", "one", "int")


def test_a_list_of_no_strings_stays_one() -> None:
    # The onnx package prints such a list in a form that it does not parse.
    model = proto(read_body(TEXTS["attributes"]))
    model.graph.node[0].attribute.add(name="ns", type=onnx.AttributeProto.STRINGS)
    graph = _C.Graph.from_onnx(model.SerializeToString())
    assert graph.nodes()[0]["attrs"]["ns"] == []
    (written,) = (a for a in proto(graph).graph.node[0].attribute if a.name == "ns")
    assert written.type == onnx.AttributeProto.STRINGS


def test_readers_of_attributes() -> None:
    graph = read_body(TEXTS["attributes"])

    def value(name: str, kind: str):
        return _C.testing.read_attr(graph, "n", name, kind)

    assert value("i", "int") == -3
    assert value("missing", "int") == -1
    assert value("f", "float") == 1e-5
    assert value("missing", "float") == -1
    assert value("ss", "strings") == ["a", "b c"]
    assert value("operator", "string") == "aten::foo"
    assert value("none", "ints") == []
    for name, kind, words in [
        ("f", "int", "got a float, want an integer"),
        ("i", "float", "got an integer, want a float"),
        ("i", "string", "got an integer, want a string"),
        ("t", "ints", "got a tensor, want a list of integers"),
        ("is", "floats", "got a list of integers, want a list of floats"),
        ("fs", "strings", "got a list of floats, want a list of strings"),
    ]:
        with pytest.raises(_C.InternalError, match=f"attribute '{name}': {words}"):
            value(name, kind)
    with pytest.raises(_C.UserError, match="number: got 'aten::foo', want a decimal number"):
        value("operator", "float")


def test_a_float_that_32_bits_cannot_hold_is_unsupported() -> None:
    graph = read_body("g (float[4] x) => (float[4] y) { [n] y = Op (x) }")
    _C.testing.set_attr(graph, "n", "alpha", 1e300)
    words = "onnx: attribute 'alpha' of node 'n': got 1e.300, want a number of 32 bits"
    with pytest.raises(_C.Unsupported, match=words):
        graph.to_onnx()


# --- versions ------------------------------------------------------------------------------------


def test_the_format_version_is_the_lowest_that_knows_the_opset() -> None:
    graph = read_body("g (float[4] x) => (float[4] y) { y = Neg (x) }")
    newest = {}
    for _, ir_version, opset, *_ in onnx.helper.VERSION_TABLE:
        newest[opset] = min(ir_version, newest.get(opset, ir_version))
    for opset, ir_version in newest.items():
        model = proto(graph, opset)
        # Format 4 is the first whose initializers need not be inputs.
        assert model.ir_version == max(4, ir_version)
        assert {o.domain: o.version for o in model.opset_import} == {"": opset}
        if opset >= 7:
            onnx.checker.check_model(model, full_check=True)


def test_opsets_are_read_and_given_back() -> None:
    graph = read_body(TEXTS["training"], opset=17)
    assert graph.opset == 17
    versions = {o.domain: o.version for o in proto(graph).opset_import}
    assert versions == {"": 17, "torch_ort": 1, "com.microsoft": 1}
    assert graph.clone().opset == 17
    with pytest.raises(_C.UserError, match="onnx: opset: got -1, want a version from 1 up"):
        graph.to_onnx(-1)


def test_standard_graphs_pass_the_checker_and_run() -> None:
    import onnx.reference

    graph = read_body(TEXTS["subgraph"])
    model = proto(graph)
    onnx.checker.check_model(model, full_check=True)
    x = np.array([1, -2, 3, -4], np.float32)
    for c in (True, False):
        inputs = {"c": np.array(c), "x": x}
        (got,) = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
        np.testing.assert_array_equal(got, np.maximum(-x, 0) if c else -x)


# --- tensors -------------------------------------------------------------------------------------

NUMERIC = [number for number, _ in _C.testing.dtype_sizes().values()]


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
@pytest.mark.parametrize("data_type", NUMERIC, ids=TensorProto.DataType.Name)
def test_tensors_of_every_type(data_type: int, raw: bool) -> None:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(data_type)
    values = np.array([[0, 1, 1], [0, 0, 1]]).astype(dtype)
    if dtype.kind == "i":
        values = (values.astype(np.int64) - 2).astype(dtype)
    if raw:
        tensor = onnx.numpy_helper.from_array(values, "w")
    else:
        vals = values.flatten()
        if data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
            vals = vals + 2j
            values = vals.reshape(values.shape).astype(dtype)
        elif data_type not in (TensorProto.FLOAT, TensorProto.DOUBLE) and dtype.kind not in "iub":
            vals = vals.astype(np.float32)
        tensor = onnx.helper.make_tensor("w", data_type, values.shape, vals)
        assert not tensor.HasField("raw_data")
    model = model_with(tensor)
    graph = _C.Graph.from_onnx(model.SerializeToString())
    written = proto(graph).graph.initializer[0]
    assert written.data_type == data_type
    got = onnx.numpy_helper.to_array(written)
    assert got.dtype == dtype
    assert got.tobytes() == values.tobytes()
    assert graph.types()["w"][1] == [2, 3]


def model_with(*tensors: TensorProto, **settings) -> onnx.ModelProto:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Neg", ["x"], ["y"], name="n")],
        "g",
        [onnx.helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        list(tensors),
    )
    return onnx.helper.make_model(graph, **settings)


def test_an_input_with_an_initializer_is_a_constant() -> None:
    model = model_with(onnx.numpy_helper.from_array(np.ones(4, np.float32), "x"))
    graph = _C.Graph.from_onnx(model.SerializeToString())
    assert graph.input_names == []
    assert graph.initializer_names == ["x"]
    graph.verify()


def test_a_tensor_may_be_empty() -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[0, 3])
    graph = _C.Graph.from_onnx(model_with(tensor).SerializeToString())
    assert graph.types()["w"][1] == [0, 3]
    assert _C.Graph.from_onnx(graph.to_onnx()).types() == graph.types()


def test_large_tensors_go_to_a_file_of_their_own(tmp_path: pathlib.Path) -> None:
    big = np.arange(1000, dtype=np.float32)
    other = np.arange(600, dtype=np.int64)
    small = np.arange(3, dtype=np.float32)
    tensors = [
        onnx.numpy_helper.from_array(a, n) for a, n in [(big, "b"), (small, "s"), (other, "o")]
    ]
    graph = _C.Graph.from_onnx(model_with(*tensors).SerializeToString())
    graph.save(str(tmp_path / "model.onnx"), 20, external_limit=1000)
    model_bytes = (tmp_path / "model.onnx").read_bytes()
    assert len(model_bytes) < 1000
    # The onnx package and we read the same.
    loaded = onnx.load(tmp_path / "model.onnx")
    again = _C.Graph.from_onnx(model_bytes, str(tmp_path))
    for tensor, want in zip(loaded.graph.initializer, [big, small, other], strict=True):
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), want)
    assert again.to_onnx(20) == graph.to_onnx(20)
    # The file may go: what was read stays.
    (tmp_path / "model.onnx.data").unlink()
    assert again.to_onnx(20) == graph.to_onnx(20)


def test_tensors_below_the_limit_stay_inside(tmp_path: pathlib.Path) -> None:
    values = np.arange(1000, dtype=np.float32)
    tensor = onnx.numpy_helper.from_array(values, "w")
    graph = _C.Graph.from_onnx(model_with(tensor).SerializeToString())
    graph.save(str(tmp_path / "model.onnx"), 20, external_limit=values.nbytes)
    assert (tmp_path / "model.onnx").read_bytes() == graph.to_onnx(20)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("path", ["no/where.onnx", ".", "/dev/full"])
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_files_that_cannot_be_written(path: str, limit: int, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tensor = onnx.numpy_helper.from_array(np.zeros(1000, dtype=np.float32), "w")
    graph = _C.Graph.from_onnx(model_with(tensor).SerializeToString())
    words = "^onnx: file '.*': got (No such|Is a dir|No space).*, want a file that can be written$"
    with pytest.raises(_C.UserError, match=words):
        graph.save(path, 20, limit)


def test_external_data_at_an_odd_place(tmp_path: pathlib.Path) -> None:
    values = np.arange(5, dtype=np.float32)
    (tmp_path / "w.bin").write_bytes(b"abc" + values.tobytes())
    tensor = external("w.bin", offset="3")
    graph = _C.Graph.from_onnx(model_with(tensor).SerializeToString(), str(tmp_path))
    np.testing.assert_array_equal(
        onnx.numpy_helper.to_array(proto(graph).graph.initializer[0]), values
    )


def external(location: str, dims: tuple[int, ...] = (5,), **entries: str) -> TensorProto:
    tensor = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL
    )
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.mark.parametrize(
    ("location", "entries", "words"),
    [
        ("../secret", {}, "got a path out of the folder of the model, want a path inside"),
        ("link", {}, "got a path out of the folder of the model, want a path inside"),
        ("/etc/passwd", {}, "got an absolute path, want a path relative to the model"),
        ("", {}, "got no file name, want a path relative"),
        ("missing", {}, "got No such file or directory, want a file beside the model"),
        (".", {}, "got no regular file, want a regular file"),
        ("w.bin", {"offset": "-1"}, "offset: got '-1', want an integer from 0 up"),
        ("w.bin", {"offset": "x"}, "offset: got 'x', want an integer from 0 up"),
        ("w.bin", {"length": "8"}, "got 8 bytes, want 20 for float32"),
        ("w.bin", {"offset": "4"}, "got the end at byte 4 . 20, want one within the 20 bytes"),
        ("w.bin", {"offset": str(2**63 - 1)}, "want one within the 20 bytes of the file 'w.bin'"),
    ],
)
def test_external_data_that_is_refused(
    tmp_path: pathlib.Path, location: str, entries: dict[str, str], words: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(20))
    (folder / "w.bin").write_bytes(bytes(20))
    (folder / "link").symlink_to(tmp_path / "secret")
    model = model_with(external(location, **entries)).SerializeToString()
    with pytest.raises(_C.UserError, match="^onnx: data of tensor 'w'.*" + words):
        _C.Graph.from_onnx(model, str(folder))


def test_external_data_needs_a_folder() -> None:
    model = model_with(external("w.bin")).SerializeToString()
    words = "in the file 'w.bin': got no folder to look in, want the folder of the model"
    with pytest.raises(_C.UserError, match=words):
        _C.Graph.from_onnx(model)
    with pytest.raises(_C.UserError, match="got the folder '/no/where', want one that exists"):
        _C.Graph.from_onnx(model, "/no/where")


# --- what is refused -----------------------------------------------------------------------------


def broken(change: Callable[[onnx.ModelProto], object]) -> bytes:
    model = proto(read_body(TEXTS["training"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(2, np.float32), "k"))
    change(model)
    return model.SerializeToString()


def add_attribute(model: onnx.ModelProto, **fields) -> None:
    model.graph.node[0].attribute.append(onnx.AttributeProto(name="a", **fields))


REFUSED = {
    "no graph": (lambda m: m.ClearField("graph"), "model: got no graph"),
    "functions": (lambda m: m.functions.add(), "model: got 1 functions, want none; inline them"),
    "training info": (lambda m: m.training_info.add(), "model: got training info, want a graph"),
    "sparse": (lambda m: m.graph.sparse_initializer.add(),
        "graph 'g': got a sparse initializer, want dense ones"),
    "undefined input": (lambda m: m.graph.node[0].input.append("ghost"),
        "input of node 'mul': got 'ghost', want a value that is defined before"),
    "late input": (lambda m: m.graph.node[0].input.append("ds"),
        "input of node 'mul': got 'ds', want a value that is defined before"),
    "undefined output": (lambda m: m.graph.output.add(name="ghost"),
        "output of graph 'g': got 'ghost', want a value that is defined before"),
    "defined twice": (lambda m: m.graph.node[1].output.append("s"),
        "name of an output of a node of graph 'g': got 's' again, want a name that no other"),
    "input twice": (lambda m: m.graph.input.append(m.graph.input[0]),
        "name of an input of graph 'g': got 'x' again"),
    "unnamed input": (lambda m: m.graph.input.add(),
        "name of an input of graph 'g': got '', want a name"),
    "initializer twice": (lambda m: m.graph.initializer.append(m.graph.initializer[0]),
        "name of an initializer of graph 'g': got 'k' again"),
    "no op": (lambda m: m.graph.node[0].ClearField("op_type"),
        "op of node 'mul': got '', want a name"),
    "overload": (lambda m: setattr(m.graph.node[0], "overload", "v2"),
        "node 'mul': got the function overload 'v2', want an op"),
    "no import": (lambda m: m.ClearField("opset_import"),
        "opset of the domain '' of node 'mul': got none, want an import"),
    "other version": (lambda m: setattr(m.opset_import[1], "version", 2),
        "opset of the domain 'com.microsoft' of node 'yield': got 2, want 1"),
    "bad version": (lambda m: setattr(m.opset_import[0], "version", 0),
        "opset of the domain '': got 0, want a version from 1 up"),
    "two versions": (lambda m: m.opset_import.add(domain="ai.onnx", version=7),
        "opset of the domain '': got 20 and 7, want one version"),
    "sequence": (lambda m: m.graph.input[0].type.sequence_type.elem_type.tensor_type.SetInParent(),
        "type of value 'x': got no tensor, want a tensor"),
    "element type": (lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 99),
        "type of value 'x': got element type 99, want one from 1 to 20"),
    "negative dim": (lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value",
        -1), "type of value 'x': got a dim of -1, want dims from 0 up"),
    "strides": (lambda m: set_metadata(m.graph.input[0], strides="[1]"),
        "type of value 'x': got 1 strides, want 2"),
    "checkpoint": (lambda m: set_metadata(m.graph.node[0], checkpoint="two"),
        "checkpoint of node 'mul': got 'two', want an integer from 0 up"),
    "large checkpoint": (lambda m: set_metadata(m.graph.node[0], checkpoint=str(2**40)),
        "checkpoint of node 'mul': got 1099511627776, want a number of 32 bits"),
    "symbol inputs": (lambda m: set_metadata(m.graph, symbol_inputs="u0,2*N"),
        "symbol inputs: got '2.N', want symbols"),
    "attribute twice": (lambda m: (add_attribute(m, type=2, i=1), add_attribute(m, type=2, i=1)),
        "attribute 'a' of node 'mul': got it twice, want it once"),
    "attribute type": (lambda m: add_attribute(m, type=onnx.AttributeProto.TYPE_PROTO),
        "attribute 'a' of node 'mul': got type 13, want an integer, float, string, tensor"),
    "unnamed attribute": (lambda m: m.graph.node[0].attribute.add(type=2),
        "attribute '' of node 'mul': got no name"),
    "reference": (lambda m: add_attribute(m, type=2, ref_attr_name="b"),
        "attribute 'a' of node 'mul': got a reference of a function, want a value"),
    "shadowed name": (lambda m: add_attribute(m, type=onnx.AttributeProto.GRAPH,
        g=onnx.GraphProto(name="sub", input=[onnx.ValueInfoProto(name="x")])),
        "name of an input of graph 'sub': got 'x' again"),
    "tensor type": (lambda m: setattr(m.graph.initializer[0], "data_type", TensorProto.STRING),
        "data of tensor 'k': got data type 8, want a type of numbers"),
    "tensor size": (lambda m: m.graph.initializer[0].dims.append(3),
        r"data of tensor 'k': got 8 bytes, want 24 for float32\[2,3\]"),
    "tensor dims": (lambda m: m.graph.initializer[0].dims.append(-3),
        "data of tensor 'k': got a dim of -3, want dims from 0 up"),
    "tensor overflow": (lambda m: m.graph.initializer[0].dims.extend([2**62, 2**62]),
        "data of tensor 'k': got dims whose product is too large"),
    "typed count": (lambda m: m.graph.initializer[0].CopyFrom(TensorProto(name="k",
        data_type=TensorProto.INT64, dims=[2], int64_data=[1])),
        r"data of tensor 'k': got 1 values, want 2 for int64\[2\]"),
    "typed range": (lambda m: m.graph.initializer[0].CopyFrom(TensorProto(name="k",
        data_type=TensorProto.INT8, dims=[1], int32_data=[200])),
        "data of tensor 'k': got 200, want values of 8 bits"),
    "bool": (lambda m: m.graph.initializer[0].CopyFrom(TensorProto(name="k",
        data_type=TensorProto.BOOL, dims=[1], raw_data=b"\x02")),
        "data of tensor 'k': got the bool 2, want 0 or 1"),
    "segment": (lambda m: m.graph.initializer[0].segment.SetInParent(),
        "data of tensor 'k': got a segment, want a whole tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_models_are_refused(case: str) -> None:
    change, words = REFUSED[case]
    with pytest.raises(_C.UserError, match="^onnx: " + words):
        _C.Graph.from_onnx(broken(change))


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff", b"not a model at all", bytes(100)])
def test_bytes_that_are_no_model(data: bytes) -> None:
    words = f"onnx: model: got ({len(data)} bytes that are no ModelProto|no graph), want an ONNX"
    with pytest.raises(_C.UserError, match=words):
        _C.Graph.from_onnx(data)


def test_bad_dims_are_refused() -> None:
    def rename_dim(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch size"

    with pytest.raises(_C.UserError, match="dim: bad expression 'batch size': got 's' at 6"):
        _C.Graph.from_onnx(broken(rename_dim))


def test_names_must_be_text() -> None:
    data = broken(lambda m: None).replace(b"com.microsoft", b"com.m\xedcrosoft")
    words = r"^onnx: domain: got 'com.m\\xedcrosoft', want UTF-8 text$"
    with pytest.raises(_C.UserError, match=words):
        _C.Graph.from_onnx(data)


def test_errors_are_also_those_of_python() -> None:
    assert issubclass(_C.UserError, ValueError)
    for error in (_C.Unsupported, _C.UserError, _C.InternalError):
        assert issubclass(error, _C.Error)
        assert issubclass(error, RuntimeError)
        assert error.__module__ == "torch_ort"


MODELS = [proto(read_body(text)).SerializeToString() for text in TEXTS.values()]


@settings(max_examples=1500, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=4),
    st.integers(0, 5000),
    st.booleans(),
)
def test_damaged_models_are_read_or_refused(
    model: bytes, flips: list[tuple[int, int]], end: int, cut: bool
) -> None:
    data = bytearray(model)
    for place, value in flips:
        data[place % len(data)] = value
    if cut:
        data = data[: end % len(data)]
    try:
        graph = _C.Graph.from_onnx(bytes(data))
    except (_C.UserError, _C.Unsupported):  # more outputs than the engine has for an op
        return
    graph.verify()
    graph.nodes()
    assert graph.clone().to_onnx(20) == graph.to_onnx(20)
    _C.Graph.from_onnx(graph.to_onnx(20)).verify()


# --- random graphs -------------------------------------------------------------------------------


@st.composite
def random_models(draw: st.DrawFn) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(draw(st.integers(1, 3)))]
    dims = st.lists(
        st.one_of(st.integers(0, 5), st.sampled_from(["N", "2*N + 1", "N // T", "min(N, T)"])),
        max_size=3,
    )
    data_types = st.sampled_from(NUMERIC)
    inputs = [onnx.helper.make_tensor_value_info(n, draw(data_types), draw(dims)) for n in names]
    floats = st.floats(width=32, allow_nan=False)
    values = st.one_of(
        st.integers(-(2**63), 2**63 - 1),
        floats,
        st.text(max_size=5),
        st.lists(st.integers(-9, 9), min_size=1, max_size=3),
        st.lists(floats, min_size=1, max_size=3),
        st.lists(st.text(max_size=3), min_size=1, max_size=3),
    )
    nodes, infos = [], []
    for i in range(draw(st.integers(1, 6))):
        outputs = [f"v{i}_{k}" for k in range(draw(st.integers(1, 3)))]
        node = onnx.helper.make_node(
            draw(st.sampled_from(["Foo", "Bar"])),
            draw(st.lists(st.sampled_from([*names, ""]), max_size=4)),
            outputs,
            name=draw(st.sampled_from([f"n{i}", ""])),
            domain=draw(st.sampled_from(["", "torch_ort"])),
            **draw(st.dictionaries(st.sampled_from("abc"), values, max_size=3)),
        )
        nodes.append(node)
        names += outputs
        infos += [
            onnx.helper.make_tensor_value_info(name, draw(data_types), draw(dims))
            for name in outputs
            if draw(st.booleans())
        ]
    results = [onnx.ValueInfoProto(name=name) for name in draw(st.sets(st.sampled_from(names)))]
    graph = onnx.helper.make_graph(nodes, "g", inputs, results, value_info=infos)
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("torch_ort", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports)


@settings(max_examples=150, deadline=None)
@given(random_models())
def test_random_models_keep_everything(model: onnx.ModelProto) -> None:
    graph = _C.Graph.from_onnx(model.SerializeToString())
    graph.verify()
    written = proto(graph)
    assert [n.op_type for n in written.graph.node] == [n.op_type for n in model.graph.node]
    for got, want in zip(written.graph.node, model.graph.node, strict=True):
        assert list(got.input) == list(want.input)
        assert list(got.output) == list(want.output)
        assert got.name == (want.name or want.output[0])
        assert sorted(map(as_text, got.attribute)) == sorted(map(as_text, want.attribute))
    again = _C.Graph.from_onnx(graph.to_onnx())
    assert_same_graph(again, graph)
    assert again.to_onnx() == graph.to_onnx()


def as_text(attribute: onnx.AttributeProto) -> bytes:
    return attribute.SerializeToString(deterministic=True)
