# Programs in processes of their own: the libraries of CUDA are opened once in a process. They are
# forked from one that has imported torch_ort, which would take most of the time.
from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.process
import os
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

_numbers = itertools.count()

AXPY = """
extern "C" __global__ void axpy(float* y, const float* x, float a, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}
"""

# What programs begin with: `cuda` is the room, `fake` its driver for memory.
_HEAD = """
import struct
from torch_ort import _C
from torch_ort._C import DeviceError, InternalError, Unsupported, UserError
from torch_ort.engine.cuda import configure
cuda = _C.cuda
AXPY = '''{axpy}'''

def refused(kind, call):
    try:
        call()
    except kind as error:
        assert type(error) is kind, type(error)
        return str(error)
    raise AssertionError(f"no {{kind.__name__}}")

def axpy(module, y, x, a, n, **settings):
    arguments = [struct.pack("P", y), struct.pack("P", x), struct.pack("f", a), struct.pack("i", n)]
    module.launch("axpy", (n // 64 + 1, 1, 1), (64, 1, 1), arguments, **settings)

configure()
"""

_FAKE = """
from emulated import cuda_driver
fake = cuda_driver.Driver()
"""


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch_ort"])  # which has used no CUDA by then


@dataclass(frozen=True)
class Program:
    """A program that runs, and the file of what it prints."""

    process: multiprocessing.process.BaseProcess
    output: Path

    def finish(self) -> str:
        """Give what it prints; the test fails if the program does, or hangs."""
        self.process.join(timeout=300)
        printed = self.output.read_text()
        assert self.process.exitcode == 0, f"{self.process.exitcode}\n{printed}"
        return printed


def start(folder: Path, code: str, fake: bool = True, **variables: str) -> Program:
    """Start a program, with the fake driver and NVRTC unless variables name others.

    It prints into a file of the folder.
    """
    output = folder / f"{next(_numbers)}.txt"
    arguments = str(output), program(code, fake), environment(fake, **variables)
    process = _context.Process(target=_execute, args=arguments)
    process.start()
    return Program(process, output)


def run(code: str, fake: bool = True, **variables: str) -> str:
    """Run a program, and give what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        return start(Path(folder), code, fake, **variables).finish()


def program(code: str, fake: bool = True) -> str:
    """Give the text of a program from what is particular of it."""
    return _HEAD.format(axpy=AXPY) + (_FAKE if fake else "") + textwrap.dedent(code)


def environment(fake: bool = True, **variables: str) -> dict[str, str]:
    """Give the environment of a program: this one's without variables of torch_ort's."""
    from emulated import cuda_driver

    library = str(cuda_driver.library())
    usual = {"TORCH_ORT_LIBCUDA": library, "TORCH_ORT_NVRTC": library} if fake else {}
    usual["TORCH_ORT_KERNEL_CACHE_BYTES"] = "0"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_ORT_")}
    return {**kept, **usual, **variables}


def _execute(output: str, code: str, variables: dict[str, str]) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(variables)
    exec(code, {"__name__": "program"})
    sys.stdout.flush()
