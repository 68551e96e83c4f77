"""Random model files end in results or in errors that say what is wrong: fixed seeds, each time."""

from __future__ import annotations

import pathlib

import files
import files_corpus
import pytest
from files_worker import changed, steps_of

pytestmark = pytest.mark.ort_only

# Seeds of the normal run; `make fuzz` takes others.
FIRST, COUNT = 0, 6000
# Of those that are trained as modules, each of which PyTorch runs.
TRAINED = 1500


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("fuzz") / "corpus.pt"
    files.make_corpus(path)
    return path


def test_changed_files_end_in_errors_that_name_what_is_wrong(corpus: pathlib.Path) -> None:
    run = files.Run(corpus)
    run.batch(FIRST, COUNT)
    assert run.finds == {}, run.counts
    assert run.next_seed == FIRST + COUNT
    assert run.counts["works"] > COUNT / 20, run.counts
    assert run.counts["read UserError"] > COUNT / 20, run.counts
    assert run.counts["run UserError"] > COUNT / 50, run.counts


def test_changed_files_train_or_end_in_errors(corpus: pathlib.Path) -> None:
    run = files.Run(corpus, "trained")
    run.batch(FIRST, TRAINED)
    assert run.finds == {}, run.counts
    assert run.next_seed == FIRST + TRAINED
    assert run.counts["works"] > TRAINED / 50, run.counts
    assert run.counts["load UserError"] > TRAINED / 20, run.counts


def test_numbers_are_those_of_onnx(corpus: pathlib.Path) -> None:
    with files.work("numbers", corpus) as process:
        lines = process.communicate()[0].splitlines()
    assert process.returncode == 0, lines[-1:]
    outcomes = dict(line.split(" ", 1) for line in lines)
    wrong = {
        name: what
        for name, what in outcomes.items()
        if what.startswith("wrong") or files.fault(what) is not None
    }
    assert wrong == {}
    assert sum(what == "works" for what in outcomes.values()) > 300


def test_seeds_reproduce(corpus: pathlib.Path) -> None:
    models = files_corpus.load(corpus)

    def data_of(seed: int) -> bytes:
        name, steps = steps_of(seed, models)
        return changed(models[name].proto(), steps)

    made = [data_of(seed) for seed in range(FIRST, FIRST + 20)]
    assert made == [data_of(seed) for seed in range(FIRST, FIRST + 20)]
    assert len(set(made)) == 20


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("works", None),
        ("read UserError: onnx: model: got no graph, want an ONNX model", None),
        ("run RuntimeError: mat1 and mat2 shapes cannot be multiplied", None),
        ("read RuntimeError: bad", "read RuntimeError: bad"),
        ("run InternalError: value 'x' is lost", "run InternalError: value _ is lost"),
        ("run UserError: std::get: wrong index", "run UserError: std::get: wrong index"),
    ],
)
def test_outcomes_are_judged(line: str, what: str | None) -> None:
    fault = files.fault(line)
    assert (fault and fault.replace("  ", " ")) == (what and what.replace("  ", " "))
