"""Regions through Triton's interpreter; test_interpreted.py runs this in a process of its own.

The tables are those of tests/cpu, of which each case compares with eager PyTorch in float64.
"""

from __future__ import annotations

import copy
import importlib

import pytest
import regions
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort
from torch_ort.triton import kernels, printer

regions.ISAS[:] = regions.ISAS[-1:]  # before the tables are made
test_batch_norm, test_concat, test_eager_casts, test_gather, test_pointwise, test_rows = map(
    importlib.import_module,
    ("test_batch_norm", "test_concat", "test_eager_casts", "test_gather", "test_pointwise",
     "test_rows"),
)  # fmt: skip

# Tables whose cases run one region each.
test_operation = test_pointwise.test_operation
test_special_values = test_pointwise.test_special_values
test_zeros_keep_their_sign = test_pointwise.test_zeros_keep_their_sign
test_reductions = test_rows.test_reductions
test_without_rows_or_columns = test_rows.test_without_rows_or_columns
test_nan_and_infinity_in_extremes = test_rows.test_nan_and_infinity_in_extremes
test_parts = test_concat.test_parts_are_written_where_they_belong
test_tables_and_ids = test_gather.test_tables_and_ids_of_any_layout
test_picked = test_rows.test_labels

for _room in (test_batch_norm, test_eager_casts):
    for _name in [name for name in vars(_room) if name.startswith("test_")]:
        globals()[f"{_name}_of_{_room.__name__[5:]}"] = getattr(_room, _name)

written: list[printer.Text] = []


@pytest.fixture(autouse=True)
def in_triton(monkeypatch) -> None:
    """Have Triton compile the regions of each session that a test makes by itself."""

    def write(body):
        # Small tiles for small regions, so that there are several of them.
        elements = body["rows"] * body["columns"]
        written.append(printer.Printer(body, 512 if elements < 20_000 else 1 << 16).write())
        return kernels.Kernel(body, written[-1])

    made = regions.Compiled.__init__

    def compiled(self, graph, isa="", **settings):
        made(self, graph, isa, **settings, region_writer=write)

    monkeypatch.setattr(regions.Compiled, "__init__", compiled)
    written.clear()


def test_a_region_is_tritons():
    graph = regions.fused(regions.read({"x": "float[5,7]"}, ["a = Exp(x)", "y = Neg(a)"], ["y"]))
    compiled = regions.Compiled(graph)
    x = torch.randn(5, 7)
    torch.testing.assert_close(compiled.run({"x": x})["y"], -x.exp())
    ((_, text),) = compiled.session.programs()
    assert "@triton.jit" in text
    assert text == written[0].source


# ---- whole models, by the option


class Net(nn.Module):
    """Embedding, attention, norms, dropout and a loss with ignored labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.norm = nn.GroupNorm(4, 32)
        self.head = nn.Linear(32, 50)

    def forward(self, ids, labels):
        hidden = self.layer(self.embed(ids))
        hidden = self.norm(F.silu(hidden).flatten(0, 1)) * hidden.flatten(0, 1).tanh()
        return F.cross_entropy(self.head(hidden), labels.flatten(), label_smoothing=0.1)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3), nn.LeakyReLU(),
        nn.Flatten(), nn.LayerNorm(8 * 16), nn.Linear(8 * 16, 5), nn.Softplus(), nn.LogSoftmax(1),
    )  # fmt: skip


def inputs_of(name: str) -> tuple[torch.Tensor, ...]:
    if name == "conv":
        return (torch.randn(6, 3, 8, 8),)
    labels = torch.randint(50, (3, 11))
    labels[0, 3:] = -100
    return torch.randint(50, (3, 11)), labels


@pytest.mark.parametrize("road", ["compile", "ortmodule"])
@pytest.mark.parametrize("name", ["transformer", "conv"])
def test_models(name, road, monkeypatch):
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")
    model = Net() if name == "transformer" else conv_net()
    exact = copy.deepcopy(model).double()
    torch.compiler.reset()
    call = torch_ort.ORTModule(model) if road == "ortmodule" else torch.compile(
        model, backend="ort")  # fmt: skip
    for _ in range(2):
        given = inputs_of(name)
        made = call(*given)
        want = exact(*(x.double() if x.is_floating_point() else x for x in given))
        torch.testing.assert_close(made.double(), want, rtol=2e-6, atol=2e-6)
        made.square().sum().backward()
        want.square().sum().backward()
    for (of, got), each in zip(model.named_parameters(), exact.parameters(), strict=True):
        scale = max(each.grad.norm().item(), 0.1)  # a bias before a norm has no gradient
        assert (got.grad.double() - each.grad).norm().item() <= 2e-5 * scale, of
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["steps_region"] > 0


def test_dropout_draws_as_the_engine_does(monkeypatch):
    x = torch.randn(40, 33)
    results = []
    for triton in ("0", "1"):
        monkeypatch.setenv("ORTMODULE_USE_TRITON", triton)
        monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "0")
        torch.manual_seed(5)
        torch.compiler.reset()
        call = torch.compile(lambda x: F.dropout(x.sin(), 0.3) * 2, backend="ort")
        results.append(call(x))
    assert torch.equal(*(each == 0 for each in results))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("ignored", ["", "ignore_index = -100"])
@pytest.mark.parametrize("label", [7, -1, -(2**40)])
def test_a_label_that_is_no_class(label, ignored):
    graph = test_rows.label_graph("float", ignored)
    given = {"x": torch.randn(40, 7), "label": torch.full([40], 3)}
    regions.run_by_name(graph, given)
    given["label"][20] = label
    with pytest.raises(IndexError, match="Target is out of bounds"):
        regions.run_by_name(graph, given)


@pytest.mark.parametrize("number", [9, -1])
def test_an_id_that_is_no_row(number):
    graph = regions.read(
        {"x": "float[9,4]", "ids": "int64[5]"}, ["a = Gather(x, ids)", "y = Exp(a)"], ["y"]
    )
    given = {"x": torch.randn(9, 4), "ids": torch.tensor([0, 8, 3, 3, 1])}
    (got,) = regions.run(regions.fused(graph), given)
    torch.testing.assert_close(got, given["x"][given["ids"]].exp())
    given["ids"][2] = number
    with pytest.raises(IndexError, match="index out of range in self"):
        regions.run(regions.fused(graph), given)


def test_debug_files(monkeypatch, tmp_path):
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    monkeypatch.setenv("ORTMODULE_TRITON_DEBUG", "1")
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    torch.compile(lambda x: x.softmax(-1).log(), backend="ort")(torch.randn(5, 9))
    files = sorted(path.name for path in (tmp_path / "triton_debug").iterdir())
    (name,) = {file.split(".")[0].rsplit("_", 1)[0] for file in files if "_original" in file}
    assert files == [f"{name}.py", f"{name}_original.onnx", f"{name}_processed.txt"]
    assert "@triton.jit" in (tmp_path / "triton_debug" / f"{name}.py").read_text()
    assert "pass 1:" in (tmp_path / "triton_debug" / f"{name}_processed.txt").read_text()


def test_a_configuration_leaves_regions_to_the_engine(monkeypatch, tmp_path):
    path = tmp_path / "triton.json"
    path.write_text('{"ops": {"Sin": {"versions": [7]}, "Cos": {"versions": [7]}}}')
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    monkeypatch.setenv("ORTMODULE_TRITON_CONFIG_FILE", str(path))
    monkeypatch.setenv("ORTMODULE_TRITON_DEBUG", "1")
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    torch.compile(lambda x: (x.exp() + 1).log(), backend="ort")(torch.randn(5, 9))
    assert not (tmp_path / "triton_debug").exists()
    torch.compile(lambda x: x.sin().cos(), backend="ort")(torch.randn(5, 9))
    assert (tmp_path / "triton_debug").exists()


def test_what_triton_cannot_compile_is_the_engines(monkeypatch, caplog):
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    monkeypatch.setattr(printer, "_WORDS", {})
    torch.compiler.reset()
    x = torch.randn(5, 9)
    got = torch.compile(lambda x: x.erf().exp(), backend="ort")(x)
    torch.testing.assert_close(got, x.erf().exp())
    assert "ORTMODULE_USE_TRITON: KeyError: 'Erf'; the engine's own kernel runs" in caplog.text
