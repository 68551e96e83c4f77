"""Process-wide counters: how tests and users see that the engine, and not eager, did the work."""

from __future__ import annotations

from collections import Counter

from torch_ort import _C

STAGES = ("capture", "convert", "pass", "plan", "forward", "backward")

_events: Counter[str] = Counter()


def count(name: str, amount: int = 1) -> None:
    """Add to a counter that Python keeps."""
    _events[name] += amount


def counters() -> dict[str, int]:
    """Give all counters as a flat dict.

    `graphs_recorded` counts the captured graphs that the recorder made, `recordings_handed_over`
    those that it left to AOTAutograd (the logger "torch_ort.recorder" says why), and
    `recorder_bugs` those of them that a bug of torch_ort has caused.
    `frames_left_to_eager` counts the functions that Dynamo compiles nothing of for us,
    `graph_breaks` the places where it breaks a graph for what eager PyTorch does in between: the
    engine has run all of a step where these, `captures_refused` and `fallbacks` are 0.
    `captures_refused` is how often torch reached its recompile limit for a function of ours, whose
    other calls then run in eager. `products_tuned` counts the kinds of products whose kernels were
    timed (`enable_tuning`), and `products_loaded` those whose kernel a file has told.
    `optimizer_parameters` counts updates of `torch_ort.optim`, and
    `optimizer_parameters_by_torch` those that its optimizers leave to PyTorch.
    """
    values = {
        "graphs_captured": _events["graphs_captured"],
        "graphs_recorded": _events["graphs_recorded"],
        "recordings_handed_over": _events["recordings_handed_over"],
        "recorder_bugs": _events["recorder_bugs"],
        "fallbacks": sum(_events[f"fallbacks_{stage}"] for stage in STAGES),
        **{f"fallbacks_{stage}": _events[f"fallbacks_{stage}"] for stage in STAGES},
        "frames_left_to_eager": _events["frames_left_to_eager"],
        "graph_breaks": _events["graph_breaks"],
        "captures_refused": _events["captures_refused"],
        "optimizer_parameters": _events["optimizer_parameters"],
        "optimizer_parameters_by_torch": _events["optimizer_parameters_by_torch"],
    }
    return values | _C.counters()


def reset_counters() -> None:
    """Zero what counts events; what tells a state (`contexts_live`, `arena_bytes`) stays."""
    _events.clear()
    _C.reset_counters()


def empty_cache() -> int:
    """Free idle contexts and idle memory of the engine; gives the bytes that went back."""
    return _C.empty_cache()
