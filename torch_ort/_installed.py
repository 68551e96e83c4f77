"""Checks what is installed beside the extension: the torch of its build, and no other torch_ort."""

import importlib.metadata
import warnings

DISTRIBUTION = "torch-ort-engine"  # as in pyproject.toml


def check_torch(built: str, found: str) -> None:
    """Compare the torch version of the build with the installed one.

    Must run before the extension is loaded: torch's C++ interface changes between versions, and
    a mismatch shows as a missing symbol or a crash.

    Raises ImportError with both versions if they differ.
    """
    if built != found:
        raise ImportError(
            f"torch_ort was built for torch {built} but torch {found} is installed; rebuild with "
            "`pip install --no-build-isolation --force-reinstall --no-deps .` in its source "
            f"folder, or install torch {built}"
        )


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
