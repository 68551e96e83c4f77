# The BERT example: its losses against eager's, with a BERT of a folder and with one of its own.
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.hf

WORDS = ["the", "of", "and", "to", "i", "my", "you", "that", "is", "not", "with", "it", "be"]


@pytest.fixture
def tiny_bert(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS]))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("has_folder", [True, False])
def test_learns_as_eager_does(
    load_example: Callable, tiny_bert: Path, capsys: pytest.CaptureFixture, has_folder: bool
) -> None:
    program = load_example("ortmodule_bert.py")
    arguments = ["--steps", 5, "--batch-size", 8, "--test-lines", 64, "--lr", 1e-4]
    if has_folder:
        arguments += ["--model", tiny_bert]
    assert program.main([*map(str, arguments)]) == 0
    out = capsys.readouterr().out
    losses = [float(text) for text in re.findall(r"loss ([\d.]+) to", out)]
    assert len(losses) == 2
    assert losses[1] == pytest.approx(losses[0], abs=0.05)  # dropout masks differ
    assert re.search(r"accuracy: ORTModule [\d.]+%, eager [\d.]+% \([-+][\d.]+ points\)", out)
    assert "engine: fallbacks 0," in out


def test_a_missing_folder_is_named(load_example: Callable, capsys: pytest.CaptureFixture) -> None:
    program = load_example("ortmodule_bert.py")
    with pytest.raises(SystemExit):
        program.main(["--model", "nowhere"])
    assert "--model: no such folder: nowhere" in capsys.readouterr().err
