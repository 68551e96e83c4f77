"""What forward reads outside of its module's attributes: another value makes another graph."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model, PretrainedConfig

import torch_ort
from torch_ort import ORTModule
from torch_ort.engine import compiler
from torch_ort.fallback import FallbackWarning

SCALE = 2.0
NAMES = ["a"]


class Config:
    kind = "of the class"

    def __init__(self) -> None:
        self.scale, self.names, self.sub = 2.0, ["a"], types.SimpleNamespace(scale=1.5)
        self.other = 0

    @property
    def twice(self) -> float:
        return self.scale * 2


@dataclasses.dataclass
class Data:
    scale: float = 2.0
    other: int = 0


class Items(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Mapped(PretrainedConfig):
    attribute_map: ClassVar = {"scale": "scale_of_it"}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.scale_of_it, self.other = 2.0, 0


CONFIG = Config()


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Net(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], config: Any = None) -> None:
        super().__init__()
        self.linear, self.config, self.function = nn.Linear(4, 4), config or Config(), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.linear(x))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.scale


def assert_noticed(net: nn.Module, change: Callable[[], Any], is_noticed: bool = True) -> None:
    """Change something between calls; eager PyTorch says what comes of it."""
    ours = ORTModule(net)
    for graphs in (1, 1 + is_noticed):
        for count in (2, 3):
            x = torch.ones(count, 4)
            torch.testing.assert_close(ours(x), net(x))
        assert torch_ort.counters()["graphs_captured"] == graphs
        if graphs == 1:
            change()
    assert torch_ort.counters()["fallbacks"] == 0


CONFIGS = {
    "class": Config,
    "dataclass": Data,
    "namespace": lambda: types.SimpleNamespace(scale=2.0, other=0),
    "argparse": lambda: argparse.Namespace(scale=2.0, other=0),
    "dict with attributes": lambda: Items(scale=2.0, other=0),
    "PretrainedConfig": Mapped,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_field_of_a_config(name):
    config = CONFIGS[name]()
    assert_noticed(
        Net(lambda net, x: x * net.config.scale, config), lambda: setattr(config, "scale", 5.0)
    )


@pytest.mark.parametrize("name", ["class", "dataclass", "argparse"])
def test_a_field_that_forward_does_not_read(name):
    config = CONFIGS[name]()
    net = Net(lambda net, x: net.scaled(x), config)
    assert_noticed(net, lambda: setattr(config, "other", 5), is_noticed=False)


FIELDS = {
    "in a method": (lambda net, x: net.scaled(x), lambda c: setattr(c, "scale", 5.0)),
    "in a property": (lambda net, x: x * net.config.twice, lambda c: setattr(c, "scale", 5.0)),
    "nested": (lambda net, x: x * net.config.sub.scale, lambda c: setattr(c.sub, "scale", 4.0)),
    "another object": (lambda net, x: x * net.config.sub.scale,
        lambda c: setattr(c, "sub", types.SimpleNamespace(scale=7.0))),
    "a list": (lambda net, x: x * len(net.config.names), lambda c: c.names.append("b")),
    "one that was not there": (lambda net, x: x * getattr(net.config, "extra", 1.0),
        lambda c: setattr(c, "extra", 3.0)),
    "through its dict": (lambda net, x: x * vars(net.config)["scale"],
        lambda c: setattr(c, "scale", 5.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name):
    function, change = FIELDS[name]
    net = Net(function)
    assert_noticed(net, lambda: change(net.config))


def test_a_config_in_a_list():
    net = Net(lambda net, x: x * net.configs[1].scale)
    net.configs = [Config(), Config()]
    assert_noticed(net, lambda: setattr(net.configs[1], "scale", 5.0))


def test_classes_are_left_as_they_were():
    net = Net(lambda net, x: net.scaled(x), Mapped())
    ORTModule(net)(torch.ones(2, 4))
    assert "__getattribute__" not in vars(Config) | vars(Mapped)
    assert "__getattribute__" in vars(PretrainedConfig)


def test_a_language_model_reads_its_config():
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, output_hidden_states=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2Model(config)
    ours = ORTModule(model)
    ids = torch.arange(10).reshape(2, 5)
    for is_wanted in (False, True, False):
        model.config.output_hidden_states = is_wanted
        got, want = ours(ids), model(ids)
        assert list(got) == list(want)
        torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state)
    assert torch_ort.counters()["graphs_captured"] >= 2


def test_globals(monkeypatch):
    net = Net(lambda net, x: helper(x) * SCALE * len(NAMES))
    assert_noticed(net, lambda: monkeypatch.setitem(globals(), "SCALE", 3.0))


def test_containers_among_globals(monkeypatch):
    net = Net(lambda net, x: x * len(NAMES))
    monkeypatch.setitem(globals(), "NAMES", ["a"])
    assert_noticed(net, lambda: NAMES.append("b"))


def test_objects_among_globals(monkeypatch):
    monkeypatch.setitem(globals(), "CONFIG", Config())
    assert_noticed(Net(lambda net, x: x * CONFIG.scale), lambda: setattr(CONFIG, "scale", 4.0))


def test_another_function_among_globals(monkeypatch):
    net = Net(lambda net, x: helper(x))
    assert_noticed(net, lambda: monkeypatch.setitem(globals(), "helper", lambda x: x + 1))


def test_modules_of_settings(monkeypatch):
    settings = types.ModuleType("settings")
    settings.__file__ = __file__
    settings.scale = 2.0
    net = Net(lambda net, x: x * settings.scale)
    assert_noticed(net, lambda: setattr(settings, "scale", 3.0))


def test_closures():
    scale, parts = 2.0, [1, 2]

    def change() -> None:
        nonlocal scale
        scale = 3.0

    assert_noticed(Net(lambda net, x: x * scale), change)
    torch_ort.reset_counters()
    assert_noticed(Net(lambda net, x: x * len(parts)), lambda: parts.append(3))


def test_a_field_that_forward_counts_in_is_counted_in_each_call(graphs_captured):
    def counts(net: Net, x: torch.Tensor) -> torch.Tensor:
        net.config.other += 1
        return x * net.config.other

    net = Net(counts)
    eager, ours = copy.deepcopy(net), ORTModule(net)
    for call in range(1, 4):
        torch.testing.assert_close(ours(torch.ones(2, 4)), eager(torch.ones(2, 4)))
        assert net.config.other == eager.config.other == call
    assert graphs_captured() == 1


def test_a_global_that_forward_counts_in_is_counted_in_each_call(monkeypatch, graphs_captured):
    monkeypatch.setitem(globals(), "SCALE", 1)

    def counts(net: Net, x: torch.Tensor) -> torch.Tensor:
        global SCALE
        SCALE += 1
        return x * SCALE

    net = Net(counts)
    ours = ORTModule(net)
    for call in range(2, 5):
        torch.testing.assert_close(ours(torch.ones(2, 4)), net.linear(torch.ones(2, 4)) * call)
        assert call == SCALE
    assert graphs_captured() == 1


@pytest.mark.hands_over("nothing can capture what is written there")
def test_what_else_forward_writes_there_is_left_to_pytorch(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")

    def remembers(net: Net, x: torch.Tensor) -> torch.Tensor:
        net.config.other = x.sum()
        return x * net.config.scale

    net = Net(remembers)
    ours = ORTModule(net)
    words = "forward assigns field 'other' of attribute 'config' of the module"
    with pytest.warns(FallbackWarning, match=words):
        ours(torch.ones(2, 4))
    torch.testing.assert_close(net.config.other, net.linear(torch.ones(2, 4)).sum())


def test_what_cannot_be_seen_is_named(caplog):
    hidden = {"a": [[Config()]]}
    net = Net(lambda net, x: x * hidden["a"][0][0].scale)
    with caplog.at_level(logging.INFO):
        ours = ORTModule(net, torch_ort.DebugOptions(log_level=torch_ort.LogLevel.INFO))
        ours(torch.ones(2, 4))
    said = [r.getMessage() for r in caplog.records if "until recapture()" in r.getMessage()]
    assert len(said) == 1
    assert "item 'a' of closure 'hidden' of " in said[0]
    assert "(list)" in said[0]


def test_mismatches_are_named(caplog):
    net = Net(lambda net, x: net.scaled(x))
    with caplog.at_level(logging.INFO):
        ours = ORTModule(net, torch_ort.DebugOptions(log_level=torch_ort.LogLevel.INFO))
        ours(torch.ones(2, 4))
        net.config.scale = 3.0
        ours(torch.ones(2, 4))
    words = "field 'scale' of attribute 'config' of the module has changed from 2.0 to 3.0"
    assert any(words in record.getMessage() for record in caplog.records)


def test_modules_of_python_are_not_compared():
    net = Net(lambda net, x: x * len(sys.argv[:1]))
    assert_noticed(net, lambda: None, is_noticed=False)


class KeepsTensors(nn.Module):
    """Reads tensors of an object, which no graph takes as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state = types.SimpleNamespace(h=torch.zeros(3, 4), parts=[torch.ones(4)])

    def forward(self, x):
        return self.linear(x) * self.state.parts[0] + self.state.h


def test_a_tensor_of_an_object_that_is_replaced():
    eager = KeepsTensors()
    module = copy.deepcopy(eager)
    ours = torch_ort.ORTModule(module)
    x = torch.randn(3, 4)
    torch.testing.assert_close(ours(x), eager(x))
    for each in (eager, module):
        each.state.h = torch.full((3, 4), 2.0)
    torch.testing.assert_close(ours(x), eager(x))
    for each in (eager, module):
        each.state.parts[0] = torch.full((4,), 3.0)
    torch.testing.assert_close(ours(x), eager(x))
    for each in (eager, module):
        each.state.h.add_(1)
    torch.testing.assert_close(ours(x), eager(x))
    counters = torch_ort.counters()
    assert (counters["fallbacks"], counters["graphs_recorded"]) == (0, 3)


def test_a_tensor_that_forward_keeps_in_an_object(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")

    class Recurs(KeepsTensors):
        def forward(self, x):
            self.state.h = super().forward(x).detach()
            return self.state.h * 2

    eager = Recurs()
    module = copy.deepcopy(eager)
    ours = torch_ort.ORTModule(module)
    x = torch.randn(3, 4)
    words = "forward assigns field 'h' of attribute 'state' of the module"
    with pytest.warns(FallbackWarning, match=words):
        torch.testing.assert_close(ours(x), eager(x))
    torch.testing.assert_close(ours(x), eager(x))
    torch.testing.assert_close(module.state.h, eager.state.h)


class Columns(nn.Module):
    def __init__(self, places: list[int]) -> None:
        super().__init__()
        self.places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self.places]


def test_constants_live_as_long_as_the_session_that_equal_graphs_share(monkeypatch) -> None:
    # Another tensor at the address of a dead one would be taken for it.
    monkeypatch.setattr(compiler, "_sessions", {})
    constants: list[weakref.ref] = []
    compile_session = compiler.compile_session

    def note(program: Any, options: Any) -> Any:
        constants.extend(map(weakref.ref, program.constants.values()))
        return compile_session(program, options)

    monkeypatch.setattr(compiler, "compile_session", note)
    x = torch.randn(3, 5)
    for places in ([0, 3], [1, 2], [4, 4]):
        assert torch.equal(ORTModule(Columns(places))(x), x[:, torch.tensor(places)])
    gc.collect()
    assert [each().tolist() for each in constants] == [[0, 3], [1, 2], [4, 4]]
