"""ORTMODULE_PRINT_INPUT_DENSITY: which inputs are inspected, what is counted, how it is printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import module_with
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ort
from torch_ort import DebugOptions, ORTModule
from torch_ort.capture import input_density

pytestmark = [pytest.mark.ort_only, pytest.mark.compile_only("switches of both roads")]

WORDS, WIDTH, PADDING, IGNORED = 11, 8, 1, -100
ON = {"print_input_density": True}
ROADS = {
    "compile": lambda module: torch.compile(module, backend="ort", options=ON),
    "dynamic": lambda module: torch.compile(module, backend="ort", options=ON, dynamic=True),
    "AOTAutograd": lambda module: torch.compile(
        module, backend="ort", options={**ON, "disable": "recorder"}, dynamic=True
    ),
    "ortmodule": lambda module: ORTModule(module, DebugOptions(config=ON)),
}
HANDED = pytest.mark.hands_over("Dynamo gives the embedding's padding_idx as a tensor")
ROAD_NAMES = [pytest.param(name, marks=HANDED if name == "dynamic" else []) for name in ROADS]


@pytest.fixture(autouse=True)
def table(monkeypatch) -> None:
    """Count from 0 in each test."""
    monkeypatch.setattr(input_density, "_table", input_density.Table())


@pytest.fixture
def rows(capsys) -> Callable[[], list[list[str]]]:
    """Return a function that gives the cells of the rows that were counted."""

    def found() -> list[list[str]]:
        lines = capsys.readouterr().out.splitlines()
        printed = [line for line in lines if line.startswith("\t|")]
        waiting = input_density._table._rows
        cells = [
            [cell.strip() for cell in line.strip("\t|").split("|")] for line in printed + waiting
        ]
        return [row for row in cells if row[0] != "STEP"]

    return found


class Model(nn.Module):
    """Gives the loss of what follows each word; `shift` makes the labels of it."""

    def __init__(
        self, shift: Callable = lambda labels: labels[:, 1:], padding: int | None = PADDING,
        ignored: int = IGNORED,
    ) -> None:  # fmt: skip
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.classes = nn.Linear(WIDTH, WORDS)
        self.shift, self.ignored = shift, ignored

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        labels = self.shift(labels)
        logits = self.classes(self.words(input_ids))[:, : labels.shape[1]]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=self.ignored)


def batch(lengths: tuple[int, ...] = (5, 2, 3), length: int = 5) -> tuple[Tensor, Tensor]:
    """Give ids with so many words in a row, and labels of which every third is ignored."""
    ids = torch.full((len(lengths), length), PADDING)
    for row, count in zip(ids, lengths, strict=True):
        row[:count] = torch.randint(2, WORDS, (count,))
    labels = torch.randint(WORDS, ids.shape)
    labels.view(-1)[::3] = IGNORED
    return ids, labels


def test_the_table(capsys) -> None:
    model = ROADS["compile"](Model())
    ids, labels = batch()
    for _ in range(5):
        assert capsys.readouterr().out == ""
        model(ids, labels).backward()
    # Of 12 labels behind the first ones, the 4th, 7th, 10th and 13th number of all are ignored,
    # but for those in the first column.
    heads = "STEP       | INPUT TYPE | INPUT NAME      | PAD IDX    | DENSITY    | VALID TOKENS    "
    embed = "EMBED      | input_ids       | 1          | 66.67    % | 10              "
    label = "LABEL      | labels          | -100       | 66.67    % | 8               "
    lines = [">>>Valid token/label density (e.g. valid/total) in passing 10 steps:"]
    lines.append(f"\t| {heads}| TOTAL TOKENS    | VALID TOKENS/BATCH |")
    for step in range(0, 10, 2):
        lines.append(f"\t| {step:<10} | {embed}| 15              | [5, 2, 3]       |")
        lines.append(f"\t| {step + 1:<10} | {label}| 12              | N/A             |")
    assert capsys.readouterr().out == "\n".join([*lines, "<<<"]) + "\n"


@pytest.mark.parametrize("road", ROAD_NAMES)
def test_rows_of_calls_with_other_sizes(road: str, rows: Callable) -> None:
    model = ROADS[road](Model())
    want = []
    for lengths, length in (((5, 2, 3), 5), ((6, 1), 6), ((0, 4, 7, 1), 7)):
        ids, labels = batch(lengths, length)
        model(ids, labels).backward()
        valid, shifted = sum(lengths), labels[:, 1:]
        for cells in (
            ["EMBED", "input_ids", str(PADDING), f"{100 * valid / ids.numel():.2f}    %",
             str(valid), str(ids.numel()), str([*lengths])],
            ["LABEL", "labels", str(IGNORED),
             f"{100 * (shifted != IGNORED).double().mean():.2f}    %",
             str((shifted != IGNORED).sum().item()), str(shifted.numel()), "N/A"],
        ):  # fmt: skip
            want.append([str(len(want)), *cells])
    assert [[cell.replace(" ", "") for cell in row] for row in rows()] == [
        [cell.replace(" ", "") for cell in row] for row in want
    ]
    assert torch_ort.counters()["fallbacks"] == 0


SHIFTS = {
    "whole": lambda labels: labels,
    "slice": lambda labels: labels[..., 1:],
    "every other": lambda labels: labels[:, ::2],
    "padded": lambda labels: F.pad(labels, (0, 1), value=IGNORED)[:, 1:],
    "copied": lambda labels: labels[:, :-1].contiguous().to(torch.int32).long(),
    "flat": lambda labels: labels.reshape(-1)[2:].view(1, -1),
    "by one text": lambda labels: labels[1].unsqueeze(0),
}


@pytest.mark.parametrize("road", ["dynamic", "AOTAutograd", "ortmodule"])
@pytest.mark.parametrize("shift", SHIFTS)
def test_labels_as_the_loss_reads_them(shift: str, road: str, rows: Callable) -> None:
    class Labelled(Model):
        def forward(self, labels: Tensor) -> Tensor:
            read = self.shift(labels).flatten()
            return F.cross_entropy(self.classes(self.words.weight[read.clamp(min=0)]), read)

    _, labels = batch()
    ROADS[road](Labelled(SHIFTS[shift]))(labels).backward()
    read = SHIFTS[shift](labels)
    (row,) = rows()
    assert row[1:3] == ["LABEL", "labels"]
    assert row[5:7] == [str((read != IGNORED).sum().item()), str(read.numel())]


@pytest.mark.parametrize("road", ROAD_NAMES)
@pytest.mark.parametrize(
    "shift",
    [
        lambda labels: labels.t()[1:].t(),  # a part of another order
        lambda labels: labels.masked_fill(labels == 3, IGNORED)[:, 1:],  # made, not given
    ],
)
def test_what_is_not_an_input_alone_is_not_inspected(
    road: str, shift: Callable, rows: Callable
) -> None:
    ROADS[road](Model(shift))(*batch()).backward()
    assert [row[1] for row in rows()] == ["EMBED"]


@pytest.mark.parametrize("road", ROAD_NAMES)
def test_no_padding_and_another_number_that_is_ignored(road: str, rows: Callable) -> None:
    ids, labels = batch()
    labels[labels == IGNORED] = 4
    ROADS[road](Model(padding=None, ignored=4))(ids, labels).backward()
    (row,) = rows()
    assert row[1:4] == ["LABEL", "labels", "4"]
    assert row[5] == str((labels[:, 1:] != 4).sum().item())


@pytest.mark.parametrize("road", ROAD_NAMES)
def test_an_embedding_of_one_dim_and_one_that_is_read_twice(road: str, rows: Callable) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.ModuleList(nn.Embedding(WORDS, WIDTH, padding_idx=i) for i in (1, 1, 2))

        def forward(self, tokens: dict[str, Tensor]) -> Tensor:
            return sum(words(tokens["ids"]).sum() for words in self.words)

    ROADS[road](Twice())({"ids": torch.tensor([1, 2, 2, 5, 1, 1])}).backward()
    found = rows()
    assert [(row[1], row[3], row[5], row[6], row[7]) for row in found] == [
        ("EMBED", "1", "3", "6", "N/A"),
        ("EMBED", "2", "4", "6", "N/A"),
    ]
    assert all("ids" in row[2] for row in found)


@pytest.mark.parametrize("road", ["compile", "ortmodule"])
def test_arguments_that_pass_through_keywords_have_their_names(road: str, rows: Callable) -> None:
    ids, labels = batch()
    ROADS[road](module_with(lambda self, **kwargs: self.model(**kwargs), model=Model()))(
        input_ids=ids, labels=labels
    ).backward()
    assert [row[2] for row in rows()] == ["input_ids", "labels"]


def test_empty_inputs(rows: Callable) -> None:
    ROADS["ortmodule"](Model(lambda labels: labels))(
        torch.empty(0, 5, dtype=torch.int64), torch.empty(0, 5, dtype=torch.int64)
    ).backward()
    assert [row[4:] for row in rows()] == [
        ["0.00     %", "0", "0", "[]"], ["0.00     %", "0", "0", "N/A"],
    ]  # fmt: skip


@pytest.mark.parametrize("road", ROAD_NAMES)
def test_inference_is_not_inspected(road: str, rows: Callable) -> None:
    model = ROADS[road](Model())
    with torch.no_grad():
        model(*batch())
    assert rows() == []


def test_both_switches_and_nothing_by_default(monkeypatch, rows: Callable) -> None:
    for made in (lambda m: torch.compile(m, backend="ort"), ORTModule):
        monkeypatch.delenv("ORTMODULE_PRINT_INPUT_DENSITY", raising=False)
        made(Model())(*batch()).backward()
        torch._dynamo.reset()
        assert rows() == []
        monkeypatch.setenv("ORTMODULE_PRINT_INPUT_DENSITY", "1")
        made(Model())(*batch()).backward()
        assert [row[1] for row in rows()] == ["EMBED", "LABEL"]
        input_density._table._rows.clear()


def test_rank_0_alone(monkeypatch, rows: Callable) -> None:
    model = ROADS["compile"](Model())
    monkeypatch.setattr(input_density, "rank_and_world", lambda: (1, 2))
    model(*batch()).backward()
    assert rows() == []
    monkeypatch.setattr(input_density, "rank_and_world", lambda: (0, 2))
    model(*batch()).backward()
    assert len(rows()) == 2


def test_numbers_are_those_without(rows: Callable) -> None:
    results: list[Any] = []
    for options in ({}, ON):
        torch.manual_seed(0)
        model = Model()
        loss = torch.compile(model, backend="ort", options=options)(*batch())
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
