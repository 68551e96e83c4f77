# Toolchain file for aarch64 Linux, by the cross compiler of Debian and Ubuntu. ARM64_ROOT in the
# environment names the folder of that architecture's packages, which cmake/arm64.py fills.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)

set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

# Programs are those of this machine. Libraries and headers are the folder's, or stand where a search
# names their place, as torch's do.
set(CMAKE_FIND_ROOT_PATH "$ENV{ARM64_ROOT}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# pyconfig.h of Debian's Python names a file relative to this folder.
set(CMAKE_CXX_STANDARD_INCLUDE_DIRECTORIES "$ENV{ARM64_ROOT}/usr/include")
