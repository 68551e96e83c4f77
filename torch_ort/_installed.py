"""Checks what is installed beside the extension: the torch of its build, and no other torch_ort."""

import importlib.metadata
import warnings

DISTRIBUTION = "torch-ort-engine"  # as in pyproject.toml


_REBUILD = (
    "rebuild with `pip install --no-build-isolation --force-reinstall --no-deps .` in its source "
    "folder"
)


def check_torch(built: str, found: str, built_abi: bool, found_abi: bool) -> None:
    """Compare the torch of the build with the installed one.

    Must run before the extension is loaded: torch's C++ interface changes between releases, and a
    mismatch shows as a missing symbol or a crash. What follows the release number, such as `+cpu`
    and `+cu130`, may differ: these builds of a release have the same interface. `built_abi` and
    `found_abi` say whether they use the C++11 ABI of libstdc++.

    Raises ImportError with both versions if the releases or the ABIs differ.
    """
    release = _release(built)
    if release != _release(found):
        raise ImportError(
            f"torch_ort was built for torch {release} but torch {found} is installed; {_REBUILD}, "
            f"or install torch {release}"
        )
    if built_abi != found_abi:
        raise ImportError(
            f"torch_ort was built for a torch {'with' if built_abi else 'without'} the C++11 ABI "
            f"of libstdc++, but torch {found} is one {'with' if found_abi else 'without'} it; "
            f"{_REBUILD}"
        )


def _release(version: str) -> str:
    """Give a version without its local part: `2.13.0` for `2.13.0+cu130`."""
    return version.partition("+")[0]


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
