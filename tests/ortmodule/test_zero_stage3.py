# What an ORTModule makes of hooks that gather parameters, and which parts it names to DeepSpeed as
# blocks. Stand-ins gather here; tests/ecosystem/test_deepspeed.py has DeepSpeed's own.
from __future__ import annotations

import copy
import logging
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import DebugOptions, LogLevel, ORTModule, UserError
from torch_ort.capture import logs
from torch_ort.ortmodule.zero_stage3 import blocks_of

pytestmark = pytest.mark.ort_only


class Block(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), *inner, nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x):
        return x + self.inner(x)


class Model(nn.Module):
    """Blocks behind an embedding, and before a layer that has its weight."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Gathering:
    """Parameters are empty but for the calls of the modules that they hang in, and backward."""

    def __init__(self, module: nn.Module) -> None:
        self.whole = {parameter: parameter.data for parameter in module.parameters()}
        self.gathered: list[nn.Module] = []
        self.hang(module)
        self.divide(module, recurse=True)

    def hang(self, module: nn.Module) -> None:
        module.ds_id = len(self.gathered)
        module.register_forward_pre_hook(self.gather)
        module.register_forward_hook(lambda module, args, y: self.after_forward(module, y))
        if not getattr(module, "_z3_leaf", False):
            for child in module.children():
                self.hang(child)

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return [*module.parameters(getattr(module, "_z3_leaf", False))]

    def gather(self, module: nn.Module, args: tuple = ()) -> None:
        self.gathered.append(module)
        for parameter in self.parameters(module):
            parameter.data = self.whole[parameter]

    def divide(self, module: nn.Module, recurse: bool = False) -> None:
        for parameter in module.parameters() if recurse else self.parameters(module):
            parameter.data = torch.empty(0)

    def after_forward(self, module: nn.Module, y: torch.Tensor) -> None:
        self.divide(module)
        vars(module)["applied_pre_backward_ref_cnt"] = 1
        if y.requires_grad:
            y.register_hook(lambda gradient: self.gather(module))


def gathered(model: nn.Module, debug: DebugOptions | None = None) -> tuple[Gathering, ORTModule]:
    module = ORTModule(model, debug)
    return Gathering(model), module


def ids(step: int) -> torch.Tensor:
    return torch.randint(10, (4, 5 + step), generator=torch.Generator().manual_seed(step))


def gradients(module: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Train for some steps without an update; give losses and the gradients of all steps."""
    losses = []
    for step in range(steps):
        loss = module(ids(step)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(parameter.grad for parameter in module.parameters())]


def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the switch, and put a stand-in there for DeepSpeed's function that marks."""
    monkeypatch.setenv("ORTMODULE_ENABLE_ZERO_STAGE3", "1")
    deepspeed, utils = ModuleType("deepspeed"), ModuleType("deepspeed.utils")
    utils.set_z3_leaf_module = lambda module, flag: setattr(module, "_z3_leaf", flag)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)


@pytest.fixture(autouse=True)
def silent_log(monkeypatch) -> None:
    monkeypatch.delenv("ORTMODULE_ENABLE_ZERO_STAGE3", raising=False)
    monkeypatch.setattr(logs, "_said", set())


@pytest.fixture
def said(caplog):
    """Return a function that gives the words of the log at a level."""
    return lambda level: [r.getMessage() for r in caplog.records if r.levelno == level]


@pytest.mark.parametrize("is_marked", [False, True], ids=["modules", "blocks"])
def test_parts_run_between_gathers(is_marked, monkeypatch, said):
    if is_marked:
        marked(monkeypatch)
    model = Model()
    eager = copy.deepcopy(model)
    gathering, module = gathered(model)
    torch.testing.assert_close(gradients(module), gradients(eager))
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    # The embedding, the layer with its weight, and the blocks or the three modules of each.
    parts = 2 + (3 if is_marked else 9)
    assert counters["graphs_captured"] == parts
    assert counters["forward_runs"] == counters["backward_runs"] == 3 * parts
    # Products of forward, and of backward twice as many.
    assert counters["steps_product"] == 3 * 3 * 7
    inside = {part for block in model.blocks for part in block.inner.modules()}
    assert inside.isdisjoint(gathering.gathered) == is_marked
    warnings = said(logging.WARNING)
    assert len(warnings) == (0 if is_marked else 1)
    assert is_marked or "ORTMODULE_ENABLE_ZERO_STAGE3=1" in warnings[0]
    assert is_marked or "it would gather 3 blocks as a whole" in warnings[0]


def test_what_is_marked_is_said_at_info(monkeypatch, said):
    marked(monkeypatch)
    model = Model()
    ORTModule(model, DebugOptions(log_level=LogLevel.INFO))
    (line,) = said(logging.INFO)
    assert line.startswith("ORTMODULE_ENABLE_ZERO_STAGE3: 3 Block: marked as leaves")
    assert line.endswith("runs it as one graph: blocks.0, blocks.1, blocks.2")
    assert [name for name, part in model.named_modules() if vars(part).get("_z3_leaf")] == [
        "blocks.0", "blocks.1", "blocks.2",
    ]  # fmt: skip


def test_without_deepspeed(monkeypatch, said):
    monkeypatch.setenv("ORTMODULE_ENABLE_ZERO_STAGE3", "1")
    for name in ("deepspeed", "deepspeed.utils"):
        monkeypatch.setitem(sys.modules, name, None)
    for _ in range(2):
        ORTModule(Model())
    (line,) = said(logging.WARNING)
    assert line.startswith(
        "ORTMODULE_ENABLE_ZERO_STAGE3: ignored, as deepspeed cannot be imported: "
    )


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 6))

    def forward(self, x):
        return self.inner(x)


class TestBlocksWithoutInputsThatRequireGrad:
    """Their gradients would be taken before they are there."""

    def test_an_input_gets_to_require_grad(self, monkeypatch):
        marked(monkeypatch)
        blocks = nn.Sequential(Block(), Block())
        gathered(blocks)
        x = torch.randn(2, 6)
        taken = []
        blocks[0].inner.register_forward_pre_hook(lambda part, args: taken.append(args[0]))
        blocks(x)
        assert taken[0].requires_grad
        torch.testing.assert_close(taken[0].detach(), x)
        assert not x.requires_grad
        with torch.no_grad():
            blocks(x)
        assert not taken[1].requires_grad

    def test_what_no_zero_stage_gathers_is_left_alone(self, monkeypatch):
        marked(monkeypatch)
        blocks = nn.Sequential(Block(), Block())
        ORTModule(blocks)
        taken = []
        blocks[0].inner.register_forward_pre_hook(lambda part, args: taken.append(args[0]))
        blocks(torch.randn(2, 6))
        assert not taken[0].requires_grad

    def test_none_that_can(self, monkeypatch):
        marked(monkeypatch)
        model = nn.ModuleList([Words(), Words()])
        gathered(model)
        with pytest.raises(UserError, match="Words: got no floating-point tensor as a positional"):
            model[0](ids(0))


class TestBlocks:
    def names(self, module: nn.Module) -> list[str]:
        return [name for name, _ in blocks_of(module, ORTModule)]

    def test_of_torchs_transformer(self):
        layer = nn.TransformerEncoderLayer(8, 2, 8)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        assert self.names(encoder) == ["layers.0", "layers.1"]

    def test_lists_in_lists(self):
        stages = nn.Sequential(
            nn.Linear(6, 6), *(nn.Sequential(Block(), Block()) for _ in range(2)), Block()
        )
        assert self.names(stages) == ["1.0", "1.1", "2.0", "2.1"]

    def test_members_of_other_classes_are_parts_of_a_block(self):
        class Layer(Block):
            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.ModuleList([Block(), nn.Sequential(nn.Linear(6, 6))])

        assert self.names(nn.ModuleList([Layer(), Layer()])) == ["0", "1"]

    def test_what_is_never_called_is_none(self):
        layers = nn.ModuleList(nn.ModuleDict({"of": nn.Linear(6, 6)}) for _ in range(2))
        assert self.names(layers) == []

    @pytest.mark.parametrize(
        "module",
        [
            nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)),
            nn.Sequential(Block()),
            nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())),
            nn.ModuleList([ORTModule(Block()), ORTModule(Block())]),
        ],
        ids=["without parts", "one", "without parameters", "wrapped"],
    )
    def test_none(self, module):
        assert self.names(module) == []

    def test_one_block_used_twice(self):
        block = Block()
        assert self.names(nn.ModuleList([block, block])) == []

    def test_shared_parameters(self):
        model = Model()
        model.blocks[1].inner[0].weight = model.blocks[0].inner[0].weight
        assert self.names(model) == ["blocks.2"]

    def test_leaves_already(self):
        model = Model()
        model.blocks[0]._z3_leaf = True
        assert self.names(model) == ["blocks.1", "blocks.2"]
