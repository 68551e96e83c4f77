#!/bin/sh
# Sees that what pip cannot install is there: compiler, make, protobuf, and Python's own parts.
# Where apt-get is, and may be run, it installs what is missing; else it says what, and fails.
# CMAKE_PREFIX_PATH is trusted to hold a protobuf that is not installed in the system.
set -u
missing=
packages=

need() {  # what for, packages of Debian and Ubuntu
  missing="$missing
  $1"
  packages="$packages $2"
}

command -v c++ >/dev/null && command -v make >/dev/null ||
  need "a C++20 compiler and make (Fedora: gcc-c++ make; Arch: base-devel)" "build-essential"
if [ -z "${CMAKE_PREFIX_PATH:-}" ]; then
  command -v protoc >/dev/null &&
    echo '#include <google/protobuf/message.h>' |
    c++ -std=c++17 -fsyntax-only -x c++ - 2>/dev/null ||
    need "protobuf: its compiler and C++ headers (Fedora: protobuf-compiler protobuf-devel; Arch: protobuf)" \
      "protobuf-compiler libprotobuf-dev"
fi
python3 -c 'import ensurepip, venv' 2>/dev/null ||
  need "Python with its modules venv and ensurepip (Fedora: python3; Arch: python)" "python3-venv"
python3 -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null ||
  need "the headers of Python (Fedora: python3-devel; Arch: python)" "python3-dev"
[ -n "$packages" ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "install these first, with your system's package manager:$missing" >&2
  exit 1
fi
if [ "$(id -u)" = 0 ]; then
  as_root=
elif sudo -n true 2>/dev/null; then
  as_root=sudo
else
  echo "system packages are missing; run:  sudo apt-get install -y$packages" >&2
  exit 1
fi
echo "installing$packages"
# shellcheck disable=SC2086  # words of their own
$as_root apt-get update -qq &&
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $packages
