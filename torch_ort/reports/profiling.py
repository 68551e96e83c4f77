"""Where a step spends its time: `torch_ort.profile`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch_ort._C import Unsupported, UserError
from torch_ort.dynamo import uncaptured
from torch_ort.engine import watchers
from torch_ort.fallback import FallbackWarning
from torch_ort.reports import runs
from torch_ort.reports.peaks import product_peaks
from torch_ort.reports.profile_reader import time_steps
from torch_ort.reports.profile_result import Profile

WARM_STEPS = 3  # the capture, the checked first runs, and one more


def profile(
    model: Any,
    *inputs: Any,
    options: dict[str, Any] | None = None,
    steps: int = 10,
    path: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Profile:
    """Compile `model` for `inputs`, run it `steps` times, and time every step of the engine.

    Backward runs if an output asks for it. Parameters, buffers, gradients, inputs and random
    generators come out as they went in. With `path` the page is written to `<path>.html` and the
    trace to `<path>.json`.
    Raises what the model raises, UserError on bad arguments, and Unsupported with the reason if
    nothing of the model runs in the engine.
    """
    _check_arguments(model, steps, path)

    def run() -> None:
        runs.run_backward(model, compiled(*inputs, **kwargs), (inputs, kwargs))

    with (
        runs.kept(model, (inputs, kwargs)),
        watchers.watching() as programs,
        _fallback_reasons() as fallbacks,
        uncaptured.watching() as breaks,
    ):
        compiled = runs.compile_afresh(model, options)
        for _ in range(WARM_STEPS):
            run()
        result = time_steps(run, steps, programs, fallbacks)
    result.breaks = uncaptured.of_users(breaks, bool(programs))
    device = runs.device_of(model, (inputs, kwargs))
    dtypes = result.product_dtypes
    if dtypes and device.type == "cpu":
        # On other devices the time of a step is only that of its launch.
        result.hold_against(product_peaks(dtypes, device, runs.isa_of(options)))
    if device.type != "cpu":
        # Nor does a wait there tell when what it waits for has arrived.
        result.collectives = []
    if not any(step.microseconds for step in result.steps):
        raise _nothing_ran([*fallbacks, *map(str, result.breaks)])
    if path is not None:
        result.save_html(f"{os.fspath(path)}.html")
        result.save_trace(f"{os.fspath(path)}.json")
    return result


def _check_arguments(model: Any, steps: Any, path: Any) -> None:
    if not callable(model):
        raise UserError(f"profile: model: got {model!r}, want a module or a function")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UserError(f"profile: steps: got {steps!r}, want an integer of at least 1")
    if path is not None:
        if not isinstance(path, (str, os.PathLike)):
            raise UserError(f"profile: path: got {path!r}, want the start of two file names")
        folder = os.path.dirname(os.fspath(path)) or "."
        if not os.path.isdir(folder):
            raise UserError(f"profile: path: got {path!r}, want a name in a folder that exists")


def _nothing_ran(found: list[str]) -> Exception:
    if found:
        reasons = "; ".join(dict.fromkeys(found))
        return Unsupported(f"profile: nothing of the model runs in the engine: {reasons}")
    return UserError(
        "profile: the model has no step to measure: Dynamo captured nothing of it that computes"
    )


@contextmanager
def _fallback_reasons() -> Iterator[list[str]]:
    """Give a list that the reasons of fallbacks are added to; warnings show as they would."""
    reasons: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, category: type[Warning], *place: Any) -> None:
            if issubclass(category, FallbackWarning):
                reasons.append(str(message))
            show(message, category, *place)

        warnings.filterwarnings("always", category=FallbackWarning)
        warnings.showwarning = note
        yield reasons
