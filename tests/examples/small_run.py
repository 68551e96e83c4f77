# A text and a model small enough for seconds, and where the examples are.
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SMALL_MODEL = (
    *("--width", "16", "--hidden", "16", "--layers", "1"),
    *("--batch-size", "4", "--bptt", "8", "--min-frequency", "1"),
)


def write_small_text(folder: Path) -> Path:
    """Write the Wikitext-2 layout: 150 lines of a play to train on, 30 each to judge by."""
    lines = (EXAMPLES / "data" / "plays" / "hamlet.txt").read_text().splitlines(keepends=True)
    folder.mkdir()
    for name, first, last in (("train", 200, 350), ("valid", 400, 430), ("test", 500, 530)):
        (folder / f"{name}.txt").write_text("".join(lines[first:last]))
    return folder
