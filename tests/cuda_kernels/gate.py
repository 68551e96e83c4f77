# What kernels must be as machine code, with NVRTC and nvdisasm from PyPI or from a toolkit; no
# driver and no GPU.
from __future__ import annotations

import importlib.util
import os
import pickle
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from in_process import run

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
TOOLKITS = ("CUDA_HOME", "CUDA_PATH")  # variables that name the folder of one

_COMPILE = """
import pickle
from pathlib import Path

why = cuda.missing_compiler()
assert why == "", why + " (pip install nvidia-cuda-nvrtc)"
texts, architectures = pickle.loads(Path({path!r}).read_bytes())
images = {{
    (name, architecture): cuda.compile(name, text, architecture)
    for name, text in texts.items()
    for architecture in architectures
}}
built = {{key: image.wait() for key, image in images.items()}}
Path({path!r}).write_bytes(pickle.dumps(built))
"""


@dataclass(frozen=True)
class Built:
    """A text as machine code of one architecture, and what ptxas says of it."""

    name: str
    architecture: str
    cubin: bytes
    log: str


def compile_texts(
    texts: Mapping[str, str], architectures: Sequence[str] = ARCHITECTURES, **variables: str
) -> list[Built]:
    """Compile texts by name with the engine's own code, in a process of their own.

    Raises AssertionError if there is no NVRTC, or a text does not compile. Variables are those of
    the environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts"
        path.write_bytes(pickle.dumps((dict(texts), tuple(architectures))))
        # Where there is a driver, NVRTC takes what it has compiled before from a cache of its own,
        # and ptxas then says nothing.
        run(_COMPILE.format(path=str(path)), fake=False, CUDA_CACHE_DISABLE="1", **variables)
        built = pickle.loads(path.read_bytes())
    return [Built(*key, *made) for key, made in built.items()]


def instructions(built: Built) -> Counter[str]:
    """Count the instructions of a cubin by name, as LDG.E.128.CONSTANT."""
    return Counter(_INSTRUCTION.findall(_disassembled(built)))


def _disassembled(built: Built) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.cubin)
        file.flush()
        command = [nvdisasm(), "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE
)


def reads_at_once(built: Built) -> int:
    """Count the loads of 16 bytes that a thread starts before it computes with any of them.

    It is the longest run of them in the order of the code, where no instruction between two loads
    computes with floats.
    """
    longest = run = 0
    for name in _INSTRUCTION.findall(_disassembled(built)):
        if name.startswith("LDG.E.128"):
            run += 1
            longest = max(longest, run)
        elif name.startswith(("F", "H", "MUFU")):
            run = 0
    return longest


def nvdisasm() -> str:
    """Give the path of PyPI's nvdisasm, or else of a toolkit's."""
    spec = importlib.util.find_spec("nvidia")
    packages = (spec and spec.submodule_search_locations) or ()
    folders = [Path(package) / "cu13" / "bin" for package in packages]
    folders += [Path(os.environ[name]) / "bin" for name in TOOLKITS if os.environ.get(name)]
    candidates = [folder / "nvdisasm" for folder in folders]
    found = next((str(path) for path in candidates if path.exists()), shutil.which("nvdisasm"))
    assert found, "no nvdisasm (pip install nvidia-cuda-nvdisasm, or set CUDA_HOME)"
    return found


@dataclass(frozen=True)
class Accesses:
    """What a text of the generator's asks of memory.

    How many instructions at least have to read and to write 16 bytes, and in words what it takes in
    smaller pieces.
    """

    wide_loads: int
    wide_stores: int
    narrow: tuple[str, ...]


_SIZES = {"float": 4, "double": 8, "bf16": 2, "f16": 2, "boolean": 1, "u8": 1, "i8": 1, "i16": 2}
_SIZES |= {"i32": 4, "i64": 8}


def accesses(text: str) -> Accesses:
    """Read of a text what its kernel should be as machine code."""
    kernel = text[text.index('extern "C"') :]
    size_of = {
        f"{kind}{index}": _SIZES[dtype]
        for dtype, kind, index in re.findall(r"(\w+)\* (in|out)(\d+)\b", kernel)
    }
    vector = max(map(int, re.findall(r"threadIdx\.x\) \* (\d+)", kernel)), default=1)
    loads = set(re.findall(r"\bload\(\w+(?:\[e\])?, \(?(?:at|in)(\d+)", kernel))
    stores = set(re.findall(r"\bstore\(to(\d+)", kernel))
    whole = {f"in{i}" for i in loads} | {f"out{i}" for i in stores}
    single = re.findall(r"\b(load|store)_each\((?:\w+(?:\[e\])?, )?\(?(?:at|in|to)(\d+)", kernel)
    narrow = [f"{'in' if kind == 'load' else 'out'}{i} by elements" for kind, i in single]
    bytes_of = {name: vector * size_of[name] for name in whole}
    if bytes_of and max(bytes_of.values()) < 16:
        narrow.append(f"nothing by more than {max(bytes_of.values())} bytes")
    counts = {
        kind: sum(bytes_of[name] // 16 for name in whole if name.startswith(kind))
        for kind in ("in", "out")
    }
    return Accesses(counts["in"], counts["out"], tuple(narrow))


_PROPERTIES = re.compile(
    r"Function properties for (\S+)\n\D*"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)


def faults(built: Built, wide_loads: int = 0, wide_stores: int = 0) -> list[str]:
    """List what is wrong with machine code: spills, local memory, accesses that are too narrow.

    So many instructions at least load and store 16 bytes of global memory.
    """
    functions = _PROPERTIES.findall(built.log)
    found = [] if functions else ["ptxas says nothing of any function"]
    for name, stack, stores, loads in functions:
        if int(stores) or int(loads):
            found.append(f"{name} spills {stores} bytes and reads {loads} again")
        elif int(stack):
            found.append(f"{name} has {stack} bytes of local memory")
    counts = instructions(built)
    local = [name for name in counts if name.split(".")[0] in ("LDL", "STL")]
    if local:
        found.append(f"local memory is used: {', '.join(sorted(local))}")
    for kind, want in (("LDG", wide_loads), ("STG", wide_stores)):
        got = sum(
            count
            for name, count in counts.items()
            if name.split(".")[0] == kind and "128" in name.split(".")
        )
        if got < want:
            found.append(f"{got} {kind} of 16 bytes, want {want}")
    return [f"{built.name} for {built.architecture}: {each}" for each in found]
