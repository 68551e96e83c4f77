"""Checks what the extension finds: the processor and the torch of its build, no other torch_ort."""

import importlib.metadata
import platform
import warnings

DISTRIBUTION = "torch-ort-engine"  # as in pyproject.toml


_REBUILD = (
    "rebuild with `pip install --no-build-isolation --force-reinstall --no-deps .` in its source "
    "folder"
)


def check_processor(built: str) -> None:
    """Compare the kind of processor of the build, such as `aarch64`, with this one.

    Must run before the extension is loaded, which Python would not find.

    Raises ImportError with both kinds if they differ.
    """
    found = platform.machine()
    if found != built:
        raise ImportError(
            f"torch_ort was built for {built} processors, but this one is {found}; {_REBUILD} "
            "(there are kernels for x86_64 and aarch64)"
        )


def check_torch(built: str, found: str, built_abi: bool, found_abi: bool) -> None:
    """Compare the torch of the build with the installed one.

    Must run before the extension is loaded: torch's C++ interface changes between minor versions,
    and a mismatch shows as a missing symbol or a crash. What follows the minor version may differ:
    the headers of 2.12.0 and 2.12.1, and those of 2.14.0 and 2.14.1, are equal but for the number,
    and the builds of a release, such as `+cpu` and `+cu130`, have the same interface. `built_abi`
    and `found_abi` say whether they use the C++11 ABI of libstdc++.

    Raises ImportError with both versions if the interfaces or the ABIs differ.
    """
    interface = _interface(built)
    if interface != _interface(found):
        raise ImportError(
            f"torch_ort was built for torch {interface} but torch {found} is installed; {_REBUILD},"
            f" or install torch {interface}"
        )
    if built_abi != found_abi:
        raise ImportError(
            f"torch_ort was built for a torch {'with' if built_abi else 'without'} the C++11 ABI "
            f"of libstdc++, but torch {found} is one {'with' if found_abi else 'without'} it; "
            f"{_REBUILD}"
        )


def _interface(version: str) -> str:
    """Give what builds of the same C++ interface share: `2.13` for `2.13.1+cu130`.

    What comes before a release, `2.14.0a0`, is like nothing but itself.
    """
    release = version.partition("+")[0]
    minor, _, last = release.rpartition(".")
    return minor if last.isdigit() else release


def warn_of_namesakes(version: str) -> None:
    """Warn if another distribution has written into the import package torch_ort.

    The companion of ONNX Runtime Training has: its distribution is called torch-ort. pip notices no
    conflict, as the names of the distributions differ.
    """
    for other in importlib.metadata.distributions(name="torch-ort"):
        # This project had that name itself. Such an install only points at a checkout.
        if any(point.group == "torch_dynamo_backends" for point in other.entry_points):
            continue
        warnings.warn(
            f"torch_ort: torch-ort {other.version} is installed beside {DISTRIBUTION} {version}, "
            "and both contain the package torch_ort, so that one overwrites files of the other; "
            f"run `pip uninstall torch-ort`, then install {DISTRIBUTION} again",
            stacklevel=3,
        )
