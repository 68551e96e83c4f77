"""The tables of convolutions."""

from __future__ import annotations

import json

import pytest
import torch


@pytest.fixture
def convolutions(load_script):
    load_script("models")  # which it imports
    return load_script("convolutions")


@pytest.mark.usefixtures("few_registers")
def test_a_table(convolutions, tmp_path, capsys):
    file = tmp_path / "convolutions.json"
    threads = str(torch.get_num_threads())
    convolutions.main(
        ["--models", "mobilenet", "--steps", "2", "--threads", threads, "--json", str(file)]
    )
    layers = json.loads(file.read_text())["layers"]
    depthwise = [each for each in layers if each["is_depthwise"]]
    assert {each["op"] for each in depthwise} == {
        "torch_ort.DepthwiseConvolution", "torch_ort.DepthwiseWeightGrad"
    }  # fmt: skip
    assert {each["half"] for each in layers} == {"forward", "backward"}
    assert all(each["least"] > 0 for each in layers)
    text = capsys.readouterr().out
    assert f"{len(layers) - len(depthwise)} layers: " in text
    assert f"{len(depthwise)} depthwise ones: " in text


def test_winograd_counts_by_the_definition(convolutions):
    class Step:
        op, flops = "torch_ort.WinogradConvolution", 16

    assert convolutions.definition_flops(Step()) == 36
    Step.op = "aten::convolution"
    assert convolutions.definition_flops(Step()) == 16
