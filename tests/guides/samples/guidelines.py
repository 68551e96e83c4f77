# The snippets of both training guidelines, in their order, on a small model.
import glob
import warnings

import onnxruntime.training.ortmodule.torch_cpp_extensions.install
import torch
from onnxruntime.training.optim import FusedAdam
from onnxruntime.training.optim.fp16_optimizer import FP16_Optimizer
from onnxruntime.training.optim.fp16_optimizer import FP16_Optimizer as ORT_FP16_Optimizer
from onnxruntime.training.ortmodule import DebugOptions, LogLevel, ORTModule
from onnxruntime.training.ortmodule._custom_autograd_function import enable_custom_autograd_support
from onnxruntime.training.utils.data import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber

import torch_ort

ROWS = [(torch.randn(6), i % 3) for i in range(24)]


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))


def train(model, optimizer, loader, backward=None):
    losses = []
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        backward(loss) if backward else loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


LOADER = torch.utils.data.DataLoader(ROWS, batch_size=8)

# One line around the model.

want = make_model()
want = train(want, torch.optim.AdamW(want.parameters(), lr=0.1), LOADER)
model = ORTModule(make_model())
got = train(model, torch.optim.AdamW(model.parameters(), lr=0.1), LOADER)
torch.testing.assert_close(got, want)

# With options.

options = DebugOptions(save_onnx=True, log_level=LogLevel.VERBOSE, onnx_prefix="small")
model = ORTModule(make_model(), options)
got = train(model, torch.optim.AdamW(model.parameters(), lr=0.1), LOADER)
torch.testing.assert_close(got, want)
assert glob.glob("small_*_training.onnx")

# Functions are traced through.

enable_custom_autograd_support(False)
model = ORTModule(make_model())
got = train(model, torch.optim.AdamW(model.parameters(), lr=0.1), LOADER)
torch.testing.assert_close(got, want)
enable_custom_autograd_support(True)

# The optimizer.

model = ORTModule(make_model())
losses = train(model, FusedAdam(model.parameters(), lr=0.1), LOADER)
assert losses[-1].isfinite()

# What speeds up another library's optimizer; one that is not known stays, after a warning.

assert FP16_Optimizer is ORT_FP16_Optimizer
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert FP16_Optimizer(optimizer) is optimizer
assert len(told) == 1

# Nothing is left to build.
assert onnxruntime.training.ortmodule.torch_cpp_extensions.is_installed()

# Samplers, which give both of two ranks equally much.


def complexity_fn(row):
    return row[1]


def batch_fn(indices):
    return [indices[i : i + 4] for i in range(0, len(indices), 4)]


sampler = LoadBalancingDistributedSampler(
    ROWS, complexity_fn=complexity_fn, world_size=2, rank=0, shuffle=False
)
batch_sampler = LoadBalancingDistributedBatchSampler(sampler, batch_fn=batch_fn)
loader = torch.utils.data.DataLoader(ROWS, batch_sampler=batch_sampler)
for epoch in range(2):
    batch_sampler.set_epoch(epoch)
    assert len(train(model, optimizer, loader)) == len(batch_sampler) == 3

# Activations of a run, to be compared with those of another one.
model = make_model()
subscriber = StatisticsSubscriber("statistics", start_step=0, end_step=2)
GlobalSubscriberManager.subscribe(model, [subscriber])
train(ORTModule(model), torch.optim.SGD(model.parameters(), lr=0.1), LOADER)
assert glob.glob("statistics/step_*")

assert torch_ort.counters()["forward_runs"] > 0
