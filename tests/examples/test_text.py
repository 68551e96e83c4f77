# The text of the language models: words, vocabulary, folders, batches.
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def text(load_example: Callable) -> ModuleType:
    return load_example("getting_started/text.py")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Good boatswain, have care.", ["good", "boatswain", ",", "have", "care", "."]),
        ("fall to't yarely", ["fall", "to", "'", "t", "yarely"]),
        ('He said: "no"; (and left)!', ["he", "said", "no", "(", "and", "left", ")", "!"]),
        ("the <unk> @-@ of\n\n1901 = ", ["the", "<unk>", "@-@", "of", "1901", "="]),
        ("", []),
    ],
)
def test_tokenize(text: ModuleType, line: str, words: list[str]) -> None:
    assert text.tokenize(line) == words


def test_vocabulary_ranks_by_frequency_then_by_letters(text: ModuleType) -> None:
    tokens = text.tokenize("b a b c a <unk> <unk> <unk> d")
    vocabulary = text.Vocabulary.of(tokens, min_frequency=2)
    assert vocabulary.words == ["<unk>", "a", "b"]
    assert vocabulary.encode(["b", "d", "<unk>", "a"]).tolist() == [2, 0, 0, 1]


def test_plays_are_split_by_title(text: ModuleType) -> None:
    splits = text.read_splits()
    assert splits.valid.startswith("THE TEMPEST")
    assert "Illyria" in splits.test
    assert "Illyria, Lady" not in splits.train
    assert "DUNCAN" in splits.train
    assert len(splits.train) > 7 * len(splits.test)


@pytest.mark.parametrize("layout", ["{}.txt", "wiki.{}.tokens"])
def test_wikitext_layouts(text: ModuleType, tmp_path: Path, layout: str) -> None:
    for part in ("train", "valid", "test"):
        (tmp_path / layout.format(part)).write_text(f"words to {part}")
    assert text.read_splits(tmp_path) == ("words to train", "words to valid", "words to test")


def test_other_text_is_cut_by_lines(text: ModuleType, tmp_path: Path) -> None:
    lines = [f"line {number}\n" for number in range(10)]
    file = tmp_path / "b.txt"
    file.write_text("".join(lines))
    want = ("".join(lines[:8]), lines[8], lines[9])
    assert text.read_splits(file) == want
    (tmp_path / "a.txt").write_text("first\n")
    assert text.read_splits(tmp_path).train.startswith("first\n")


def test_targets_are_the_next_words(text: ModuleType) -> None:
    columns = text.columns(torch.arange(23), 2)
    assert columns.shape == (11, 2)
    parts = list(text.batches(columns, 4))
    assert [words.shape for words, _ in parts] == [(4, 2), (4, 2), (2, 2)]
    for words, targets in parts:
        assert torch.equal(targets, words.reshape(-1) + 1)
    assert sum(len(targets) for _, targets in parts) == columns[1:].numel()
