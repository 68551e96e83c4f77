# Training of a scripted or traced module in the engine against the module it was made from.
from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import Options, Run, assert_same_runs, build, train

import torch_ort


@pytest.fixture
def compare(device: str) -> Callable[..., tuple[Run, Run]]:
    """Return a function that trains a module in eager PyTorch, and its script in an ORTModule.

    Numbers are compared after every step: outputs, gradients, parameters, buffers and the random
    generator. All calls must run in the engine, in `graphs` graphs.
    """

    def run(
        make_model: Callable[[], torch.nn.Module],
        make_inputs: Callable[[int], Any],
        script: Callable[[torch.nn.Module], torch.nn.Module] = torch.jit.script,
        *,
        graphs: int = 1,
        wrap: Callable[[Any], Any] = torch_ort.ORTModule,
        rtol: float | None = None,
        atol: float | None = None,
        **settings: Any,
    ) -> tuple[Run, Run]:
        options = Options(**settings)
        eager, plain = (build(make_model, device=device, seed=options.seed) for _ in range(2))
        scripted = script(plain)
        want = train(eager, eager, make_inputs, device, options)
        torch_ort.reset_counters()
        got = train(scripted, wrap(scripted), make_inputs, device, options)
        for record in (*want.records, *got.records):  # TorchScript makes a type of its own
            record.pop("structure of the outputs")
        assert_same_runs(want, got, rtol, atol, True)
        counters = torch_ort.counters()
        assert counters["fallbacks"] == 0, counters
        assert counters["graphs_captured"] == graphs, counters
        assert counters["forward_runs"] == len(got.records), counters
        assert counters["backward_runs"] == got.backwards > 0, counters
        return want, got

    return run


@pytest.fixture
def traced() -> Callable[..., Callable[[torch.nn.Module], torch.nn.Module]]:
    """Return a function that gives a maker of traced modules, for `script` of `compare`."""

    def tracer(*example: Any) -> Callable[[torch.nn.Module], torch.nn.Module]:
        def trace(module: torch.nn.Module) -> torch.nn.Module:
            state = copy.deepcopy(module.state_dict())  # tracing trains batch norm
            device = next(module.parameters()).device
            with warnings.catch_warnings():  # sizes that Python asks for are constants of a trace
                warnings.simplefilter("ignore", torch.jit.TracerWarning)
                made = torch.jit.trace(
                    module, tuple(x.to(device) for x in example), check_trace=False
                )
            made.load_state_dict(state)
            return made

        return trace

    return tracer
