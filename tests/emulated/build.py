# Builds the C++ of this folder when a test first asks for it, into build/emulated/. It is no target
# of CMake's: `make build` and the wheel know nothing of it, and it costs nobody else a second.
from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / "build" / "emulated"
FLAGS = ("-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")


def torch_folder() -> Path:
    """Give the folder of the torch package, which is not imported for it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None, "torch is not installed"
    return Path(spec.origin).parent


def torch_version() -> dict[str, str | None]:
    """Give the names of torch/version.py, without importing torch."""
    names: dict[str, str | None] = {}
    exec((torch_folder() / "version.py").read_text(), names)
    return names


def compiler() -> list[str]:
    """Give the command of the C++ compiler: CXX, else c++, through ccache where there is one."""
    ccache = shutil.which("ccache")
    return ([ccache] if ccache else []) + os.environ.get("CXX", "c++").split()


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stderr}"


def shared_library(name: str, flags: Sequence[str] = (), links: Sequence[str] = ()) -> Path:
    """Build the sources in the folder `name` into a shared library, and give its path.

    What is there for the same sources, flags and torch stays as it is. Processes may ask at once:
    one builds, the others wait.
    """
    files = sorted((HERE / name).glob("*.*"))
    key = hashlib.sha256(repr((FLAGS, flags, links, torch_version()["__version__"])).encode())
    for file in files:
        key.update(file.name.encode() + file.read_bytes())
    folder = CACHE / f"{name}-{key.hexdigest()[:16]}"
    sources = [file for file in files if file.suffix == ".cpp"]
    return _build_once(folder / f"libemulated_{name}.so", sources, flags, links)


def library_of_text(name: str, text: str, flags: Sequence[str], links: Sequence[str]) -> Path:
    """Build one source into a shared library of that file name, and give its path."""
    torch = torch_version()["__version__"]
    key = hashlib.sha256(repr((FLAGS, flags, links, torch, text)).encode()).hexdigest()[:16]
    folder = CACHE / f"{name.removesuffix('.so')}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}.cpp"
    if not source.exists():
        made = folder / f"{name}.{os.getpid()}"
        made.write_text(text)
        made.rename(source)
    return _build_once(folder / name, [source], flags, links)


def _build_once(
    library: Path, sources: Sequence[Path], flags: Sequence[str], links: Sequence[str]
) -> Path:
    folder = library.parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        objects = [folder / f"{file.stem}.o" for file in sources]
        with ThreadPoolExecutor(2) as threads:
            jobs = [
                threads.submit(_run, [*compiler(), *FLAGS, *flags, "-c", source, "-o", result])
                for source, result in zip(sources, objects, strict=True)
            ]
            for job in jobs:
                job.result()
        # A name of its own first: what stands there under the right one is whole.
        made = library.with_suffix(".new")
        _run([*compiler(), "-shared", *objects, "-o", made, *links])
        made.rename(library)
    return library


def torch_flags() -> tuple[str, ...]:
    """Give the compiler's flags for torch's headers."""
    include = torch_folder() / "include"
    folders = include, include / "torch" / "csrc" / "api" / "include"
    return tuple(word for folder in folders for word in ("-isystem", str(folder)))


def torch_links() -> tuple[str, ...]:
    """Give the linker's flags for what all builds of torch have."""
    libraries = torch_folder() / "lib"
    return f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"


def device_library() -> Path:
    """Build the test device against the torch that is installed."""
    return shared_library("device", torch_flags(), (*torch_links(), "-ldl"))


def driver_library() -> Path:
    """Build the fake libcuda and NVRTC: one library with the names of both."""
    return shared_library("driver", links=("-ldl", "-pthread"))
