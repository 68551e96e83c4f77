"""Make an environment of a Python for aarch64, which runs here under qemu, with PyTorch in it.

    arm64.py FOLDER [--torch VERSION]

FOLDER becomes a virtual environment, whose bin/python starts qemu. Its Python stands in FOLDER/root
with other packages of Debian or Ubuntu, which apt downloads and does not install; PyTorch and the
tools of a build come from the package index (4 GB: PyTorch's builds for this architecture are those
for CUDA). What is there already is kept. The processor that is emulated is the one that QEMU_CPU
names, by qemu's names, or a Neoverse N1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MULTIARCH = "aarch64-linux-gnu"
# By the program that shows that a package is there.
TOOLS = {
    "qemu-aarch64": "qemu-user",
    f"{MULTIARCH}-g++": f"g++-{MULTIARCH}",
    "protoc": "protobuf-compiler",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
OF_SYSTEM = ("python3", "libpython3-dev", "libprotobuf-dev", "libstdc++6", "libgomp1")
OF_INDEX = (
    "expecttest", "hypothesis", "numpy", "onnx>=1.16", "onnxruntime", "pip", "pytest",
    "pytest-timeout", "pytest-xdist", "rich", "scikit-build-core>=0.10", "setuptools",
    "typing_extensions",
)  # fmt: skip
GLIBCS = range(17, 37)  # of the platform tags that are taken: manylinux_2_17 and so on
# What qemu does not show a process: a Neoverse N1. Libraries of PyTorch's build read these files.
MIDR = "0x00000000413fd0c1"
CPUINFO = """\
processor\t: {number}
BogoMIPS\t: 243.75
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
START = """\
#!/bin/sh
# Python for aarch64 under qemu, made by cmake/arm64.py.
export ARM64_ROOT={folder}/root QEMU_CPU="${{QEMU_CPU:-neoverse-n1}}"
exec qemu-aarch64 -L "$ARM64_ROOT" -0 "$0" "$ARM64_ROOT/usr/bin/{name}" "$@"
"""


def check_tools() -> None:
    """Raise SystemExit with the command that installs what is missing."""
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        raise SystemExit(f"arm64: run first:  apt-get install -y {' '.join(missing)}")


def run(*command: str | Path) -> None:
    """Run a command, whose output goes to the standard errors; raise CalledProcessError."""
    subprocess.run([str(each) for each in command], check=True, stdout=sys.stderr)


def download_packages(folder: Path) -> list[Path]:
    """Have apt bring packages with all that they need, by lists and a cache of its own.

    No package counts as installed, so that what this machine has does not matter.
    """
    state = folder / "apt"
    (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (state / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "0",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "1",
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
    }
    apt = ["apt-get", "-qq", "-y", *(f"-o{name}={value}" for name, value in settings.items())]
    run(*apt, "update")
    run(*apt, "--download-only", "install", *OF_SYSTEM)
    return sorted((state / "archives").glob("*.deb"))


def make_root(folder: Path) -> Path:
    """Unpack the packages of the system, and write what qemu does not show."""
    root = folder / "root"
    if root.exists():
        return root
    unpacked = folder / "root.part"
    shutil.rmtree(unpacked, ignore_errors=True)
    for package in download_packages(folder):
        run("dpkg-deb", "-x", package, unpacked)
    (unpacked / "proc").mkdir(exist_ok=True)
    processors = range(os.cpu_count() or 1)
    cpuinfo = "".join(CPUINFO.format(number=number) for number in processors)
    (unpacked / "proc" / "cpuinfo").write_text(cpuinfo)
    for number in processors:
        registers = unpacked / f"sys/devices/system/cpu/cpu{number}/regs/identification"
        registers.mkdir(parents=True)
        (registers / "midr_el1").write_text(MIDR + "\n")
    unpacked.rename(root)
    return root


def install(target: Path, python: str, requirements: Sequence[str]) -> None:
    """Have this machine's pip bring packages for the other architecture. They do not run."""
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in GLIBCS]
    run(
        sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check",
        "--only-binary=:all:", "--platform=manylinux2014_aarch64", *platforms,
        "--implementation=cp", f"--python-version={python}", f"--target={target}", *requirements,
    )  # fmt: skip


def make_environment(folder: Path, root: Path, torch: str) -> Path:
    """Write what makes the folder an environment, and give its Python."""
    name = (root / "usr/bin/python3").resolve().name
    (folder / "pyvenv.cfg").write_text(f"home = {root}/usr/bin\n")
    python = folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(START.format(folder=folder, name=name))
    python.chmod(0o755)
    packages = folder / "lib" / name / "site-packages"
    if not packages.exists():
        unpacked = folder / "packages.part"
        shutil.rmtree(unpacked, ignore_errors=True)
        install(unpacked, name.removeprefix("python"), [f"torch=={torch}", *OF_INDEX])
        packages.parent.mkdir(parents=True, exist_ok=True)
        unpacked.rename(packages)
    return python


def main() -> None:
    """Read the command line and make the environment."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", default="2.13.0")
    options = parser.parse_args()
    check_tools()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = make_environment(folder, make_root(folder), options.torch)
    run(python, "-c", "import torch; print('torch', torch.__version__)")


if __name__ == "__main__":
    main()
