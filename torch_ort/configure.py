"""What `python -m torch_ort.configure` says: there is nothing to configure."""

from __future__ import annotations

TEXT = (
    "torch_ort: nothing has to be configured, nothing has to be built: "
    "the engine comes ready with the package"
)

if __name__ == "__main__":
    print(TEXT)
