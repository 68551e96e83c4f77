# For a PyTorch that is built with CUDA: libraries with the names of libtorch_cuda and libc10_cuda,
# and of what PyTorch's Python bindings take from them, with nothing behind. They are loaded in
# place of these, so that no kernel, allocator or hook of CUDA is registered, as in a PyTorch
# without CUDA. They are made from the symbols of the installed torch, and so fit every version.
from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

from emulated import build

REPLACED = ("libc10_cuda.so", "libtorch_cuda.so")
BROUGHT = ("libtorch_nvshmem.so",)  # by libtorch_cuda
USER = "libtorch_python.so"

HEAD = """\
#include <stdexcept>
#include <string>
[[noreturn]] static void refuse(const char* name) {
  throw std::runtime_error(std::string("the test device has nothing of CUDA's ") + name);
}
"""
FUNCTION = """\
extern "C" __attribute__((visibility("default"))) void f{number}() __asm__("{name}");
void f{number}() {{ refuse("{name}"); }}
"""
# Gives a place that the bindings write into while they are loaded.
PLACES = {"_ZN4c10d15get_gil_checkerEv"}
PLACE = """\
extern "C" __attribute__((visibility("default"))) void* f{number}() __asm__("{name}");
void* f{number}() {{ static long place[8]; return place; }}
"""
# The bindings make one of these options as a default; those that they derive from will do.
OPTIONS = re.compile(r".*16ProcessGroupNCCL7OptionsC[12]E.*")
OF_OPTIONS = "#include <torch/csrc/distributed/c10d/Backend.hpp>\n"
OPTION = """\
extern "C" __attribute__((visibility("default"))) void f{number}(void*) __asm__("{name}");
void f{number}(void* self) {{ new (self) c10d::Backend::Options("nccl"); }}
"""
# pybind11 compares types by their names, wherever they stand.
TYPE = """\
__asm__(".pushsection .data\\n.globl {name}\\n.balign 8\\n{name}:\\n"
        ".quad _ZTVN10__cxxabiv117__class_type_infoE+16, 1f, 0\\n"
        "1: .asciz \\"{text}\\"\\n.popsection");
"""
DATA = """\
__asm__(".pushsection .bss\\n.globl {name}\\n.balign 16\\n{name}: .skip {size}\\n.popsection");
"""


Symbols = dict[str, tuple[str, int]]  # the letter of nm, and the size


def _symbols(library: Path, which: str) -> Symbols:
    """Give the kind and the size of the dynamic symbols of a library, by name."""
    command = ["nm", "-D", "-P", which, library]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {}
    for line in lines:
        name, kind, *numbers = line.split()
        found[name.partition("@")[0]] = kind, int(numbers[1], 16) if len(numbers) > 1 else 0
    return found


def source(wanted: set[str], defined: Symbols) -> str:
    """Write a library that defines what is wanted of what other ones define."""
    rows = enumerate(sorted(wanted & defined.keys()))
    parts = [
        _pattern(name, *defined[name]).format(
            number=number, name=name, text=name.removeprefix("_ZTI"), size=max(defined[name][1], 8)
        )
        for number, name in rows
    ]
    needs_options = any(OPTIONS.fullmatch(name) for name in wanted & defined.keys())
    return "".join([OF_OPTIONS if needs_options else "", HEAD if parts else "", *parts])


def _pattern(name: str, kind: str, size: int) -> str:
    if kind not in "TW":
        return TYPE if name.startswith("_ZTI") else DATA
    if OPTIONS.fullmatch(name):
        return OPTION
    return PLACE if name in PLACES else FUNCTION


def libraries() -> list[Path]:
    """Build the libraries for the installed torch; an empty list if it is built without CUDA."""
    folder = build.torch_folder() / "lib"
    if not all((folder / name).exists() for name in REPLACED):
        return []
    wanted = set(_symbols(folder / USER, "--undefined-only"))
    defined: Symbols = {}
    for library in [folder / name for name in (*REPLACED, *BROUGHT)]:
        defined |= _symbols(library, "--defined-only") if library.exists() else {}
    texts = dict.fromkeys(REPLACED, "") | {REPLACED[-1]: source(wanted, defined)}
    flags, links = build.torch_flags(), build.torch_links()
    return [
        build.library_of_text(name, text, flags, (*links, f"-Wl,-soname,{name}"))
        for name, text in texts.items()
    ]


def load() -> None:
    """Load them, before torch is imported: the loader takes the first library of a name."""
    for path in libraries():
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
