"""Functions of ours that Dynamo compiles no more: counted, and told once."""

from __future__ import annotations

from torch_ort._C import Unsupported
from torch_ort.core import counting
from torch_ort.core.user_code import calling_line, warn_at
from torch_ort.fallback import FallbackWarning
from torch_ort.pytorch import dynamo_compat

_frames: dict[int, tuple[dynamo_compat.Frame, bool]] = {}


def remember_frame(strict: bool) -> None:
    """Remember that what Dynamo compiles right now is ours, and whether it may run in eager."""
    frame = dynamo_compat.frame_in_capture()
    if frame is not None:
        _frames[frame.id] = frame, strict


def forget_frames() -> None:
    """Forget all frames; called when compiled code is reset."""
    _frames.clear()


def recompile_limit_reached(frame_id: int, limit: str) -> None:
    """Count, and say, that torch compiles a function of ours no more.

    Raises Unsupported where nothing may run in eager. Under `fullgraph=True` torch raises.
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
        "(TORCH_LOGS=recompiles says what differs, TORCH_ORT_STRICT=1 raises instead)",
        FallbackWarning,
    )
