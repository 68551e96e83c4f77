"""The test device itself: what it refuses and how it fails, as a GPU does."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from emulated import cuda_device
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

if not cuda_device.is_active():
    pytest.skip("about the test device, which -m cuda makes without a GPU", allow_module_level=True)

pytestmark = pytest.mark.cuda


def on_both(function, *tensors):
    """Give results and gradients of a function on the CPU and on the device."""
    results = []
    for device in ("cpu", "cuda"):
        given = [x.detach().to(device) for x in tensors]
        for x in given:
            x.requires_grad_(x.is_floating_point())
        result = function(*given)
        wanted = [x for x in given if x.requires_grad]
        gradients = torch.autograd.grad(result.float().pow(2).sum(), wanted)
        assert all(x.device.type == device for x in (result, *gradients))
        results.append([x.cpu() for x in (result, *gradients)])
    return results


def test_says_that_it_is_cuda():
    x = torch.empty(2, device="cuda")
    assert x.is_cuda
    assert str(x.device) == "cuda:0"
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.cuda.device_count() == 1
    assert torch.cuda.get_device_capability() == (9, 0)


def test_the_host_cannot_read_its_memory():
    here = Path(__file__).parents[1]
    program = (
        "from emulated import cuda_device; cuda_device.activate(); import ctypes, torch; "
        "x = torch.ones(4, device='cuda'); ctypes.c_float.from_address(x.data_ptr()).value"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(here)}, capture_output=True
    )
    assert done.returncode == -signal.SIGSEGV


def test_new_and_freed_memory_is_poisoned():
    for _ in range(2):
        x = torch.empty(1000, device="cuda")
        assert x.isnan().all()
        x.fill_(1)
        del x


def test_addresses_are_aligned_and_memory_is_counted():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = [torch.empty(n, device="cuda") for n in (1, 100, 1000)]
    assert all(x.data_ptr() % 512 == 0 for x in held)
    assert torch.cuda.memory_allocated() - before == 512 + 512 + 4096
    del held
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + 5120


def test_as_much_memory_is_held_as_by_pytorchs_allocator():
    gc.collect()
    torch.cuda.empty_cache()
    start, mib = torch.cuda.memory_reserved(), 1 << 20

    def held() -> float:
        return (torch.cuda.memory_reserved() - start) / mib

    def memory(bytes_: int) -> torch.Tensor:
        return torch.empty(bytes_, dtype=torch.uint8, device="cuda")

    # Small segments may have room left from before; these fill one.
    small = [memory(mib) for _ in range(2)]
    assert held() % 2 == 0
    start += held() * mib
    large = [memory(3 * mib) for _ in range(6)]
    assert held() == 20
    rest = memory(2 * mib)  # 18 MiB are taken
    assert held() == 20
    own = memory(11 * mib)
    assert held() == 20 + 12
    del own
    assert held() == 20 + 12
    parts = [memory(4 * mib) for _ in range(2)]  # cut out of it
    assert held() == 20 + 12
    del parts
    own = memory(12 * mib)  # its blocks are one again
    assert held() == 20 + 12
    del own, large
    torch.cuda.empty_cache()
    assert held() == 20  # of which `rest` has a part
    del rest, small
    torch.cuda.empty_cache()
    assert held() <= 0


def test_out_of_memory():
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(1 << 30, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: x + y,
        lambda x, y: y @ x,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: F.linear(x, y),
        lambda x, y: x.add_(y),
    ],
)
def test_tensors_of_two_devices(call):
    x, y = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="found at least two devices"):
        call(x, y)


def test_numbers_of_the_cpu_may_take_part():
    x = torch.ones(4, device="cuda")
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 4
    assert x.masked_fill(x > 0, torch.tensor(5.0)).tolist() == [5.0] * 4
    x[1] = torch.tensor(7.0)
    assert x[torch.tensor([1])].tolist() == [7.0]


def test_no_second_device():
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(2, device="cuda:1")


def test_what_it_gives_is_new_memory_of_the_device():
    x = torch.arange(6.0, device="cuda")
    result = x.view(2, 3).t()
    assert result.data_ptr() == x.data_ptr()
    assert (x * 2).data_ptr() % 512 == 0
    out = torch.empty(0, device="cuda")
    torch.mul(x, 2, out=out)
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_views_in_inference_mode_are_views_of_usual_tensors():
    x = torch.ones(3, 2, device="cuda")
    with torch.inference_mode():
        assert not x[0].is_inference()
        assert (x * 2).is_inference()


def test_its_random_numbers_are_its_own():
    torch.manual_seed(3)
    on_cpu = torch.get_rng_state()
    first = torch.rand(4, device="cuda")
    assert torch.equal(torch.get_rng_state(), on_cpu)
    assert torch.cuda.get_rng_state().numel() == 16  # a seed and an offset
    state = torch.cuda.get_rng_state()
    second = torch.rand(4, device="cuda")
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), second)
    own = torch.Generator(device="cuda").manual_seed(3)
    assert torch.equal(torch.rand(4, device="cuda", generator=own), first)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(4, device="cuda", generator=torch.Generator())


def test_streams_and_events():
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        event.record()
    assert torch.cuda.current_stream() != stream
    event.synchronize()
    assert event.query()
    later = torch.cuda.Event(enable_timing=True)
    later.record()
    later.synchronize()
    assert isinstance(later, torch.cuda.Event)
    assert event.elapsed_time(later) >= 0


def test_pinned_memory():
    x = torch.arange(4.0).pin_memory()
    assert x.is_pinned()
    assert not torch.arange(4.0).is_pinned()
    assert x.to("cuda", non_blocking=True).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells(cell):
    """The CPU composes them of products and activations, a GPU has a kernel for the rest."""
    layer = cell(4, 6)
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        states = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x)
        return torch.stack(states) if isinstance(states, tuple) else states

    before = cuda_device.calls()
    want, got = on_both(run, torch.randn(3, 4), *layer.parameters())
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    assert not any("addcmul" in name for name in cuda_device.calls() - before)


def test_convolution_of_single_channels():
    want, got = on_both(
        lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=4),
        torch.randn(2, 4, 5, 6), torch.randn(4, 1, 3, 3), torch.randn(4),
    )  # fmt: skip
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


def test_half_to_float_softmax():
    want, got = on_both(
        lambda x: torch.softmax(x, 1, dtype=torch.float32), torch.randn(3, 5, dtype=torch.float16)
    )
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("is_causal", "mask"), [(False, None), (True, None), (False, "bool"), (False, "float")]
)
def test_attention(dtype, is_causal, mask):
    qkv = [torch.randn(2, 3, 8, 16, dtype=dtype) for _ in range(3)]
    masks = {"bool": torch.ones(8, 8).tril().bool(), "float": torch.randn(2, 1, 8, 8).to(dtype)}
    given = [*qkv, masks[mask]] if mask else qkv

    want, got = on_both(lambda *x: F.scaled_dot_product_attention(*x, is_causal=is_causal), *given)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


def test_attention_chooses_its_kernel():
    def rows_before_heads(dtype, **settings):
        qkv = [torch.randn(2, 3, 8, 16, dtype=dtype, device="cuda") for _ in range(3)]
        x = F.scaled_dot_product_attention(*qkv, **settings)
        return x.transpose(1, 2).is_contiguous()

    # The memory-efficient one leaves heads after rows, flash as its query has them.
    assert rows_before_heads(torch.float32)
    assert not rows_before_heads(torch.bfloat16)
    assert not rows_before_heads(torch.float64)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], True):
        assert rows_before_heads(torch.bfloat16)
    assert not rows_before_heads(torch.bfloat16)


def test_dropout_of_attention_is_one_mask_in_both_directions():
    q, k = (torch.randn(1, 1, 8, 8, device="cuda") for _ in range(2))
    v = torch.eye(8, device="cuda").reshape(1, 1, 8, 8).requires_grad_()
    probabilities = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    (gradient,) = torch.autograd.grad(probabilities.sum(), v)
    # With the identity as values the result is the probabilities, and their sums are the gradient.
    torch.testing.assert_close(gradient[0, 0, :, 0], probabilities[0, 0].sum(0))


def test_attention_refuses_rows_of_a_mask_that_lie_as_no_gpu_reads_them():
    q, k, v = (torch.randn(2, 2, 10, 8, device="cuda").requires_grad_() for _ in range(3))
    bias = torch.zeros(10, 10, device="cuda")
    words = r"not correctly aligned \(strideM\). attn_bias.stride\(2\) = 10, .* multiple of 4"
    with pytest.raises(RuntimeError, match=words):
        torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias.expand(2, 2, 10, 10), False
        )
    # The function itself makes rows wide enough, but hooks may pack what they then lie in.
    y = F.scaled_dot_product_attention(q, k, v, bias)
    torch.autograd.grad(y.sum(), q)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        y = F.scaled_dot_product_attention(q, k, v, bias)
    with pytest.raises(RuntimeError, match=words):
        torch.autograd.grad(y.sum(), q)


def test_dropout_draws_in_another_order_than_bernoulli():
    def drawn(draw):
        torch.manual_seed(3)
        return draw(), torch.cuda.get_rng_state()

    masks = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(40, 30, device="cuda", dtype=dtype)
        mask, state = drawn(lambda x=x: torch.native_dropout(x, 0.5, True)[1])
        turned, _ = drawn(lambda x=x: torch.native_dropout(x.t(), 0.5, True)[1])
        other, state_of_other = drawn(lambda mask=mask: torch.empty_like(mask).bernoulli_(0.5))
        assert torch.equal(turned.t(), mask)  # the order is that of memory
        assert not torch.equal(mask, other)
        assert mask.sum() == other.sum()
        assert torch.equal(state, state_of_other)
        masks.append(mask)
    assert not torch.equal(*masks)


def test_products_of_halves_in_float():
    a, b = (torch.randn(4, 4, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    wide = torch.mm(a, b, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, a.float() @ b.float())
