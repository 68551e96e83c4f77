"""Custom autograd Functions that no compiler can look into, inside of one compiled graph.

Two Functions of opaque code: one computes with numpy, the other in C++ that is compiled here (with
`c++`, no CUDA and no header of PyTorch) and called through ctypes by the addresses of tensors. A
small classifier that uses both is trained in eager PyTorch, in an ORTModule, where each Function
becomes a PythonOp by itself, and by torch.compile(fullgraph=True), where `torch_ort.python_op`
makes them operators. The losses agree, and the engine runs everything in one graph.

    python examples/custom_autograd.py
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import torch_ort

SOURCE = """
#include <cmath>
#include <cstdint>

// Rounds to multiples of a step, as a small integer format would hold the numbers.
extern "C" void quantize(const float* x, float* y, int64_t count, float step, float limit) {
  for (int64_t i = 0; i < count; ++i) {
    const float level = std::nearbyint(x[i] / step);
    y[i] = std::fmin(std::fmax(level, -limit), limit) * step;
  }
}
"""


def build(folder: str) -> ctypes.CDLL:
    """Compile the C++ source and load it."""
    source, library = os.path.join(folder, "quantize.cpp"), os.path.join(folder, "quantize.so")
    with open(source, "w", encoding="utf-8") as file:
        file.write(SOURCE)
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
    loaded = ctypes.CDLL(library)
    loaded.quantize.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_float,
    ]  # fmt: skip
    loaded.quantize.restype = None
    return loaded


class Quantize(torch.autograd.Function):
    """Rounds in C++; its gradient goes straight through what was not cut off."""

    library: ctypes.CDLL

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: float, bits: int) -> torch.Tensor:
        """Round to multiples of `step` that fit into `bits`."""
        limit = 2 ** (bits - 1) - 1
        ctx.save_for_backward(x)
        ctx.largest = limit * step
        x = x.contiguous()
        y = torch.empty_like(x)
        Quantize.library.quantize(x.data_ptr(), y.data_ptr(), x.numel(), step, limit)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        """Give the gradient of the identity, within the limits."""
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= ctx.largest), None, None


class Softsign(torch.autograd.Function):
    """x / (1 + |x|), in numpy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Compute on the tensor's own memory; arrays may be kept on the context."""
        numbers = x.detach().numpy()
        ctx.below = 1 + np.abs(numbers)
        return torch.from_numpy(numbers / ctx.below)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Multiply by the derivative."""
        return torch.from_numpy(grad.numpy() / ctx.below**2)


class Classifier(nn.Module):
    """A hidden layer of quantized numbers."""

    def __init__(self, softsign: Callable[..., Any], quantize: Callable[..., Any]) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(2, 64), nn.Linear(64, 2)
        self.softsign, self.quantize = softsign, quantize

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Give the loss."""
        features = self.quantize(self.softsign(self.hidden(x)), 0.05, 6)
        return functional.cross_entropy(self.last(features), labels)


def train(model: Callable[..., Any], parameters: Any, steps: int) -> list[float]:
    """Train on points inside and outside of a ring; give the losses."""
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        x = torch.randn(256, 2, generator=generator)
        loss = model(x, (x.norm(dim=1) > 1.2).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> int:
    """Train three times and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        Quantize.library = build(folder)
    torch.manual_seed(0)
    eager = Classifier(Softsign.apply, Quantize.apply)
    wrapped = torch_ort.ORTModule(copy.deepcopy(eager))
    compiled = copy.deepcopy(eager)
    compiled.softsign, compiled.quantize = map(torch_ort.python_op, (Softsign, Quantize))
    runs = {
        "eager PyTorch": train(eager, eager.parameters(), args.steps),
        "ORTModule": train(wrapped, wrapped.parameters(), args.steps),
        "torch.compile": train(
            torch.compile(compiled, backend="ort", fullgraph=True),
            compiled.parameters(),
            args.steps,
        ),
    }
    for name, losses in runs.items():
        print(f"{name:14}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    counters = torch_ort.counters()
    print(
        f"engine: {counters['graphs_captured']} graphs, {counters['steps_python']} calls of "
        f"Functions, fallbacks {counters['fallbacks']}"
    )
    want = runs.pop("eager PyTorch")
    differs = max(abs(a - b) for losses in runs.values() for a, b in zip(losses, want, strict=True))
    print(f"largest difference of a loss from eager's: {differs:.1e}")
    return 0 if differs < 0.05 and counters["fallbacks"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
