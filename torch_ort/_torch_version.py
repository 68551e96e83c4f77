"""Checks that the torch which is installed is the one that the extension was built for."""


def check(built: str, found: str) -> None:
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
