"""A FallbackWarning names the operator and the user's line, stands there, and has no internals."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import torch_ort
from tests.injection import into_backward, into_reading
from torch_ort import _C
from torch_ort.fallback import FallbackWarning, reason_of
from torch_ort.pytorch import graph_compat
from torch_ort.rules import table

pytestmark = pytest.mark.ort_only


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x):
        y = self.linear(x)
        return nn.functional.gelu(y)  # here


class Doubles(nn.Module):
    def forward(self, x):
        return (x * 2).relu()  # here


class Nests(nn.Module):
    def forward(self, x):
        nested = torch.nested.nested_tensor([x[0], x[1]])  # here
        return nested.to_padded_tensor(0.0)


def line_of(kind: type) -> int:
    """Give the line of this file that a class marks."""
    lines = Path(__file__).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"class {kind.__name__}("))
    return next(i for i in range(first, len(lines)) if lines[i].endswith("# here")) + 1


def the_warning(call: Callable[[], Any]) -> warnings.WarningMessage:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (ours,) = [each for each in caught if issubclass(each.category, FallbackWarning)]
    message = str(ours.message)
    for internals in ("incompatible function", "_C.", ".cpp", "0x", "<built-in", "Traceback"):
        assert internals not in message
    return ours


@pytest.fixture(autouse=True)
def lenient(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")


@pytest.fixture
def no_gelu(monkeypatch) -> None:
    into_reading(monkeypatch, "gelu", "injected by a test")


@pytest.mark.hands_over("captures are made to fail")
@pytest.mark.parametrize("switched_off", ["", "recorder"])
def test_compile(switched_off, no_gelu):
    options = {"disable": switched_off} if switched_off else None
    run = torch.compile(Model(), backend="ort", options=options)
    warning = the_warning(lambda: run(torch.randn(5, 6)))
    assert (warning.filename, warning.lineno) == (__file__, line_of(Model))
    assert str(warning.message) == (
        "torch_ort: convert: injected by a test (aten.gelu.default, "
        f"test_fallback_words.py:{line_of(Model)}); this graph runs in eager PyTorch "
        "(set TORCH_ORT_STRICT=1 to get an error instead)"
    )


@pytest.mark.hands_over("captures are made to fail")
def test_ortmodule(no_gelu):
    wrapped = torch_ort.ORTModule(Model())
    warning = the_warning(lambda: wrapped(torch.randn(5, 6)))
    assert warning.filename == __file__
    assert "ORTModuleONNXModelException: injected by a test (aten.gelu.default, " in str(
        warning.message
    )


@pytest.mark.hands_over("PyTorch words the error")
def test_an_operator_that_cannot_be_traced():
    wrapped = torch_ort.ORTModule(Nests())
    message = str(the_warning(lambda: wrapped(torch.randn(2, 6))).message)
    assert "aten._nested_tensor_from_tensor_list" in message
    assert f"(test_fallback_words.py:{line_of(Nests)})" in message


@pytest.mark.hands_over("numbers read from tensors")
def test_a_number_that_is_asked_for():
    class Branches(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    wrapped = torch_ort.ORTModule(Branches())
    message = str(the_warning(lambda: wrapped(torch.randn(2, 6))).message)
    line = Branches.forward.__code__.co_firstlineno + 1
    assert "Python asks for a number in a tensor (a branch, float(), item())" in message
    assert f"(test_fallback_words.py:{line})" in message


def test_a_nested_tensor():
    parts = [torch.randn(2, 6), torch.randn(3, 6)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    run = torch.compile(Doubles(), backend="ort")
    results = []
    warning = the_warning(lambda: results.append(run(nested)))
    assert (warning.filename, warning.lineno) == (__file__, line_of(Doubles))
    message = str(warning.message)
    assert "got a nested tensor of layout jagged, whose row lengths are data" in message
    assert (
        "want a plain, strided tensor; pad the rows to one length (mul, "
        f"test_fallback_words.py:{line_of(Doubles)})"
    ) in message
    for part, got in zip(parts, results[0].unbind(), strict=True):
        torch.testing.assert_close(got, (part * 2).relu())


@pytest.mark.hands_over("captures are made to fail")
def test_where_no_operator_is_known_the_function_is_named(monkeypatch):
    fail = Mock(side_effect=_C.InternalError("injected by a test"))
    monkeypatch.setattr(_C, "run_pipeline", fail)
    run = torch.compile(Model(), backend="ort")
    warning = the_warning(lambda: run(torch.randn(5, 6)))
    assert warning.filename == __file__
    first = Model.forward.__code__.co_firstlineno
    where = f"in 'forward' (test_fallback_words.py:{first})"
    assert f"pass: injected by a test, {where}; this graph" in str(warning.message)


def test_backward(monkeypatch):
    def fails(run):
        def wrapped(*args):
            raise _C.InternalError("injected by a test")

        return wrapped

    into_backward(monkeypatch, fails)
    run = torch.compile(Model(), backend="ort")
    loss = run(torch.randn(5, 6)).sum()
    warning = the_warning(lambda: loss.backward())
    assert warning.filename == __file__
    assert "backward: injected by a test" in str(warning.message)


def test_a_signature_of_ours_is_no_reason():
    words = "add_size_hint(): incompatible function arguments. The following argument types are: "
    assert reason_of(TypeError(words)) == "an argument of a type that the engine does not take"


def test_a_node_that_could_not_be_traced():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.mm.default, (x, x))
    node.stack_trace = f'  File "{__file__}", line 7, in forward\n    x @ x'
    graph.output(node)
    with pytest.raises(RuntimeError) as caught:
        fx.Interpreter(fx.GraphModule({}, graph)).run(torch.ones(2, 3))
    operator, line = graph_compat.node_that_raised(caught.value)
    assert operator == "torch.ops.aten.mm.default"
    assert (line.path, line.number) == (__file__, 7)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "AOTAutograd: RuntimeError: Cannot access data pointer of Tensor (e.g. FakeTensor, "
            "FunctionalTensor). If you're using torch.compile/export/fx, it is likely that ...",
            "forward asks for the memory of a tensor (numpy(), data_ptr(), an extension in C++), "
            "which a captured graph does not have",
        ),
        (
            "aten/src/ATen/RegisterMeta.cpp:1: SymIntArrayRef expected to contain only concrete "
            "integers",
            "forward passes a size, which may differ from call to call, to code that takes plain "
            "integers alone; int(size) makes a graph for each size",
        ),
    ],
)
def test_what_torch_says_of_its_traces_is_said_in_the_users_words(theirs, ours):
    assert reason_of(RuntimeError(theirs)) == ours


@pytest.mark.hands_over("a bug is planted")
def test_a_bug_of_the_recorder_is_one_line_at_the_users(monkeypatch, caplog):
    """What only takes longer is no traceback in the log of a training run."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")

    def broken(*args, **kwargs):
        raise ZeroDivisionError("planted")

    monkeypatch.setitem(table.RULES, torch.ops.aten.erf.default, broken)
    compiled = torch.compile(lambda x: x.erf() * 2, backend="ort")
    with caplog.at_level(logging.WARNING, "torch_ort.recorder"):
        for _ in range(2):
            compiled(torch.randn(3))
        torch._dynamo.reset()
        compiled(torch.randn(3))
    (record,) = caplog.records
    assert record.exc_info is None
    words = record.getMessage()
    assert "\n" not in words
    assert words.startswith("test_fallback_words.py:")
    assert (
        "AOTAutograd captures this graph, which takes longer, since torch_ort's recorder" in words
    )
    assert "its rule raises ZeroDivisionError: planted" in words
    assert torch_ort.counters()["recorder_bugs"] == 2


class Warps(nn.Module):
    """Its backward takes sizes as plain numbers, so that it is traced for those of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Linear(16, 6)

    def forward(self, x):
        where = self.locate(x.flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(where, x.shape, align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


@pytest.mark.hands_over("the backward of affine_grid takes no symbolic sizes")
def test_a_backward_that_is_traced_again_warns_of_nothing():
    model, x = Warps(), torch.randn(2, 1, 4, 4)
    (want,) = torch.autograd.grad(model(x).square().sum(), model.locate.bias)
    ours = torch_ort.ORTModule(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = ours(x)
        (got,) = torch.autograd.grad(result.square().sum(), model.locate.bias)
    assert [str(each.message) for each in caught] == []
    torch.testing.assert_close(got, want)
    assert torch_ort.counters()["forward_runs"] == 1
