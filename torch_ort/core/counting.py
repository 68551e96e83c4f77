"""Process-wide counters, which show whether the engine or eager PyTorch did the work."""

from __future__ import annotations

from collections import Counter

from torch_ort import _C

STAGES = ("capture", "convert", "pass", "plan", "forward", "backward")

_events: Counter[str] = Counter()


def count(name: str, amount: int = 1) -> None:
    """Add to a counter that Python keeps."""
    _events[name] += amount


def counters() -> dict[str, int]:
    """Return all counters of this process, by name; `docs/counters.md` explains each.

    The engine has run all of forward and backward if these five are 0: `fallbacks` (graphs or calls
    that the engine could not run), `frames_left_to_eager` (functions of which Dynamo compiles
    nothing), `graph_breaks` (places where Dynamo breaks a graph), `captures_refused` (functions
    that reached torch's recompile limit; their other calls run in eager PyTorch) and
    `calls_left_to_eager` (calls of compiled functions and of ORTModules in which nothing ran in the
    engine, whatever the reason).

    Of the others, `graphs_recorded` counts the captured graphs that the recorder made,
    `recordings_handed_over` those that it handed over to AOTAutograd (the logger
    "torch_ort.recorder" says why), and `recorder_bugs` those of them that are due to a bug of
    torch_ort. `products_tuned` counts the kinds of matrix product whose kernels were timed (option
    `enable_tuning`), and `products_loaded` those whose kernel was read from a file;
    `attentions_tuned` and `attentions_loaded` are the same for attention on CUDA.
    `optimizer_parameters` counts parameter updates by `torch_ort.optim`, and
    `optimizer_parameters_by_torch` those that its optimizers left to PyTorch's functions.
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
        "calls_left_to_eager": _events["calls_left_to_eager"],
        "attentions_tuned": _events["attentions_tuned"],
        "attentions_loaded": _events["attentions_loaded"],
        "optimizer_parameters": _events["optimizer_parameters"],
        "optimizer_parameters_by_torch": _events["optimizer_parameters_by_torch"],
    }
    return values | _C.counters()


def reset_counters() -> None:
    """Set the counters of events to 0; those of a state (`contexts_live`, `arena_bytes`) stay."""
    _events.clear()
    _C.reset_counters()


def empty_cache() -> int:
    """Free the engine's idle contexts and idle memory; returns the number of bytes freed."""
    return _C.empty_cache()
