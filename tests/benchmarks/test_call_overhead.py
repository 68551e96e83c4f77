"""The table of what a call costs."""

from __future__ import annotations

import json

import torch


def test_a_table(load_script, tmp_path, capsys):
    script = load_script("call_overhead")
    file = tmp_path / "call_overhead.json"
    threads = str(torch.get_num_threads())
    script.main(["--rows", "4", "--turns", "3", "--threads", threads, "--json", str(file)])
    figures = json.loads(file.read_text())
    assert set(figures["calls"]) == set(figures["parts"]) == {"inference", "training"}
    for ways in figures["calls"].values():
        assert tuple(ways) == script.WAYS
        assert all(0 < least <= middle for least, middle in ways.values())
    assert all(parts["kernels"] > 0 for parts in figures["parts"].values())
    assert "Dynamo's guards" in capsys.readouterr().out
