"""The table of products."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def products(load_script):
    for name in ("models", "onednn"):  # which it imports
        load_script(name)
    return load_script("products")


def test_products_of_a_model_are_listed(products):
    listed = products.products_of(["mlp"])
    assert (1, 64, 512, 1024, "NT") in listed  # the first layer
    assert (1, 1024, 64, 512, "TN") in listed  # the gradient of its weight


def test_a_table(products, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(products, "SHAPES", ((32, 64, 64), (8, 16, 24)))
    file = tmp_path / "products.json"
    assert products.main(["--threads", "1", "--turns", "2", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]["1"]
    assert [(row["m"], row["form"]) for row in rows] == [
        (m, form) for m in (32, 8) for form in ("NT", "NN", "TN")
    ]
    assert all(len(row["ours"]) == len(row["pytorch"]) == 2 for row in rows)
    text = capsys.readouterr().out
    assert "32×64×64" in text
    assert "times PyTorch's speed" in text


def test_cold_products_go_through_many_factors(products, monkeypatch, capsys):
    monkeypatch.setattr(products, "SHAPES", ((8, 16, 24),))
    monkeypatch.setattr(products, "COLD_BYTES", 10_000)
    measured = products.matrix
    made = []
    monkeypatch.setattr(products, "matrix", lambda *args: made.append(args) or measured(*args))
    assert products.main(["--threads", "1", "--turns", "2", "--cold"]) == 0
    assert len(made) == 3 * 2 * 4  # three forms, two factors, of 2,432 bytes with their result
    assert "; cold" in capsys.readouterr().out
