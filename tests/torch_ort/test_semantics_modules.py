# Whole modules trained for several steps: state that moves between steps, modes, nesting,
# dtypes and copies of compiled modules.
from __future__ import annotations

import collections
import copy

import pytest
import torch
import torch.nn.functional as F
from models import module_with
from torch import nn

pytestmark = pytest.mark.both_roads

Pair = collections.namedtuple("Pair", ["first", "second"])


def images(step: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8)


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 8)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def cnn(**batch_norm: object) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6, **batch_norm),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 5),
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class LanguageModel(nn.Module):
    """A causal transformer with tied embeddings that returns its own loss."""

    def __init__(self, vocabulary: int = 30, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(12, width) * 0.1)
        self.block = nn.TransformerEncoderLayer(
            width, 2, dim_feedforward=32, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf"), device=tokens.device).triu(1)
        hidden = self.block(self.embed(tokens) + self.position[:length], src_mask=mask)
        logits = self.head(hidden)
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW],
    ids=["sgd", "adam", "adamw"],
)
def test_mlp_trains(compare_training, optimizer, graphs_captured):
    compare_training(mlp, rows, optimizer=lambda p: optimizer(p, lr=0.01), steps=4)
    assert graphs_captured() == 1


def test_language_model_with_tied_weights_trains(compare_training):
    compare_training(
        LanguageModel,
        lambda step: torch.randint(0, 30, (3, 10)),
        loss=lambda outputs: outputs[1],
        rtol=1e-4,
        atol=1e-5,
    )


def test_tied_weights_get_one_gradient_from_both_uses(compare_training):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(8, 8, bias=False)
            self.decode = nn.Linear(8, 8)
            self.decode.weight = self.encode.weight

        def forward(self, x):
            return self.decode(torch.tanh(self.encode(x)))

    compare_training(Tied, rows)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5}, {"affine": False}], ids=str)
def test_batch_norm_updates_its_running_statistics(compare_training, settings):
    want, _ = compare_training(lambda: cnn(**settings), images)
    assert want.records[-1]["buffer 1.num_batches_tracked"] == 3


def test_batch_norm_without_running_statistics(compare_training):
    compare_training(lambda: cnn(track_running_stats=False), images)


@pytest.mark.compile_only("runs in PyTorch")
def test_batch_norm_with_a_cumulative_average(compare_training):
    class Cumulative(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8, momentum=None)

        def forward(self, x):
            return self.norm(self.linear(x).tanh()).exp()

    # Its factor is read from the counter as a Python number, which breaks the graph.
    compare_training(Cumulative, rows, compile_settings={"fullgraph": False})


def test_batch_norm_called_twice_in_one_forward(compare_training):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x):
            return self.norm(torch.relu(self.norm(x)) + x)

    compare_training(Twice, rows)


def test_train_and_eval_switch_between_steps(compare_training):
    def switch(model, step):
        model.train(step % 2 == 0)

    compare_training(
        lambda: nn.Sequential(cnn(), nn.Dropout(0.5), nn.Linear(5, 3)),
        images,
        before_step=switch,
        steps=4,
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_forward_without_gradients(compare_training, mode, training):
    def prepare(model, step):
        model.train(training)

    want, got = compare_training(cnn, images, forward_context=mode, before_step=prepare, steps=2)
    assert want.backwards == got.backwards == 0


def test_eval_with_gradients_keeps_running_statistics(compare_training):
    compare_training(cnn, images, before_step=lambda model, step: model.eval())


def test_validation_between_training_steps(compiled, assert_engine_ran):
    torch.manual_seed(0)
    eager = cnn()
    ours = copy.deepcopy(eager)
    call = compiled(ours)
    for step in range(3):
        x = torch.randn(4, 3, 8, 8)
        for model, forward in ((eager, eager), (ours, call)):
            model.train()
            forward(x).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
            model.zero_grad()
        eager.eval()
        ours.eval()
        with torch.no_grad():
            torch.testing.assert_close(call(x), eager(x), msg=f"validation after step {step}")
    assert_engine_ran(backward=True)


def test_frozen_parameters(compare_training):
    def frozen():
        model = mlp()
        model[0].weight.requires_grad_(False)
        model[2].requires_grad_(False)
        return model

    want, _ = compare_training(frozen, rows)
    assert want.records[-1]["gradient of 0.weight"] is None


def test_requires_grad_toggled_between_steps(compare_training, graphs_captured):
    def toggle(model, step):
        model[0].requires_grad_(step % 2 == 1)

    compare_training(mlp, rows, before_step=toggle, steps=4)
    assert graphs_captured() == 2


def test_all_parameters_frozen_but_input_requires_grad_in_some_steps(compare_training):
    compare_training(
        lambda: mlp().requires_grad_(False),
        lambda step: torch.randn(6, 8, requires_grad=step % 2 == 1),
    )


def test_multiple_and_nested_outputs(compare_training):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Linear(8, 4)
            self.right = nn.Linear(8, 3)

        def forward(self, x):
            left, right = self.left(x), self.right(x)
            return {
                "sum": left.sum(),
                "list": [left, (right, None, 3)],
                "pair": Pair(left.exp(), right.argmax(-1)),
                "name": "text",
                "width": x.shape[1],
                "detached": right.detach(),
            }

    # exp makes large gradients, which carry a difference in the last bit into the next steps.
    compare_training(Nested, rows, rtol=1e-4, atol=1e-4)


def test_nested_inputs_and_constants(compare_training):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, batch, scale, flag):
            y = self.linear(batch["x"][0]) * scale
            return y if flag else -y + batch["bias"]

    def inputs(step):
        return {"x": [torch.randn(6, 8)], "bias": torch.randn(4)}, 0.5, step == 1

    compare_training(Nested, inputs)


def test_unused_parameter_has_no_gradient(compare_training):
    want, _ = compare_training(
        lambda: module_with(
            lambda self, x: self.used(x), used=nn.Linear(8, 4), unused=nn.Linear(8, 4)
        ),
        rows,
    )
    assert want.records[-1]["gradient of unused.weight"] is None


def test_branch_taken_only_in_some_steps(compare_training):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

        def forward(self, x, head: int):
            return self.heads[head](x)

    compare_training(Branches, lambda step: (torch.randn(6, 8), step % 2), steps=4)


def test_gradient_accumulation(compare_training):
    compare_training(mlp, rows, micro_batches=3)


def test_module_called_twice_per_step(compiled, assert_engine_ran):
    torch.manual_seed(0)
    eager = cnn()
    ours = copy.deepcopy(eager)
    call = compiled(ours)
    for _ in range(3):
        a, b = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
        for model, forward in ((eager, eager), (ours, call)):
            model.zero_grad()
            (forward(a) * forward(b).detach() + forward(b) * 2).pow(2).mean().backward()
        for (name, want), got in zip(eager.named_parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, msg=f"gradient of {name}")
        for (name, want), got in zip(eager.named_buffers(), ours.buffers(), strict=True):
            torch.testing.assert_close(got, want, msg=f"buffer {name}")
    assert_engine_ran(backward=True)


def test_submodule_shared_within_one_forward(compare_training):
    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x

    compare_training(lambda: module_with(forward, layer=nn.Linear(8, 8)), rows)


def test_output_fed_back_as_the_next_input(compare_training):
    def forward(self, x):
        state = torch.zeros_like(x)
        states = []
        for _ in range(3):
            state = self.cell(x, state)
            states.append(state)
        return torch.stack(states)

    compare_training(lambda: module_with(forward, cell=nn.GRUCell(8, 8)), rows)


def test_float64(compare_training):
    compare_training(
        lambda: cnn().double(), lambda step: torch.randn(4, 3, 8, 8, dtype=torch.float64)
    )


def test_bfloat16_parameters(compare_training):
    # Regions keep float32 between bfloat16 operators, where eager rounds.
    compare_training(
        lambda: mlp().bfloat16(), lambda step: torch.randn(6, 8, dtype=torch.bfloat16),
        rtol=1.6e-2, atol=1e-2,
    )  # fmt: skip


def test_mixed_dtypes(compare_training):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.single = nn.Linear(8, 4)
            self.double_precision = nn.Linear(4, 4).double()

        def forward(self, x):
            return self.double_precision(self.single(x).double()).float() + x.sum()

    compare_training(Mixed, rows, rtol=2e-6, atol=1e-6)  # what is float64 was float32 before


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_integer_inputs(compare_training, dtype):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4, padding_idx=0)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, index):
            known = index != 0
            hidden = self.embed(index.long()) * self.scale * known.unsqueeze(-1)
            return hidden.sum(1) / known.sum(1, keepdim=True), index + 1, index // 2, known

    compare_training(Counts, lambda step: torch.randint(0, 10, (5, 7)).to(dtype))


def test_complex_values_inside(compare_training):
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.ones(5))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8)

    compare_training(Spectrum, rows)


@pytest.mark.compile_only("guards of Dynamo")
def test_second_instance_of_a_class_shares_the_code_but_not_the_weights(
    compiled, graphs_captured, assert_engine_ran
):
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    calls = [compiled(block) for block in blocks]
    x = torch.randn(3, 8)
    for block, call in zip(blocks, calls, strict=True):
        torch.testing.assert_close(call(x), block(x))
        call(x).sum().backward()
        got = block.linear.weight.grad.clone()
        block.zero_grad()
        block(x).sum().backward()
        torch.testing.assert_close(got, block.linear.weight.grad)
    assert graphs_captured() == 1
    assert_engine_ran(backward=True)


def test_copy_of_a_compiled_module_has_weights_of_its_own(compiled, assert_engine_ran):
    torch.manual_seed(0)
    first = compiled(mlp())
    x = torch.randn(3, 8)
    before = first(x)
    second = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    assert not second(x).any()
    torch.testing.assert_close(first(x), before)
    assert_engine_ran()


def test_state_dict_of_a_compiled_module_loads_into_the_original(compiled):
    torch.manual_seed(0)
    source = compiled(mlp())
    x = torch.randn(3, 8)
    want = source(x)
    target = mlp()
    state = {name.removeprefix("_orig_mod."): v for name, v in source.state_dict().items()}
    target.load_state_dict(state)
    torch.testing.assert_close(target(x), want)


@pytest.mark.compile_only("a method of torch")
def test_compile_method_of_a_module(backend, assert_engine_ran):
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(3, 8)
    want = model(x)
    model.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(model(x), want)
    assert_engine_ran()


@pytest.mark.compile_only("a method of torch")
def test_compiled_blocks_inside_an_eager_module(backend, assert_engine_ran):
    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x)) + x
        return x

    torch.manual_seed(0)
    eager = module_with(forward, blocks=nn.ModuleList(Block() for _ in range(3)))
    ours = copy.deepcopy(eager)
    for block in ours.blocks:
        block.compile(backend=backend, fullgraph=True)
    x = torch.randn(4, 8)
    for model in (eager, ours):
        model(x).pow(2).sum().backward()
    for want, got in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    assert_engine_ran(backward=True)
