# Sizes that change between steps, sizes that become outputs, and sizes that the data decides.
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.both_roads

# Over many optimizer steps the last bits of both runs drift apart.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SIZES = [3, 5, 7, 11, 2, 4, 9, 16, 6, 13]

captures_data_dependent_sizes = torch._dynamo.config.patch(
    capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 3)
    )


class Encoder(nn.Module):
    """One causal attention block; every size but the width may change."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.position = nn.Parameter(torch.randn(32, 8))
        self.project = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        x = self.embed(tokens) + self.position[:length]
        q, k, v = self.project(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(mask, float("-inf"))
        mixed = F.dropout(scores.softmax(-1), 0.1, self.training) @ v
        return (x + self.out(mixed.transpose(1, 2).flatten(2))).mean(1)


def test_ten_batch_sizes_are_captured_at_most_twice(compare_training, graphs_captured):
    compare_training(mlp, lambda step: torch.randn(SIZES[step], 6), steps=len(SIZES))
    assert graphs_captured() <= 2


def test_ten_lengths_of_a_transformer_are_captured_at_most_twice(compare_training, graphs_captured):
    compare_training(
        Encoder, lambda step: torch.randint(0, 20, (2, SIZES[step])), steps=len(SIZES), **CLOSE
    )
    assert graphs_captured() <= 2


def test_batch_and_length_change_together(compare_training, graphs_captured):
    sizes = [(2, 8), (3, 9), (4, 5), (2, 16), (5, 3), (3, 8)]
    compare_training(
        Encoder, lambda step: torch.randint(0, 20, sizes[step]), steps=len(sizes), **CLOSE
    )
    assert graphs_captured() <= 2


@pytest.mark.ort_only
def test_new_sizes_compile_nothing(compiled, device):
    import torch_ort

    call = compiled(mlp().to(device))
    for size in SIZES[:3]:
        call(torch.randn(size, 6, device=device)).sum().backward()
    before = torch_ort.counters()
    for size in SIZES[3:]:
        call(torch.randn(size, 6, device=device)).sum().backward()
    after = torch_ort.counters()
    assert after["graphs_compiled"] == before["graphs_compiled"]
    assert after["forward_runs"] == before["forward_runs"] + len(SIZES[3:])


class Of(nn.Module):
    """A weight and a function of what is weighted."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


FLOATS_OF_SIZES = {
    "normalized": lambda x: (x - x.mean()) / (x.std() + 1e-3),
    "deviations": lambda x: (x - x.mean(0)) / (x.std(0) + 1e-3),
    "variances": lambda x: x.var((0, 1), keepdim=True) + x.var(correction=2),
    "a share": lambda x: x * (1 / x.size(0)),
    "a power": lambda x: x * (x.size(0) * x.size(1)) ** -0.5,
    "a difference of shares": lambda x: x * (x.size(0) / 4 - 1.0 / x.size(0)),
    "filled": lambda x: torch.full((x.size(0), 1), 1.0 / x.size(0), device=x.device) * x,
    "a factor of what is added": lambda x: torch.add(x, x.sin(), alpha=1 / x.size(0)),
    "a bound": lambda x: x.clamp(-1 / x.size(0), 2.0 / x.size(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOATS_OF_SIZES)
def test_floats_that_depend_on_sizes(compare_training, graphs_captured, name):
    sizes = [3, 5, 7, 2, 11]
    compare_training(
        lambda: Of(FLOATS_OF_SIZES[name]), lambda step: torch.randn(sizes[step], 6),
        steps=len(sizes), **CLOSE,
    )  # fmt: skip
    assert graphs_captured() <= 2


ASKED_OF_SIZES = {
    "a tensor": lambda x: x * torch.tensor(2 / x.size(0), device=x.device),
    "compared": lambda x: x.sin() if x.size(0) / 2 > 3 else x.cos(),
    "a number of rows": lambda x: x[: int(x.size(0) * 0.5)].sin(),
    "rounded up": lambda x: x[: math.ceil(x.size(0) / 3)].sin(),
    "a root": lambda x: x / math.sqrt(x.size(0)),
    "rounded towards zero": lambda x: x * int(-x.size(0) / 2),
    "a distance": lambda x: x.roll(int((x.size(0) - 8) / 3), 0),
    "an exact quotient": lambda x: x * (x.size(0) / 10 // 0.1) - 7.5 // (1.0 / (x.size(0) + 1)),
    "a rest": lambda x: x * (x.size(0) / 7 % 0.3),
    "an integer of an exact quotient": lambda x: x * int(x.size(0) / 10 // 0.1),
    "floats of integers": lambda x: x * (float(x.numel()) // (x.shape[-1] ** 2)),
    "an ignored label": lambda x: F.cross_entropy(
        x, torch.arange(x.size(0), device=x.device) % 6, ignore_index=x.size(0) % 6
    )[None],
    "a rate": lambda x: F.dropout(x, 1 / x.size(0) - 1 / x.size(0)),
}


@pytest.mark.parametrize("name", ASKED_OF_SIZES)
def test_what_is_asked_of_floats_of_sizes(compare_training, name):
    sizes = [3, 5, 7, 2, 11, 6, 7, 4]
    compare_training(
        lambda: Of(ASKED_OF_SIZES[name]), lambda step: torch.randn(sizes[step], 6),
        steps=len(sizes), **CLOSE,
    )  # fmt: skip


def test_images_of_many_sizes(compare_training, graphs_captured):
    def model():
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        )

    sizes = [(2, 8, 8), (3, 9, 7), (4, 12, 10), (2, 7, 15), (5, 8, 9)]

    def inputs(step):
        batch, height, width = sizes[step]
        return torch.randn(batch, 3, height, width)

    compare_training(model, inputs, steps=len(sizes), **CLOSE)
    assert graphs_captured() <= 2


def test_sizes_zero_and_one(compare_training):
    sizes = [4, 1, 7, 0, 1, 5, 0]
    compare_training(mlp, lambda step: torch.randn(sizes[step], 6), steps=len(sizes))


@pytest.mark.hands_over("numbers read from tensors")
@pytest.mark.parametrize("dynamic", [True, False])
def test_dynamic_setting_of_compile(compare_training, dynamic):
    compare_training(
        mlp, lambda step: torch.randn(3 + step, 6), compile_settings={"dynamic": dynamic}
    )


def test_marked_dimension_is_captured_once(compare_training, graphs_captured):
    def inputs(step):
        x = torch.randn(SIZES[step], 6)
        torch._dynamo.mark_dynamic(x, 0)
        return x

    compare_training(mlp, inputs, steps=5)
    assert graphs_captured() == 1


def test_old_sizes_come_back(compare_training):
    sizes = [3, 5, 3, 7, 5, 3]
    compare_training(mlp, lambda step: torch.randn(sizes[step], 6), steps=len(sizes))


def test_backward_after_a_forward_of_another_size(device, compiled):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    call = compiled(model)
    inputs = [torch.randn(size, 6, device=device, requires_grad=True) for size in (3, 5, 7, 4)]
    losses = [call(x).pow(2).sum() for x in inputs]
    for i in (2, 0, 3, 1):
        losses[i].backward()
    for x in inputs:
        want = torch.autograd.grad(model(x).pow(2).sum(), x)[0]
        torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2, x.shape[0] * 2, x.shape[0]),
        lambda x: x.sum() / x.shape[0],
        lambda x: x + torch.arange(x.shape[0], device=x.device).unsqueeze(1),
        lambda x: x.reshape(x.shape[0] * 3, 2).sum(1),
        lambda x: torch.cat([x, x[: x.shape[0] // 2]]).exp(),
        lambda x: x[-1] * x.new_ones(x.shape[0], 1),
        lambda x: F.pad(x, (0, 0, 0, 16 - x.shape[0])),
        lambda x: x.split([1, x.shape[0] - 1])[1].exp(),
        lambda x: (x @ x.t()).softmax(-1),
        lambda x: x.view(1, -1, 6).expand(x.shape[0], -1, -1).sum(0),
    ],
    ids=[
        "sizes_out", "mean", "arange", "reshape", "slice", "new_ones", "pad", "split", "square",
        "expand",
    ],
)  # fmt: skip
def test_arithmetic_on_sizes(compare_training, function):
    compare_training(
        lambda: function, lambda step: torch.randn(3 + 2 * step, 6, requires_grad=True), steps=4
    )


def test_two_inputs_share_a_size(compare_training):
    compare_training(
        lambda: lambda a, b: (a * b).sum(1) + a.shape[0],
        lambda step: (torch.randn(2 + step, 4, requires_grad=True), torch.randn(2 + step, 4)),
        steps=4,
    )


@pytest.mark.hands_over("numbers read from tensors")
def test_python_numbers_change_between_calls(compare_training):
    compare_training(
        lambda: lambda x, scale, shift: x * scale + shift,
        lambda step: (torch.randn(4, requires_grad=True), 0.5 + step, step),
        steps=5,
    )


def test_running_statistics_with_a_dynamic_batch(compare_training):
    compare_training(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)),
        lambda step: torch.randn(SIZES[step], 6),
        steps=5,
    )


class TestSizesFromData:
    @pytest.mark.hands_over("unbacked sizes")
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x[x > 0].exp(),
            lambda x: torch.masked_select(x, x > 0) * 2,
            lambda x: x[torch.nonzero(x.sum(1) > 0).squeeze(1)].sum(0),
            lambda x: x.flatten()[(x > 0).flatten().nonzero().squeeze(1)] * 2,
            lambda x: (x.detach().round().unique() * 2, x.exp()),
        ],
        ids=["mask", "masked_select", "nonzero_rows", "nonzero", "unique"],
    )
    @captures_data_dependent_sizes
    def test_selected_values(self, compare_training, function):
        compare_training(
            lambda: function, lambda step: torch.randn(4, 6, requires_grad=True), steps=4
        )

    @pytest.mark.hands_over("unbacked sizes")
    @captures_data_dependent_sizes
    def test_nothing_and_everything_selected(self, compare_training):
        def inputs(step):
            x = torch.rand(4, 6) + 0.1
            return (x if step % 2 else -x).requires_grad_()

        compare_training(lambda: lambda x: x[x > 0].exp(), inputs, steps=4)

    @pytest.mark.hands_over("unbacked sizes")
    @captures_data_dependent_sizes
    def test_selected_rows_through_layers(self, compare_training):
        class Selected(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(6, 8)
                self.head = nn.Linear(8, 2)

            def forward(self, x, keep):
                hidden = torch.tanh(self.body(x))
                return self.head(hidden[keep]).exp().sum(-1), hidden

        compare_training(Selected, lambda step: (torch.randn(6, 6), torch.rand(6) > 0.4), steps=4)

    @pytest.mark.hands_over("numbers read from tensors")
    @captures_data_dependent_sizes
    def test_number_read_from_a_tensor(self, compare_training):
        compare_training(
            lambda: lambda x, n: x * n.item() + n.float().item(),
            lambda step: (torch.randn(4, requires_grad=True), torch.tensor(step + 2)),
        )

    @pytest.mark.hands_over("numbers read from tensors")
    @captures_data_dependent_sizes
    def test_size_read_from_a_tensor(self, compare_training):
        def function(x, n):
            size = n.item()
            torch._check(size >= 0)
            torch._check(size <= x.shape[0])
            return x.narrow(0, 0, size).exp()

        compare_training(
            lambda: function,
            lambda step: (torch.randn(8, 3, requires_grad=True), torch.tensor(step + 2)),
        )

    @pytest.mark.hands_over("unbacked sizes")
    @captures_data_dependent_sizes
    def test_repeats_read_from_a_tensor(self, compare_training):
        compare_training(
            lambda: lambda x, repeats: x.repeat_interleave(repeats, 0).exp(),
            lambda step: (torch.randn(4, 3, requires_grad=True), torch.randint(0, 4, (4,))),
        )

    @pytest.mark.hands_over("unbacked sizes")
    @captures_data_dependent_sizes
    def test_with_a_dynamic_batch(self, compare_training):
        compare_training(
            lambda: lambda x: (x[x > 0].sum() + x.shape[0], x * 2),
            lambda step: torch.randn(SIZES[step], 6, requires_grad=True),
            steps=5,
        )

    @pytest.mark.hands_over("numbers read from tensors")
    @captures_data_dependent_sizes
    @pytest.mark.compile_only("needs fullgraph")
    def test_failing_check_is_an_error_in_its_own_words(self, device, backend):
        def function(x, n):
            size = n.item()
            torch._check(size >= 0)
            torch._check(size <= 4)
            return x * torch.ones(size, 1, device=x.device)

        call = torch.compile(function, backend=backend, fullgraph=True)
        x = torch.ones(3, device=device)
        assert call(x, torch.tensor(2)).shape == (2, 3)
        with pytest.raises(RuntimeError, match=r"u\d+ <= 4|<= 4"):
            call(x, torch.tensor(9))

    def test_default_settings_break_the_graph(self, compare_training):
        compare_training(
            lambda: lambda x: (x * 2)[x > 0].exp() + 1,
            lambda step: torch.randn(4, 6, requires_grad=True),
            compile_settings={"fullgraph": False},
        )


@pytest.mark.parametrize("sizes", [(0,), (3, 0), (0, 4)])
@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax_over_no_numbers(compare_training, function, sizes):
    compare_training(
        lambda: lambda x: function(x, -1), lambda step: torch.randn(sizes, requires_grad=True)
    )
