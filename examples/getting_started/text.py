"""Text for the language models: reading, splitting into words, vocabulary and batches."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PLAYS = Path(__file__).resolve().parent.parent / "data" / "plays"
VALIDATION_PLAY = "tempest.txt"
TEST_PLAY = "twelfth_night.txt"

# Basic English: quotes vanish, colons and semicolons end a word, other marks are words themselves.
MARKS = str.maketrans(
    {'"': "", ";": " ", ":": " "} | {mark: f" {mark} " for mark in "'.,()!?"},
)
UNKNOWN = "<unk>"


class TextError(ValueError):
    """The text cannot be used as it is; the message says why."""


class Splits(NamedTuple):
    """One item for each part of the data."""

    train: str
    valid: str
    test: str


def tokenize(text: str) -> list[str]:
    """Split text into lower-case words and marks."""
    return text.lower().translate(MARKS).split()


class Vocabulary:
    """Words with their numbers, the frequent ones first; number 0 stands for all others."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.numbers = {word: number for number, word in enumerate(words)}

    @classmethod
    def of(cls, tokens: list[str], min_frequency: int = 1) -> "Vocabulary":
        """Build the vocabulary of the words that occur at least `min_frequency` times."""
        counts = Counter(tokens)
        del counts[UNKNOWN]
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls([UNKNOWN] + [word for word, count in ranked if count >= min_frequency])

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, tokens: list[str]) -> Tensor:
        """Return the numbers of the words, int64 [len(tokens)]."""
        return torch.tensor([self.numbers.get(token, 0) for token in tokens], dtype=torch.int64)


def read_text(path: Path) -> str:
    """Read one UTF-8 file; raises TextError if it is missing, empty or not text."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TextError(f"data: no such file: {path}") from None
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x} at {error.start}"
        raise TextError(f"data: {path} is not UTF-8 text: {byte}") from None
    except OSError as error:
        raise TextError(f"data: cannot read {path}: {error.strerror}") from None
    if not text.strip():
        raise TextError(f"data: {path} is empty, want some text")
    return text


def read_splits(path: Path = PLAYS) -> Splits:
    """Read a file or folder as training, validation and test text.

    A folder in the Wikitext-2 layout (train.txt, valid.txt, test.txt or wiki.*.tokens) is split as
    its files say, the plays by title; any other text is cut at 80% and 90% of its lines.
    Raises TextError if something is missing, empty or not text.
    """
    if not path.exists():
        raise TextError(f"data: no such file or folder: {path}")
    if path.is_file():
        return cut(read_text(path))
    for layout in ("{}.txt", "wiki.{}.tokens"):
        names = [layout.format(part) for part in Splits._fields]
        if (path / names[0]).exists():
            return Splits(*(read_text(path / name) for name in names))
    files = sorted(path.glob("*.txt"))
    if not files:
        raise TextError(f"data: {path} holds no .txt file and no wiki.train.tokens")
    if path.resolve() != PLAYS:
        return cut("\n".join(read_text(file) for file in files))
    train = [file for file in files if file.name not in (VALIDATION_PLAY, TEST_PLAY)]
    return Splits(
        "\n".join(read_text(file) for file in train),
        read_text(path / VALIDATION_PLAY),
        read_text(path / TEST_PLAY),
    )


def cut(text: str) -> Splits:
    """Cut one text into 80% training, 10% validation and 10% test, by lines."""
    lines = text.splitlines(keepends=True)
    first, second = len(lines) * 8 // 10, len(lines) * 9 // 10
    return Splits("".join(lines[:first]), "".join(lines[first:second]), "".join(lines[second:]))


def columns(numbers: Tensor, batch_size: int) -> Tensor:
    """Cut a text into `batch_size` columns that are read side by side.

    Maps [words] to [words // batch_size, batch_size]; the rest at the end is left out.
    Raises TextError if that leaves no word to predict.
    """
    length = len(numbers) // batch_size
    if length < 2:
        raise TextError(
            f"data: too little text: got {len(numbers)} words in one part, want at least"
            f" {2 * batch_size} for a batch size of {batch_size}"
        )
    return numbers[: length * batch_size].view(batch_size, length).t().contiguous()


def batches(text: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs [up to length, batch] with the words that follow them, flattened."""
    for start in range(0, len(text) - 1, length):
        end = min(start + length, len(text) - 1)
        yield text[start:end], text[start + 1 : end + 1].reshape(-1)
