"""What a model file may run: what computes, and more only where the caller names it."""

from __future__ import annotations

import pathlib

import onnx
import onnx.parser
import pytest
import torch

import torch_ort
from torch_ort import _C
from torch_ort.read import higher_order  # noqa: F401  (registers call_python)

pytestmark = pytest.mark.ort_only

HEAD = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1, "org.pytorch.aten" : 1, '
HEAD += '"torch_ort" : 1]>'


def aten(operator: str, tensor_args: str = '["self"]', more: str = "", inputs: str = "x") -> str:
    given = f", tensor_args = {tensor_args}" if tensor_args else ""
    text = f'<operator = "{operator}", overload_name = ""{given}{more}>'
    return f"org.pytorch.aten.ATen {text} ({inputs})"


def read(text: str, **keywords: list[str]) -> _C.Graph:
    return _C.Graph.from_onnx(onnx.parser.parse_model(HEAD + text).SerializeToString(), **keywords)


def graph_of(node: str) -> str:
    return f"g (float[4] x) => (float[4] y) {{ y = {node} }}"


def test_a_file_writes_no_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "written"
    opened = aten("aten::from_file", "", f', filename = "{path}", shared = "true", size = 4', "")
    text = f"""
        g (float[4] x) => (float[4] y) <float[4] f>
        {{ f = {opened}  y = {aten("aten::copy_", '["self", "src"]', inputs="f, x")} }}
    """
    words = r"file: operator of node 'f': got aten::from_file, which reads or writes outside of"
    with pytest.raises(torch_ort.UserError, match=words):
        _C.run(read(text), {"x": torch.ones(4)})
    assert not path.exists()
    # A caller who names them gets them.
    result = _C.run(read(text, allow=["aten::from_file", "aten::copy_"]), {"x": torch.ones(4)})
    assert result["y"].tolist() == [1, 1, 1, 1]
    assert path.stat().st_size == 16


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        ("aten::add_.Tensor", "which writes into its arguments"),
        ("aten::add.out", "which writes into its arguments"),
        ("aten::_reshape_alias", "which takes sizes and strides without a look at the memory"),
        ("aten::set_.source_Storage", "which changes the memory of a tensor"),
        ("aten::resize_", "which changes the memory of a tensor"),
        ("aten::_lazy_clone", "which changes the memory of a tensor"),
        ("aten::_sparse_coo_tensor_unsafe", "whose tensors are not dense"),
        ("aten::_nested_view_from_buffer", "whose tensors are not dense"),
        ("aten::_weight_int4pack_mm_for_cpu", "which PyTorch keeps for itself"),
        ("aten::_remove_batch_dim", "which PyTorch keeps for itself"),
        ("aten::_index_put_impl", "which PyTorch keeps for itself"),
        ("aten::fbgemm_linear_fp16_weight", "whose tensors hold what another kernel has packed"),
        ("aten::q_scale", "whose tensors hold what another kernel has packed"),
        ("aten::stride.int", "which gives a int"),
        ("aten::lstm.input", None),
        ("aten::_cudnn_init_dropout_state", "which PyTorch keeps for itself"),
        ("aten::_pin_memory", "which changes state of the process"),
        ("prim::device", None),
        ("torch_ort::call_python", "which is none of PyTorch's own"),
        ("torch_ort::run_forward", "which is none of PyTorch's own"),
        ("torch_ort::python_op", "which is none of PyTorch's own"),
        ("_c10d_functional::all_reduce", "which is none of PyTorch's own"),
    ],
)
def test_operators_that_a_file_may_not_name(operator: str, words: str | None) -> None:
    name, _, overload = operator.partition(".")
    node = aten(name, "").replace('overload_name = ""', f'overload_name = "{overload}"')
    expected = rf"got {name}, {words}.*allow=\['{name}'\]" if words else "."
    with pytest.raises(torch_ort.UserError if words else torch_ort.Error, match=expected):
        _C.run(read(graph_of(node)), {"x": torch.ones(4)})


BAD = aten("aten::from_file", "", ', filename = "/dev/null", size = 4', "")


@pytest.mark.parametrize(
    "text",
    [
        f"""g (bool c, float[4] x) => (float[4] y) {{ y = If (c) <
            then_branch = t () => (float[4] a) {{ a = {BAD} }},
            else_branch = f () => (float[4] b) {{ b = Exp (x) }}> }}""",
        f"""g (int64 m, float[4] x) => (float[4] y) {{ y = Loop (m, , x) <
            body = b (int64 i, bool go, float[4] p) => (bool on, float[4] q)
            {{ on = Identity (go)  q = {BAD} }}> }}""",
        f"""g (float[4] x) => (float[4] y) {{ y = torch_ort.Region <rows = 1, columns = 4,
            spaces = ["full"], body = b (float[4] a) => (float[4] q) {{ q = {BAD} }}> (x) }}""",
    ],
    ids=["If", "Loop", "Region"],
)
def test_bodies_are_held_to_the_same(text: str) -> None:
    with pytest.raises(torch_ort.UserError, match="got aten::from_file, which reads or writes"):
        read(text)
    with pytest.raises(torch_ort.UserError, match="got aten::from_file, which reads or writes"):
        _C.Session.from_onnx(onnx.parser.parse_model(HEAD + text).SerializeToString())


def test_a_body_writes_into_nothing() -> None:
    copied = aten("aten::copy_", '["self", "src"]', inputs="p, x")
    text = f"""
        g (int64 m, float[4] x, float[4] z) => (float[4] y) {{ y = Loop (m, , z) <
            body = b (int64 i, bool go, float[4] p) => (bool on, float[4] q)
            {{ on = Identity (go)  q = {copied} }}> }}
    """
    with pytest.raises(torch_ort.UserError, match="got aten::copy_, which writes into its arg"):
        read(text)


def test_new_values_of_inputs_are_given() -> None:
    text = f"""
        g (float[4] x, float[4] z) => (float[4] y)
        {{ e = Exp (x)  c = {aten("aten::copy_", '["self", "src"]', inputs="z, e")}  y = Neg (e) }}
    """
    x, z = torch.randn(4), torch.zeros(4)
    torch.testing.assert_close(_C.run(read(text), {"x": x, "z": z})["y"], -x.exp())
    torch.testing.assert_close(z, x.exp())
    constant = text.replace("float[4] z)", "float[4] w)").replace(
        "\n        {", "\n        <float[4] z = {0, 0, 0, 0}> {"
    )
    assert constant != text
    with pytest.raises(torch_ort.UserError, match="got aten::copy_, which writes into its arg"):
        read(constant)


def test_python_runs_only_if_it_is_named() -> None:
    text = graph_of("com.microsoft.PythonOp <function = 999999> (x)").replace("y =", "c, y =")
    with pytest.raises(torch_ort.UserError, match=r"got com.microsoft.PythonOp, which runs Python"):
        read(text)
    graph = read(text, allow=["com.microsoft.PythonOp"])
    with pytest.raises(torch_ort.UserError, match="no Function has the key 999999"):
        _C.run(graph, {"x": torch.ones(4)})


@torch.library.custom_op("file_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("allow", [["file_tests"], ["file_tests::double"], ["*"]])
def test_custom_operators_run_only_if_they_are_named(allow: list[str]) -> None:
    text = graph_of(aten("file_tests::double", '["x"]'))
    with pytest.raises(torch_ort.UserError, match="got file_tests::double, which is none of Py"):
        read(text, allow=["file_test", "aten", "file_tests::other"])
    assert _C.run(read(text, allow=allow), {"x": torch.ones(4)})["y"].tolist() == [2, 2, 2, 2]


def test_facts_come_from_the_schema() -> None:
    node = aten("aten::abs", more=", view = 1")
    (found,) = read(graph_of(node)).nodes()
    assert "view" not in found["attrs"]
    (found,) = read(graph_of(aten("aten::t"))).nodes()
    assert found["attrs"]["view"] == 1
    (found,) = read(graph_of(aten("aten::bernoulli"))).nodes()
    assert found["attrs"]["effects"] == 1


def test_devices_without_memory_are_refused() -> None:
    more = ', size = [4], device = "meta"'
    with pytest.raises(torch_ort.UserError, match="argument 'device' of aten::zeros"):
        read(graph_of(aten("aten::zeros", "", more, "")))
    model = onnx.parser.parse_model(HEAD + graph_of("Exp (x)"))
    model.graph.output[0].metadata_props.add(key="device", value="meta")
    with pytest.raises(torch_ort.UserError, match="device of value 'y': got meta, want cpu or"):
        _C.Graph.from_onnx(model.SerializeToString())


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (aten("aten::_softmax", more=', dim = 0.5, half_to_float = "false"'), "argument 'dim'"),
        (aten("aten::sum", more=", dtype = 3"), "argument 'dtype' of aten::sum"),
        (aten("aten::sum", more=', dtype = "strange"'), "argument 'dtype' of aten::sum"),
        (aten("aten::cumsum"), "argument 'dim' of aten::cumsum.*got none, want int"),
        (aten("aten::gelu", more=", approximate = 2"), "argument 'approximate' of aten::gelu"),
        (aten("aten::flip", more=", dims = [0.5, 1.5]"), "argument 'dims' of aten::flip"),
        (aten("aten::abs", '["self:1"]'), "argument 'self' of aten::abs"),
        (aten("aten::cat", '["tensors"]'), "argument 'tensors' of aten::cat"),
        (aten("aten::abs", "3"), "tensor_args"),
        (aten("aten::abs", inputs='""'), "argument 'self' of aten::abs: .*got none|got none"),
    ],
)
def test_arguments_that_the_schema_does_not_take(node: str, words: str) -> None:
    with pytest.raises(torch_ort.UserError, match=words):
        read(graph_of(node))


def test_more_outputs_than_the_operator_gives() -> None:
    text = graph_of(aten("aten::abs")).replace("y =", "y, z =")
    with pytest.raises(torch_ort.UserError, match="outputs of node 'y': got 2, want at most 1"):
        read(text)


def test_fewer_outputs_than_the_operator_gives() -> None:
    text = "g (float[3,4] x) => (float[3] y) {" + f"y = {aten('aten::max')} }}"
    text = text.replace('overload_name = ""', 'overload_name = "dim", dim = 1')
    x = torch.randn(3, 4)
    torch.testing.assert_close(_C.run(read(text), {"x": x})["y"], x.amax(1))


# ---- kernels that do not look at what they are given


@pytest.mark.parametrize(
    ("operator", "inputs", "more", "words"),
    [
        ("aten::_softmax_backward_data", {"grad_output": "float[4,5]", "output": "float[2]"},
         ', dim = 1, input_dtype = "float32"',
         "argument 'grad_output': got .*, want the sizes of 'output'"),
        ("aten::_log_softmax_backward_data", {"grad_output": "float[4,5]", "output": "double[4,5]"},
         ', dim = 1, input_dtype = "float32"', "argument 'grad_output': got Float, want Double"),
        ("aten::native_layer_norm_backward",
         {"grad_out": "float[4,5]", "input": "float[4,5]", "mean": "float[1]", "rstd": "float[4]"},
         ', normalized_shape = [5], output_mask = ["true", "true", "true"]',
         "argument 'mean': got 1 elements, want 4"),
        ("aten::native_layer_norm_backward",
         {"grad_out": "float[4,5]", "input": "float[4,5]", "mean": "float[4]", "rstd": "float[4]"},
         ', normalized_shape = [50], output_mask = ["true", "true", "true"]',
         "argument 'normalized_shape': got .*, want the last sizes of 'input'"),
        ("aten::_native_batch_norm_legit_functional",
         {"input": "float[4,5]", "weight": "float[3]", "running_mean": "float[5]",
          "running_var": "float[5]"},
         ', training = "true", momentum = 0.5, eps = 0.5',
         "argument 'weight': got 3 elements, want 5"),
        ("aten::native_batch_norm",
         {"input": "float[4,5]"},
         ', training = "false", momentum = 0.5, eps = 0.5',
         "argument 'training': got false without statistics, want true"),
        ("aten::native_batch_norm",
         {"input": "float[4,5]", "weight": "float[5]", "running_mean": "float[2]"},
         ', training = "true", momentum = 0.5, eps = 0.5',
         "argument 'running_mean': got 2 elements, want 5"),
        ("aten::native_batch_norm_backward",
         {"grad_out": "float[4,5]", "input": "float[4,5]", "save_mean": "float[5]"},
         ', train = "true", eps = 0.5, output_mask = ["true", "true", "true"]',
         "argument 'save_invstd': got none, want a tensor"),
        ("aten::native_batch_norm_backward",
         {"grad_out": "float[4,5]", "input": "float[4,5]", "running_mean": "float[5]"},
         ', train = "false", eps = 0.5, output_mask = ["true", "true", "true"]',
         "argument 'running_var': got none, want a tensor"),
        (
            "aten::max_pool2d_with_indices_backward",
            {
                "grad_output": "float[1,1,1,1]",
                "self": "float[1,1,2,2]",
                "indices": "int64[1,1,1,1]",
            },
            ", kernel_size = [2, 2], stride = [2, 2], padding = [0, 0], dilation = [1, 1],"
            ' ceil_mode = "false"',
            "argument 'indices': got 1000 to 1000, want places below 4",
        ),
        ("aten::native_group_norm", {"input": "float[1,4,2]"},
         ", N = 1, C = 4, HxW = 2, group = 0, eps = 0.5",
         "argument 'group': got 0, want 1 or more"),
        ("aten::_pdist_forward", {"self": "float[2,3,0,5]"}, "",
         "argument 'self': got .*, want 2 dims"),
        ("aten::_weight_norm_interface", {"v": "float[5,8]", "g": "float[3,1]"}, "",
         "argument 'g': got 3 elements, want 5"),
    ],
)  # fmt: skip
def test_kernels_are_given_what_they_count_on(
    operator: str, inputs: dict[str, str], more: str, words: str
) -> None:
    names = ", ".join(f'"{name}"' for name in inputs)
    node = aten(operator, f"[{names}]", more, ", ".join(inputs))
    given = ", ".join(f"{kind} {name}" for name, kind in inputs.items())
    graph = read(f"g ({given}) => (y) {{ y = {node} }}".replace("(y)", "(float[A] y)"))
    dtypes = {"float": torch.float32, "double": torch.float64, "int64": torch.int64}
    tensors = {}
    for name, kind in inputs.items():
        dtype, _, sizes = kind.rstrip("]").partition("[")
        tensors[name] = torch.full(
            [int(size) for size in sizes.split(",")], 1000, dtype=dtypes[dtype]
        )
    with pytest.raises(torch_ort.UserError, match=f"{operator}: {words}"):
        _C.run(graph, tensors)
