"""Compiles a captured graph into a session: passes, plan, dumps. Equal graphs share one session."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from torch_ort import _C
from torch_ort.engine import budget, cuda, onnx_files, out_forms, tuning
from torch_ort.engine.passes import asked_of_passes, disabled_passes
from torch_ort.engine.program import Program
from torch_ort.fallback import asked_for, stage
from torch_ort.options import session_options
from torch_ort.pytorch.autograd_compat import version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch_ort.options import Options


# Each session with the constants that its key names by id: while they live, no other tensor gets
# the same id.
_sessions: dict[str, tuple[_C.Session, list[torch.Tensor]]] = {}
_numbers = itertools.count()


def compile_program(
    program: Program,
    options: Options,
    sources: dict[str, onnx_files.Source],
    files: Any = None,
    rewrite: Callable[[_C.Graph], _C.Graph] | None = None,
) -> _C.Session:
    """Compile a captured graph, or give the session of an equal one.

    `sources` tell the files of `save_onnx` what the inputs are. Of an ORTModule, `files` writes
    others, and `rewrite` is what the user does to the captured graph.
    Raises Unsupported or InternalError with the stage it comes from (`pass`, `plan`), and UserError
    for settings of the environment that cannot be.
    """
    with asked_for():
        cuda.configure()
    program.number = next(_numbers)
    program.input_names = {name: source.name for name, source in sources.items()}
    program.captured = program.graph.clone()
    if rewrite is not None:
        with stage("pass"), asked_for():
            program.graph = rewrite(program.graph)
        program.graph.size_hints = program.captured.size_hints  # files do not contain them
    prepared = program.graph.clone() if files is not None else None
    cuda.look_at_device(program)
    out_forms.tell_of_unproved(program.device_type())
    key = _key(program, options)
    start = time.perf_counter()
    with stage("pass"):
        _run_passes(program, options)
    program.seconds["passes"] = time.perf_counter() - start
    with asked_for():
        if options.save_onnx:
            onnx_files.write(program, options, sources)
        if files is not None:
            files.write_compiled(program, prepared, options, sources)
        _write_dumps(program, options)
        if options.tuning_results_path and "products" not in options.disable:
            tuning.read(options.tuning_results_path)
    if key in _sessions:
        _C.count_sharing()
    else:
        start = time.perf_counter()
        with stage("plan"):
            session = compile_session(program, options)
        _sessions[key] = session, list(program.constants.values())
        program.seconds["plan"] = time.perf_counter() - start
    program.session, _ = _sessions[key]
    if "steps" in options.dump:
        with asked_for():
            _write_text(options, f"{program.number:02}_steps.txt", steps_text(program.session))
    return program.session


def _run_passes(program: Program, options: Options) -> None:
    allowed = budget.of_options(options) if program.is_training else None
    selection = budget.selection_of_options(options) if program.is_training else None
    if allowed is None and selection is None:
        _run_pipeline(program, options)
        return
    level = None if selection is None else options.memory_opt_level
    # If a budget cannot be kept, this is an error under every policy.
    with asked_for():
        if selection is not None:
            planned = _C.BudgetReport()
            _run_pipeline(program, options, selection=selection, budget_report=planned)
        else:
            planned = _keep_budget(program, options, allowed)
    program.recomputation = budget.Recomputation(planned, level)


def _run_pipeline(
    program: Program, options: Options, without: tuple[str, ...] = (), **asked: Any
) -> None:
    """Run the passes on a program's graph, except those in `without`, and note their rewrites."""
    left_out = _C.LeftOut() if options.lazy_logits and program.can_be_lazy else None
    program.passes = _C.run_pipeline(
        program.graph, [*disabled_passes(options), *without], options.bisect, options.check,
        lazy_logits=left_out, **asked_of_passes(options), **asked,
    )  # fmt: skip
    program.lazy_logits = [] if left_out is None else left_out.logits


def _keep_budget(program: Program, options: Options, allowed: _C.Budget) -> _C.BudgetReport:
    """Run the passes under a budget.

    Which rows may be left out is known only after all that is recomputed has been chosen: where the
    lists of them do not fit any more, all is chosen anew beside them, and without them if there
    are more lists then.
    """
    captured = program.graph

    def plan(*without: str) -> _C.BudgetReport:
        planned = _C.BudgetReport()
        program.graph = captured.clone()
        _run_pipeline(program, options, without, budget=allowed, budget_report=planned)
        return planned

    planned = plan()
    if planned.peak_bytes <= planned.allowed_bytes:
        return planned
    allowed.list_bytes = planned.list_bytes
    try:
        planned = plan()
        if planned.peak_bytes <= planned.allowed_bytes:
            return planned
    # The budget is too small for the lists, but may suffice without them.
    except _C.UserError:
        pass
    allowed.list_bytes = 0
    return plan(*(each.name for each in _C.passes() if each.adds_to_budget))


def recomputable(program: Program, options: Options) -> _C.BudgetReport:
    """List what of a captured training graph could be recomputed by name, and what is."""
    listed = _C.BudgetReport()
    _C.run_pipeline(
        program.captured.clone(), disabled_passes(options), options.bisect,
        selection=budget.selection_of_options(options, lists_all=True), budget_report=listed,
        **asked_of_passes(options),
    )  # fmt: skip
    return listed


def compile_session(program: Program, options: Options) -> _C.Session:
    """Compile the graph of a program as it is: no passes run."""
    asked = session_options(
        options,
        parameter_gradients=program.parameter_gradients,
        gradient_inputs=program.gradient_inputs,
        disabled_passes=disabled_passes(options),
        region_writer=_region_writer(program, options),
    )
    return _C.Session.compile(program.graph, program.constants, asked)


def _region_writer(program: Program, options: Options) -> Any:
    """Give what writes the regions of a program in place of the engine; None if nothing does."""
    if not options.use_triton:
        return None
    from torch_ort.triton import writer

    with asked_for():
        return writer.of_options(
            program.device_type(), options.triton_config_file, options.triton_debug
        )


def release_sessions() -> None:
    """Forget all sessions; those that a compiled function still holds live on with it."""
    _sessions.clear()


def _key(program: Program, options: Options) -> str:
    """Give a key that is equal for equal graphs with the same constants and equal options."""
    digest = hashlib.sha256(program.graph.to_onnx(_C.required_opset(program.graph)))
    settings = (
        options, torch.are_deterministic_algorithms_enabled(), program.parameter_gradients,
        program.can_be_lazy,
        # CUDA graphs are for tensors that do not move, such as the parameters of one module.
        program.number if options.cuda_graphs else None,
    )  # fmt: skip
    digest.update(repr(settings).encode())
    for name, tensor in program.constants.items():
        digest.update(f"{name}:{id(tensor)}:{version(tensor)}".encode())
    return digest.hexdigest()


def _write_dumps(program: Program, options: Options) -> None:
    if options.dump:
        os.makedirs(options.dump_dir, exist_ok=True)
    if "ir" in options.dump:
        _write_text(options, f"{program.number:02}_captured.onnxtxt", onnx_text(program.captured))
    if "passes" in options.dump:
        _write_text(options, f"{program.number:02}_optimized.onnxtxt", onnx_text(program.graph))


def onnx_text(graph: _C.Graph) -> str:
    """Give a graph in ONNX's textual syntax."""
    import onnx

    return onnx.printer.to_text(onnx.load_from_string(graph.to_onnx(_C.required_opset(graph))))


def steps_text(session: _C.Session) -> str:
    """One line per kernel call, in the order of the graph."""
    lines = [
        f"{'backward' if backward else 'forward ':8} {form:10} {op:44} {name:32} {origin}".rstrip()
        for name, op, form, backward, origin in session.steps()
    ]
    return "\n".join(lines) + "\n"


def write_choices(programs: Iterable[Program], options: Options) -> None:
    """Write which kernels have been chosen by measuring, if the options say so and where."""
    if options.enable_tuning and options.tuning_results_path:
        for is_training in {program.is_training for program in programs}:
            tuning.write(options.tuning_results_path, is_training)


def write_plan(program: Program, options: Options) -> None:
    """Write where each tensor of the plan used last lies, as the dump `plan`."""
    _write_text(options, f"{program.number:02}_plan.txt", plan_text(program.session))


def plan_text(session: _C.Session) -> str:
    """One line per tensor, in the order of their first steps; steps are counted as they run."""
    line = "{:40} {:9} {:7} {:>12} {:>12} {:>5} {:>5}  {}".format
    lines = [line("name", "kind", "area", "offset", "bytes", "first", "last", "memory of")]
    used = [row for row in session.plan_table() if row["first_step"] is not None]
    for row in sorted(used, key=lambda row: (row["first_step"], row["last_step"])):
        has_place = row["area"] != "none"
        place = (row["area"], row["offset"]) if has_place else ("-", "-")
        memory = f"in place of {row['in_place_of']}" if row["in_place_of"] else row["shares"] or ""
        steps = (row["first_step"], row["last_step"])
        lines.append(line(row["name"], row["kind"], *place, row["bytes"], *steps, memory).rstrip())
    return "\n".join(lines) + "\n"


def _write_text(options: Options, name: str, text: Any) -> None:
    with open(os.path.join(options.dump_dir, name), "w", encoding="utf-8") as file:
        file.write(text)
