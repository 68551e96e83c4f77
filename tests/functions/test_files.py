# How custom Functions stand in graphs and files, and the switches that keep them out.
from __future__ import annotations

from typing import ClassVar

import custom_functions as F
import onnx
import pytest
import torch
from custom_functions import Net
from torch.autograd import Function

import torch_ort
from torch_ort import DebugOptions, ORTModule
from torch_ort.compat.custom_autograd import enable_custom_autograd_support
from torch_ort.functions import capturing


def attributes(node: onnx.NodeProto) -> dict:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Return a function that runs a step and gives the PythonOps and PythonOpGrads in its file."""

    def run(function, **options) -> tuple[list[dict], list[dict]]:
        monkeypatch.chdir(tmp_path)
        settings = DebugOptions(save_onnx=True, onnx_prefix="model", config=options or None)
        ours = ORTModule(Net(function), settings)
        ours(torch.randn(4, 6)).sum().backward()
        (path,) = tmp_path.glob("*optimized_training.onnx")
        model = onnx.load(path)
        onnx.checker.check_model(model)
        nodes = [node for node in model.graph.node if node.domain == "com.microsoft"]
        return tuple(
            [attributes(node) | {"in": len(node.input), "out": len(node.output)} for node in nodes
             if node.op_type == kind]
            for kind in ("PythonOp", "PythonOpGrad")
        )  # fmt: skip

    return run


def test_attributes_of_a_call(saved):
    given = {"power": 2}
    (forward,), (backward,) = saved(
        lambda x: F.Mixed.apply(x, True, 2, 0.25, (1, 2), "name", given, None)[0]
    )
    assert forward["func_name"] == b"custom_functions.Mixed"
    assert forward["input_convention"] == b"dccccccc"
    assert forward["input_requires_grads"] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert forward["input_tensor_types"] == [1]
    assert forward["input_tensor_ranks"] == [2]
    assert forward["input_bool_scalars"] == [1]
    assert forward["input_bool_scalar_positions"] == [1]
    assert forward["input_int_scalars"] == [2]
    assert forward["input_int_scalar_positions"] == [2]
    assert forward["input_float_scalars"] == [0.25]
    assert forward["input_float_scalar_positions"] == [3]
    assert forward["input_int_tuples"] == [1, 2]
    assert forward["input_int_tuple_positions"] == [4]
    assert forward["input_int_tuple_begins"] == [0]
    assert forward["input_pointer_scalars"][1] == id(given)
    assert forward["input_pointer_scalar_positions"] == [5, 6, 7]
    assert forward["output_tensor_types"] == [1]
    assert forward["output_tensor_ranks"] == [2]
    assert forward["training_mode"] == 1
    assert forward["safe_run_mode"] == 1
    assert forward["comment"] == b"Arguments and results that are no tensors."
    assert forward["tensor_reuse_map"] == [-1, -1]
    assert (forward["in"], forward["out"]) == (1, 2)
    assert backward["func_name"] == b"custom_functions.Mixed"
    assert backward["bw_tensor_reuse_map"] == [-1]
    assert (backward["in"], backward["out"]) == (2, 1)


def test_declared_reuse_of_memory(saved, compare):
    class Reusing(F.AddsOne):
        @staticmethod
        def alias_input(node_proto_str):
            assert "Reusing" in node_proto_str
            return [-1, 0], [0]

    (forward,), (backward,) = saved(lambda x: Reusing.apply(x * 2))
    assert forward["tensor_reuse_map"] == [-1, 0]
    assert backward["bw_tensor_reuse_map"] == [0]
    torch_ort.reset_counters()
    compare(lambda x: Reusing.apply(x * 2))


@pytest.mark.hands_over("the Function is refused")
@pytest.mark.parametrize(
    ("maps", "words"),
    [
        (([-1], [0]), "got 1 entries for forward, want 2: one for the context"),
        (([-1, 7], [0]), r"got \[-1, 7\] for forward, want the positions of arguments"),
    ],
)
def test_wrong_reuse_of_memory(maps, words):
    class Wrong(F.AddsOne):
        @staticmethod
        def alias_input(node_proto_str):
            return maps

    with pytest.raises(Exception, match=words):
        ORTModule(Net(lambda x: Wrong.apply(x * 2)))(torch.randn(4, 6))


def test_copies_of_written_arguments_are_said_once(caplog, maker):
    class Writing(F.AddsOne):
        pass

    Writing.__qualname__ += f", {maker}"
    for _ in range(2):
        ORTModule(Net(lambda x: Writing.apply(x * 2)))(torch.randn(4, 6))
    said = [r.getMessage() for r in caplog.records if "mark_dirty" in r.getMessage()]
    assert len(said) == 1
    assert "declare what may be written over in its alias_input" in said[0]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", "0"),
        ("ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", "1"),
        ("ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS", "other.Name, custom_functions.Squared"),
    ],
)
def test_switches_trace_functions_through(saved, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert saved(F.Squared.apply) == ([], [])
    assert torch_ort.counters()["steps_python"] == 0


def test_switch_of_the_process(saved):
    enable_custom_autograd_support(False)
    try:
        assert saved(F.Squared.apply) == ([], [])
    finally:
        capturing.switch(None)


def test_functions_of_pytorch_are_traced_through(saved):
    operator = torch.ops.torch_ort_function_tests
    library = torch.library.Library("torch_ort_function_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("torch_ort_function_tests::twice", lambda x: x * 2, lib=library)
    torch.library.register_autograd(
        "torch_ort_function_tests::twice", lambda ctx, grad: grad * 2, lib=library
    )
    try:
        assert saved(lambda x: operator.twice(x)) == ([], [])
    finally:
        library._destroy()


def test_a_graph_from_a_file_cannot_call_functions(tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        test (float[2] x) => (float[2] y)
        <int64 ctx>
        {
           ctx, y = com.microsoft.PythonOp <func_name = "a.B", function = 987654> (x)
        }
    """)
    data = model.SerializeToString()
    words = (
        "file: operator of node 'ctx': got com.microsoft.PythonOp, which runs Python code, want "
        r"one that only computes; allow=\['com.microsoft.PythonOp'\] lets files run it"
    )
    with pytest.raises(torch_ort.UserError, match=words):
        torch_ort._C.Graph.from_onnx(data)
    graph = torch_ort._C.Graph.from_onnx(data, allow=["com.microsoft.PythonOp"])
    with pytest.raises(torch_ort.UserError, match="no Function has the key 987654"):
        torch_ort._C.run(graph, {"x": torch.ones(2)})


def test_bound_names_and_subclasses():
    bound = F.Squared.apply

    class Derived(F.Squared):
        pass

    ours = ORTModule(Net(lambda x: bound(x) + Derived.apply(x)))
    ours(torch.randn(4, 6))
    assert torch_ort.counters()["steps_python"] == 2


def test_functions_run_as_they_are_outside_of_captures():
    class Seen(Function):
        modes: ClassVar[list] = []

        @staticmethod
        def forward(ctx, x):
            Seen.modes.append(type(x))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad

    ORTModule(Net(Seen.apply))(torch.randn(4, 6))
    Seen.modes.clear()
    Seen.apply(torch.ones(2))
    assert Seen.modes == [torch.Tensor]
