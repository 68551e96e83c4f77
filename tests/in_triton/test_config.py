"""ORTMODULE_TRITON_CONFIG_FILE: what it says, and what it cannot say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import regions

import torch_ort
from torch_ort import _C
from torch_ort.triton import config

# That of ONNX Runtime Training's documentation, with its words of Python.
SAMPLE = """
{
"ops": {
"Add": {"versions": [13, 14]},
"Sub": {"versions": [13, 14]},
"Identity": {"versions": [13], "is_no_op": True},
"ReduceSum": {"versions": [13], "conditions": {"axes": "[-1]"}},
"Softmax": {"versions": [13]},
"SoftmaxGrad_13": {"domain": "com.microsoft", "versions": [1]}
},
"initializer": "scalar",
"min_nodes": 2
}
"""


def read(text: str, tmp_path: Path) -> config.Config:
    path = tmp_path / "triton_config.json"
    path.write_text(text)
    return config.read(str(path))


def body_of(*nodes: str, constants: tuple[str, ...] = ()) -> _C.Graph:
    """Give the body of the region that nodes from x and y to `out` are fused into."""
    graph = regions.read(
        {"x": "float[4,6]", "y": "float[4,6]"}, nodes, ["out"], constants=constants
    )
    return regions.fused(graph).nodes()[0]["attrs"]["body"]


AXES = ("int64[1] last = {1}", "int64[1] first = {0}")
SUM = ("a = Add(x, y)", "out = ReduceSum <keepdims = 1> (a, {})")


def test_the_sample(tmp_path):
    asked = read(SAMPLE, tmp_path)
    assert asked.min_nodes == 2
    assert asked.ops["Identity"].is_no_op
    assert asked.ops["SoftmaxGrad_13"].domain == "com.microsoft"


@pytest.mark.parametrize(
    ("nodes", "is_taken"),
    [
        (("a = Add(x, y)", "out = Sub(a, x)"), True),
        (("a = Add(x, y)", "out = Mul(a, x)"), False),
        ((SUM[0], SUM[1].format("last")), True),
        ((SUM[0], SUM[1].format("first")), False),
    ],
    ids=["listed", "one is not listed", "along the last axis", "along another axis"],
)
def test_which_regions_it_takes(nodes, is_taken, tmp_path):
    body = body_of(*nodes, constants=AXES)
    assert read(SAMPLE, tmp_path).takes(body) == is_taken
    assert config.Config().takes(body)


def test_what_an_operator_was_taken_apart_into(tmp_path):
    nodes = ["softmax = Softmax <axis = 1> (x)", "out = Add(softmax, x)"]
    graph = regions.read({"x": "float[4,6]"}, nodes, ["out"])
    _C.run_pass("expand_composites", graph)
    body = regions.fused(graph).nodes()[0]["attrs"]["body"]
    assert "Softmax" not in regions.ops(body)
    assert read(SAMPLE, tmp_path).takes(body)
    assert not read('{"ops": {"Add": {"versions": [14]}}}', tmp_path).takes(body)


@pytest.mark.parametrize(
    ("of_op", "of_file", "is_taken"),
    [
        ({}, {}, True),
        ({"versions": [1, 6]}, {}, False),
        ({"domain": "com.microsoft"}, {}, False),
        ({}, {"min_nodes": 3}, False),
        ({"is_no_op": True}, {}, False),
        ({"is_no_op": True, "ignore_min_nodes": True}, {}, True),
    ],
)
def test_versions_domains_and_numbers_of_nodes(of_op, of_file, is_taken, tmp_path):
    ops = {"Add": {"versions": [13, 14]} | of_op, "Sub": {"versions": [14]}}
    asked = read(json.dumps({"ops": ops} | of_file), tmp_path)
    assert asked.takes(body_of("a = Add(x, y)", "out = Sub(a, x)")) == is_taken


@pytest.mark.parametrize(("initializer", "is_taken"), [("none", False), ("scalar", True)])
def test_constants(initializer, is_taken, tmp_path):
    ops = {"Add": {"versions": [14]}, "Mul": {"versions": [14]}}
    asked = read(json.dumps({"ops": ops, "initializer": initializer}), tmp_path)
    body = body_of("a = Add(x, y)", "out = Mul(a, half)", constants=("float half = {0.5}",))
    assert asked.takes(body) == is_taken


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "triton_config.json: Expecting property name"),
        ("[1]", r"the file: got \[1\], want a dict"),
        ("{}", "ops: got None, want a dict of operators"),
        ('{"ops": {}, "min_node": 1}', "min_node: got 1, want one of initializer, min_nodes, ops"),
        ('{"ops": {}, "min_nodes": 0}', "min_nodes: got 0, want an integer of 1 or more"),
        ('{"ops": {}, "initializer": "some"}', "initializer: got 'some', want none, scalar, all"),
        ('{"ops": {"Add": {}}}', "ops.Add.versions: got None, want a list of integers"),
        ('{"ops": {"Add": {"versions": [1], "axis": 0}}}', "ops.Add.axis: got 0, want one of"),
        ('{"ops": {"Add": {"versions": [1], "is_no_op": 1}}}', "is_no_op: got 1, want a bool"),
        ('{"ops": {"Add": {"versions": [1], "domain": 1}}}', "domain: got 1, want a string"),
        (
            '{"ops": {"Add": {"versions": [1], "conditions": {"axes": "last"}}}}',
            "ops.Add.conditions.axes: got 'last', want an axis such as",
        ),
        (
            '{"ops": {"Add": {"versions": [1], "conditions": {"keepdims": "1"}}}}',
            "ops.Add.conditions.keepdims: got '1', want one of axes, axis",
        ),
    ],
)
def test_what_cannot_be_read(text, words, tmp_path):
    with pytest.raises(torch_ort.UserError, match=words):
        read(text, tmp_path)


def test_no_file(tmp_path):
    with pytest.raises(torch_ort.UserError, match=r"nowhere\.json: No such file"):
        config.read(str(tmp_path / "nowhere.json"))
