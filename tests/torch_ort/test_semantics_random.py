# Random numbers: values, masks and the generator's final state are eager's own, bit for bit.
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.both_roads

EXACT = {"rtol": 0.0, "atol": 0.0}


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 16, requires_grad=True)


@pytest.mark.parametrize(
    "p",
    [
        0.0,
        0.1,
        0.5,
        pytest.param(
            1.0,
            marks=pytest.mark.aot_eager_fails("native_dropout draws a mask that eager does not"),
        ),
    ],
)
def test_dropout_draws_the_stream_of_eager(compare_training, p):
    compare_training(lambda: nn.Sequential(nn.Dropout(p), nn.ReLU()), rows, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_dropout_round_as_in_eager(compiled, dtype, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_DISABLE", "own_kernels")

    def dropout(x):
        return F.dropout(x, 0.3)

    x, gradient = (torch.randn(6, 16).to(dtype) for _ in range(2))
    found = []
    for run in (dropout, compiled(dropout)):
        given = x.clone().requires_grad_()
        torch.manual_seed(1)
        run(given).backward(gradient)
        found.append(given.grad)
    torch.testing.assert_close(*found, **EXACT)


def test_dropout_in_a_network(compare_training):
    def model():
        return nn.Sequential(
            nn.Linear(16, 32), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
        )

    compare_training(model, rows, steps=4)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Dropout(0.4, inplace=True),
        lambda: nn.AlphaDropout(0.4),
        lambda: nn.FeatureAlphaDropout(0.4),
        lambda: nn.Dropout1d(0.4),
        lambda: nn.RReLU(),
    ],
    ids=["in_place", "alpha", "feature_alpha", "channels", "rrelu"],
)
def test_random_layers(compare_training, layer):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return self.layer(x * self.scale)

    # The draws are the same; a sum over rows may round in another order.
    compare_training(Scaled, lambda step: torch.randn(2, 6, 16), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(6, 16, device=x.device),
        lambda x: torch.rand_like(x),
        lambda x: torch.randn_like(x),
        lambda x: torch.bernoulli(torch.sigmoid(x.detach())),
        lambda x: torch.randint(0, 5, (6, 16), device=x.device),
        lambda x: torch.empty_like(x).uniform_(-1, 1),
        lambda x: torch.empty_like(x).exponential_(),
        lambda x: torch.normal(x.detach(), 0.5),
        lambda x: torch.randperm(16, device=x.device).float(),
        lambda x: torch.multinomial(torch.softmax(x.detach(), -1), 16).float(),
        lambda x: torch.poisson(x.detach().abs()),
    ],
    ids=[
        "rand", "rand_like", "randn_like", "bernoulli", "randint", "uniform_", "exponential_",
        "normal", "randperm", "multinomial", "poisson",
    ],
)  # fmt: skip
def test_random_functions(compare_training, draw):
    compare_training(lambda: lambda x: (x * draw(x), draw(x)), rows, **EXACT)


def test_gumbel_softmax(compare_training):
    compare_training(lambda: lambda x: F.gumbel_softmax(x, tau=0.5, hard=True), rows)


def test_order_of_draws(compare_training):
    def function(x):
        first = torch.rand_like(x)
        second = torch.randn_like(x)
        third = F.dropout(x, 0.5)
        return x * second + third, first

    # A GPU joins the product and the sum into one operation, which rounds once.
    compare_training(lambda: function, rows)


def test_equal_draws_are_not_merged(compiled, device):
    first, second = compiled(lambda x: (torch.rand_like(x), torch.rand_like(x)))(
        torch.zeros(8, device=device)
    )
    assert not torch.equal(first, second)


def test_attention_with_dropout(compare_training):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.project(x).view(2, 3, 3, 16).unbind(2)
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    compare_training(Attention, lambda step: torch.randn(2, 3, 16))


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand_like(gradient)


class NoisyBySize(Noisy):
    """Reads no gradient to draw for it."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand(gradient.shape, device=gradient.device)


@pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
@pytest.mark.parametrize("noisy", [Noisy, NoisyBySize])
def test_random_numbers_of_a_custom_backward(compare_training, noisy):
    def function(x):
        return noisy.apply(F.dropout(x, 0.5)) * torch.rand_like(x)

    compare_training(lambda: function, rows, **EXACT)


def test_retained_graph_keeps_its_mask(device, compiled):
    torch.manual_seed(0)
    x = torch.ones(64, device=device, requires_grad=True)
    y = compiled(lambda v: F.dropout(v * 3, 0.5))(x)
    y.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    torch.rand(5, device=device)
    y.sum().backward()
    assert torch.equal(first, x.grad)
    assert torch.equal(first != 0, y.detach() != 0)


def test_masks_of_two_live_forwards_are_kept_apart(device, compiled):
    torch.manual_seed(0)
    call = compiled(lambda v: F.dropout(v * 3, 0.5))
    inputs = [torch.ones(64, device=device, requires_grad=True) for _ in range(3)]
    outputs = [call(x) for x in inputs]
    for x, y in zip(reversed(inputs), reversed(outputs), strict=True):
        y.sum().backward()
        assert torch.equal(x.grad != 0, y.detach() != 0)
    assert not torch.equal(outputs[0], outputs[1])


def test_compiling_does_not_move_the_generator(device, compiled):
    call = compiled(lambda v: v * 2)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    call(torch.ones(3, device=device, requires_grad=True)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("exact", ["0", "1"])
def test_reseeding_repeats_a_run(device, compiled, exact, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", exact)
    call = compiled(lambda v: F.dropout(v, 0.5) * torch.randn_like(v))
    x = torch.ones(32, device=device)
    results = []
    for _ in range(3):
        torch.manual_seed(7)
        results.append((call(x), call(x)))
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0])
        assert torch.equal(other[1], results[0][1])
    assert not torch.equal(results[0][0], results[0][1])


def test_dropout_in_eval_is_the_identity(compare_training):
    compare_training(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 4)).eval(), rows, steps=2)


@pytest.mark.hands_over("numbers read from tensors")
def test_rate_changed_between_steps(compare_training):
    def change(model, step):
        model[0].p = 0.2 * step

    compare_training(
        lambda: nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 4)), rows, before_step=change
    )


@pytest.mark.compile_only("runs in PyTorch")
def test_explicit_generator(compare_training):
    generators = []

    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 4)
            device = self.linear.weight.device
            self.generator = torch.Generator(device).manual_seed(5)
            generators.append(self.generator)

        def forward(self, x):
            noise = torch.rand(x.shape, generator=self.generator, device=x.device)
            return self.linear(x + noise)

    # Torch draws from such a generator between two graphs.
    compare_training(Noise, rows, compile_settings={"fullgraph": False})
    assert torch.equal(generators[0].get_state(), generators[1].get_state())
