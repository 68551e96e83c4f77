"""The command that compares two runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from torch_ort.convergence import GlobalSubscriberManager, StatisticsSubscriber
from torch_ort.onnxruntime_training.convergence.merge_activation_summary import (
    main,
    pairs_of,
    read_run,
)

pytestmark = pytest.mark.ort_only


class Model(nn.Module):
    """Has a layer that a switch leaves out, and one that a switch changes."""

    def __init__(self, has_extra=True, factor=1.0):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.extra = nn.Tanh()
        self.scaled = Scale(factor)
        self.has_extra = has_extra

    def forward(self, x):
        x = self.layer(x)
        return self.scaled(self.extra(x) if self.has_extra else x.tanh())


class Scale(nn.Module):
    """Multiplies."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def train(folder, way, steps=2, **settings):
    torch.manual_seed(0)
    model = Model(**settings)
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(folder)])
    wrapped = way(model)
    for _ in range(steps):
        wrapped(torch.randn(2, 4)).sum().backward()
    GlobalSubscriberManager.unsubscribe()


def merge(folder):
    names = {"--pt_dir": "pt", "--ort_dir": "ort", "--output_dir": "out"}
    return main([text for key, name in names.items() for text in (key, str(folder / name))])


def rows_of(lines):
    """Read the rows of tables, by their first column."""
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line]
    return {row[0]: row[1:] for row in cells}


ORDER = [
    "Model.layer forward", "Model.extra forward", "Model.scaled forward", "Model forward",
    "Model backward", "Model.scaled backward", "Model.extra backward", "Model.layer backward",
]  # fmt: skip


def test_equal_runs(graph_way, ways, tmp_path, capsys):
    train(tmp_path / "pt", ways["eager"])
    train(tmp_path / "ort", graph_way)
    assert merge(tmp_path) == 0
    assert str(tmp_path / "out" / "summary.txt") in capsys.readouterr().out
    text = (tmp_path / "out" / "summary.txt").read_text()
    assert "missing" not in text
    assert "differs" not in text
    tables = text.split("step 1")
    assert tables[0].startswith("step 0")
    for table in tables:
        rows = rows_of(table.splitlines())
        assert list(rows) == ["activation", *ORDER]
        for label in ORDER:
            assert max(map(float, rows[label][:4])) < 1e-5


def test_merged_files_stand_side_by_side(ways, tmp_path):
    train(tmp_path / "pt", ways["eager"])
    train(tmp_path / "ort", ways["eager"], factor=3.0)
    merge(tmp_path)
    records = [read_run(tmp_path / side)[1]["Scale_3_0th_output_forward"] for side in ("pt", "ort")]
    text = (tmp_path / "out" / "step_1" / "Scale_3_0th_output_forward").read_text()
    assert text.startswith("Model.scaled forward\n")
    rows = rows_of(text.splitlines())
    assert rows[""] == ["pt", "ort", "difference"]
    for key in ("min", "max", "mean", "std"):
        a, b = (float(record.fields[key]) for record in records)
        assert rows[key] == [str(a), str(b), str(abs(a - b))]
    for i, values in enumerate(zip(*(record.values for record in records), strict=True)):
        assert rows[f"value {i}"][:2] == list(values)
    assert rows["shape"] == ["[2, 4]", "[2, 4]"]
    assert len(list((tmp_path / "out" / "step_1").iterdir())) == len(ORDER)


def test_the_first_difference_is_where_it_begins(ways, tmp_path):
    train(tmp_path / "pt", ways["eager"])
    train(tmp_path / "ort", ways["ortmodule"], factor=3.0)
    merge(tmp_path)
    text = (tmp_path / "out" / "summary.txt").read_text().split("step 1")[0]
    rows = rows_of(text.splitlines())
    apart = [label for label in ORDER if max(map(float, rows[label][:4])) > 1e-4]
    assert apart == [
        "Model.scaled forward", "Model forward", "Model.extra backward", "Model.layer backward"
    ]  # fmt: skip


def test_missing_activations_are_named(ways, tmp_path):
    train(tmp_path / "pt", ways["eager"])
    train(tmp_path / "ort", ways["ortmodule"], has_extra=False)
    merge(tmp_path)
    text = (tmp_path / "out" / "summary.txt").read_text()
    assert "missing in the ort run:\n  Model.extra forward\n  Model.extra backward\n" in text
    assert "missing in the pt run" not in text
    assert rows_of(text.splitlines())["Model.extra forward"] == ["-"] * 4 + ["only in pt"]
    merged = (tmp_path / "out" / "step_0" / "Tanh_2_0th_output_forward").read_text()
    assert rows_of(merged.splitlines())["mean"][1] == "missing"


def test_activations_of_the_engine_alone_are_named(ways, tmp_path):
    train(tmp_path / "pt", ways["eager"], has_extra=False)
    train(tmp_path / "ort", ways["eager"])
    merge(tmp_path)
    text = (tmp_path / "out" / "summary.txt").read_text()
    assert "missing in the pt run:\n  Model.extra forward\n  Model.extra backward\n" in text
    assert rows_of(text.splitlines())["Model.extra backward"][-1] == "only in ort"


def test_missing_steps_are_named(ways, tmp_path):
    train(tmp_path / "pt", ways["eager"], steps=1)
    train(tmp_path / "ort", ways["eager"], steps=2)
    merge(tmp_path)
    text = (tmp_path / "out" / "summary.txt").read_text()
    assert "step 1\n\nthe pt run has no such step\n" in text
    assert text.count("has no such step") == 1


def write(folder, tensor, name="x"):
    StatisticsSubscriber(folder, override_output_dir=True).forward_activation(name, tensor, 0, 0)


@pytest.mark.parametrize(
    ("pt", "ort", "remark"),
    [
        (torch.ones(2), torch.ones(3), "shape differs"),
        (torch.ones(2), torch.ones(2).double(), "dtype differs"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan]), "nan differs"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.inf]), "inf differs"),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), ""),
        (torch.tensor([torch.inf]), torch.tensor([torch.inf]), ""),
        (torch.empty(0), torch.empty(0), ""),
        (torch.tensor([True]), torch.tensor([True]), ""),
        (torch.tensor([1j]), torch.tensor([1j]), ""),
    ],
)
def test_remarks_and_odd_numbers(pt, ort, remark, tmp_path):
    write(tmp_path / "pt", pt)
    write(tmp_path / "ort", ort)
    merge(tmp_path)
    rows = rows_of((tmp_path / "out" / "summary.txt").read_text().splitlines())
    numbers, said = rows["x forward"][:4], "".join(rows["x forward"][4:])
    assert said == remark
    if not remark:
        assert numbers == ["0"] * 4


def test_pairs_follow_the_order_of_pytorch(tmp_path):
    for side, names in (("pt", "bca"), ("ort", "abc")):
        subscriber = StatisticsSubscriber(tmp_path / side)
        for name in names:
            subscriber.forward_activation(name, torch.ones(1), 0, 0)
    runs = [read_run(tmp_path / side)[0] for side in ("pt", "ort")]
    assert [pair.file[0] for pair in pairs_of(*runs)] == ["b", "c", "a"]


def test_other_files_are_left_out(tmp_path):
    for side in ("pt", "ort"):
        write(tmp_path / side, torch.ones(1))
        (tmp_path / side / "step_0" / "notes.txt").write_text("mine")
        (tmp_path / side / "step_last").mkdir()
    merge(tmp_path)
    assert [path.name for path in (tmp_path / "out" / "step_0").iterdir()] == ["x_forward"]


def assert_refused(folder, capsys, words, code=2):
    with pytest.raises(SystemExit) as error:
        merge(folder)
    said = capsys.readouterr().err if code == 2 else error.value.code
    assert words in said
    if code == 2:
        assert error.value.code == 2


def test_missing_folders_are_refused(tmp_path, capsys):
    assert_refused(tmp_path, capsys, f"--pt_dir: got '{tmp_path / 'pt'}', which is no folder")
    write(tmp_path / "pt", torch.ones(1))
    assert_refused(tmp_path, capsys, f"--ort_dir: got '{tmp_path / 'ort'}', which is no folder")
    assert not (tmp_path / "out").exists()


def test_an_existing_output_is_refused(tmp_path, capsys):
    for name in ("pt", "ort", "out"):
        write(tmp_path / name, torch.ones(1))
    assert_refused(tmp_path, capsys, f"--output_dir: '{tmp_path / 'out'}' exists")


def test_folders_without_steps_are_refused(tmp_path, capsys):
    write(tmp_path / "pt", torch.ones(1))
    (tmp_path / "ort").mkdir()
    words = f"error: --ort_dir: got no folder 'step_N' in '{tmp_path / 'ort'}'"
    assert_refused(tmp_path, capsys, words, code=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "", "got no line 'activation:'"),
        (lambda text: text.replace("mean:", "men:"), "got no line 'mean:'"),
        (lambda text: text.replace("mean: 1.0", "mean: one"), "could not convert string to float"),
        (lambda text: text.replace("order: 0", "order: x"), "invalid literal for int()"),
    ],
)
def test_damaged_files_are_refused(change, words, tmp_path, capsys):
    for side in ("pt", "ort"):
        write(tmp_path / side, torch.ones(1))
    path = tmp_path / "ort" / "step_0" / "x_forward"
    path.write_text(change(path.read_text()))
    assert_refused(tmp_path, capsys, words, code=1)
    assert not (tmp_path / "out").exists()


def test_a_merge_is_overwritten_where_that_is_asked(tmp_path, capsys):
    for side, value in (("pt", 1.0), ("ort", 1.0), ("other", 2.0)):
        write(tmp_path / side, torch.full((1,), value))
    out = tmp_path / "out"
    arguments = ["--pt_dir", f"{tmp_path}/pt", "--output_dir", f"{out}", "--overwrite"]
    assert main([*arguments, "--ort_dir", f"{tmp_path}/ort"]) == 0
    (out / "step_0" / "old_forward").touch()
    assert main([*arguments, "--ort_dir", f"{tmp_path}/other"]) == 0
    assert [path.name for path in (out / "step_0").iterdir()] == ["x_forward"]
    assert "2.0" in (out / "step_0" / "x_forward").read_text()
    (out / "summary.txt").unlink()
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--ort_dir", f"{tmp_path}/ort"])
    words = f"--output_dir: '{out}' has no summary.txt, so it is not overwritten"
    assert words in capsys.readouterr().err
    assert (out / "step_0").is_dir()


COMMAND = [sys.executable, "-m", "torch_ort.convergence.merge_activation_summary"]


def test_the_command(tmp_path):
    write(tmp_path / "pt", torch.ones(1))
    arguments = ["--pt_dir", "pt", "--ort_dir", "pt", "--output_dir", "out"]
    run = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, "wrote out/summary.txt"), run.stderr
    again = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2
    assert "Traceback" not in again.stderr


def test_the_command_names_a_missing_argument(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--pt_dir", "x"])
    assert "--ort_dir, --output_dir" in capsys.readouterr().err
