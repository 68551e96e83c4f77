"""cmake/system_packages.sh where something is missing and there is no apt-get."""

import os
import shutil
import subprocess
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "cmake" / "system_packages.sh"


def test_without_apt_get_it_says_what_is_needed(tmp_path):
    for name in ("sh", "make"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "python3").chmod(0o755)
    result = subprocess.run(
        [tmp_path / "sh", PROGRAM],
        env=os.environ | {"PATH": str(tmp_path), "CMAKE_PREFIX_PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    first, compiler, protobuf = result.stderr.splitlines()
    assert first == "install these first, with your system's package manager:"
    assert compiler.startswith("  a C++20 compiler and make (Fedora: gcc-c++ make; Arch: ")
    assert protobuf.startswith("  protobuf: its compiler and C++ headers (Fedora: ")
