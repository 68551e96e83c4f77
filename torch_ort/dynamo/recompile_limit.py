"""Functions that have reached Dynamo's recompile limit: counted, and warned of once."""

from __future__ import annotations

from torch_ort._C import Unsupported
from torch_ort.core import counting
from torch_ort.core.user_code import calling_line, warn_at
from torch_ort.fallback import FallbackWarning
from torch_ort.pytorch import dynamo_compat

_frames: dict[int, tuple[dynamo_compat.Frame, bool]] = {}


def remember_frame(strict: bool) -> None:
    """Remember that Dynamo compiles the current frame for our backend, and whether it is strict.

    In strict mode no call of it may run in eager PyTorch.
    """
    frame = dynamo_compat.frame_in_capture()
    if frame is not None:
        _frames[frame.id] = frame, strict


def forget_frames() -> None:
    """Forget all frames; called when compiled code is reset."""
    _frames.clear()


def recompile_limit_reached(frame_id: int, limit: str) -> None:
    """Count, and warn, that Dynamo compiles a function of our backend no more.

    Raises Unsupported in strict mode. Under `fullgraph=True` torch itself raises an error.
    """
    if frame_id not in _frames:
        return
    frame, strict = _frames[frame_id]
    counting.count("captures_refused")
    if frame.raises_at_limit:
        return
    message = f"capture: {frame.where}: compiled too often: got {limit}"
    if strict:
        raise Unsupported(message)
    warn_at(
        calling_line(),
        f"torch_ort: {message}; calls that need a new graph run in eager PyTorch "
        "(TORCH_LOGS=recompiles prints what differs between the calls; set TORCH_ORT_STRICT=1 to "
        "get an error instead)",
        FallbackWarning,
    )
