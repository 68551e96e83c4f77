# Inputs, weights and tangents with unusual strides, and tensors without elements.
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.both_roads


class TestStrides:
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(
                lambda: torch.randn(6, 4).t(),
                marks=pytest.mark.compile_only("inputs that are not dense are copied"),
            ),
            lambda: torch.randn(4, 12)[:, ::2],
            lambda: torch.randn(1, 6).expand(4, 6),
            lambda: torch.randn(30)[3:27].view(4, 6),
            lambda: torch.randn(40).as_strided((4, 6), (7, 1), 2),
            lambda: torch.randn(6).expand(4, 6),
        ],
        ids=["transposed", "every_second", "expanded", "offset", "gaps", "overlapping"],
    )
    def test_inputs(self, compare_training, make):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(6, 5)

            def forward(self, x):
                return self.linear(x), x * 2, x.t().reshape(-1), x.flip(0).cumsum(1)

        compare_training(Model, lambda step: make())
        compare_training(Model, lambda step: make().requires_grad_())

    def test_inputs_whose_strides_change_between_steps(self, compare_training):
        def inputs(step):
            return torch.randn(6, 6).t() if step % 2 else torch.randn(6, 6)

        compare_training(lambda: nn.Linear(6, 5), inputs, steps=4)

    def test_unaligned_input(self, compare_training):
        compare_training(lambda: nn.Linear(6, 5), lambda step: torch.randn(25)[1:].view(4, 6))

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.clamp(-0.5, 0.5),
            lambda x: x.square(),
            lambda x: x.exp().rsqrt(),
            lambda x: x / x.shape[0],
            lambda x: x * x.shape[1],
            lambda x: x // torch.tensor(0.3, device=x.device),
        ],
        ids=["clamp", "square", "rsqrt", "quotient", "product", "floor_divide"],
    )
    def test_elements_stay_where_their_operand_has_them(self, compiled, device, function):
        x = torch.randn(3, 4, 5, 6, device=device).to(memory_format=torch.channels_last)
        want, got = function(x), compiled(function)(x)
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want)

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.amax(-1).unsqueeze(1).expand(-1, 3),
            lambda x: x.exp().split(2, 0)[0].unsqueeze(1).expand(-1, 3, -1),
            lambda x: (x.exp()[:, :1].expand(-1, 5).t(), x.tanh()),
        ],
    )
    def test_outputs_that_repeat_what_backward_reads(self, compiled, device, function):
        found = []
        for call in (function, compiled(function)):
            x = torch.linspace(-1, 1, 12, device=device).view(4, 3).requires_grad_()
            results = tree_leaves(call(x))
            sum(result.square().sum() for result in results).backward()
            found.append([*results, x.grad])
            strides = [result.stride() for result in results]
        torch.testing.assert_close(found[1], found[0])
        assert strides == [result.stride() for result in found[0][:-1]]

    @pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("inputs", [torch.contiguous_format, torch.channels_last])
    def test_channels_last(self, compare_training, weights, inputs):
        def model():
            layers = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(8, 4, 1),
                nn.AdaptiveAvgPool2d(2),
            )
            return layers.to(memory_format=weights)

        compare_training(
            model,
            lambda step: torch.randn(2, 3, 8, 8).to(memory_format=inputs).requires_grad_(),
            rtol=1e-4,
            atol=1e-5,
        )

    def test_tangent_with_other_strides(self, device, both):
        def function(x):
            return x.exp() * 2

        for tangent in (
            torch.randn(6, 4, device=device).t(),
            torch.randn(1, 6, device=device).expand(4, 6),
            torch.randn(4, 12, device=device)[:, ::2],
        ):
            gradients = []
            for call in both(function):
                x = torch.linspace(-1, 1, 24, device=device).reshape(4, 6).requires_grad_()
                call(x).backward(tangent)
                gradients.append(x.grad)
            torch.testing.assert_close(gradients[1], gradients[0])


class TestZeroSizes:
    @pytest.mark.parametrize("shape", [(0, 6), (3, 0, 6)], ids=str)
    def test_batch(self, compare_training, shape):
        compare_training(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)),
            lambda step: torch.randn(shape, requires_grad=True),
        )

    def test_images(self, compare_training):
        compare_training(
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)),
            lambda step: torch.randn(0, 3, 8, 8),
        )

    def test_features(self, compare_training):
        compare_training(
            lambda: lambda x: (x.sum(0), x.exp(), torch.cat([x, x + 1])),
            lambda step: torch.randn(4, 0, requires_grad=True),
        )

    def test_empty_then_full(self, compare_training):
        compare_training(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)),
            lambda step: torch.randn((0, 3, 0, 5)[step], 6),
            steps=4,
        )

    def test_scalars(self, compare_training):
        compare_training(
            lambda: lambda x: (x * 2, x.exp()), lambda step: torch.randn((), requires_grad=True)
        )


class TestPlacesInMemory:
    @pytest.mark.parametrize("start", [0, 3])
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.as_strided((2, 2), (1, 1), 1).exp(),
            lambda x: x[1:].as_strided((2, 2), (1, 1), 1).exp(),
            lambda x: x[1:].as_strided((2, 2), (1, 1)).exp(),
            lambda x: (x * 2)[1:].as_strided((2, 2), (1, 1), 1).exp(),
        ],
        ids=["input", "view", "view-without-offset", "intermediate"],
    )
    def test_as_strided_counts_from_where_memory_begins(self, compiled, function, start):
        """Not from where the caller's tensor lies in it."""
        call = compiled(function)
        for shape in ((4, 6), (3, 8)):
            x = torch.arange(30.0)[start : start + 24].view(shape)
            torch.testing.assert_close(call(x), function(x))
