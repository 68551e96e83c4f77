"""Log messages on captures, by one logger for each rank."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Sequence

import torch

from torch_ort import _C, options
from torch_ort.core.log_level import LogLevel
from torch_ort.core.words import listed
from torch_ort.engine import compiler, recomputable
from torch_ort.engine.program import Program
from torch_ort.engine.replays import replays_of
from torch_ort.functions.capturing import policy_of

# The level of Python's logger for each of ours.
PYTHON_LEVELS = {
    LogLevel.VERBOSE: logging.DEBUG,
    LogLevel.DEVINFO: logging.INFO,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.FATAL: logging.CRITICAL,
}

# The engine's messages on passes, steps and memory are for developers.
ENGINE_LEVELS = {**PYTHON_LEVELS, LogLevel.INFO: logging.WARNING}

_said: set[str] = set()


def rank_and_world() -> tuple[int, int]:
    """Give this process's rank and the number of ranks; 0 of 1 without torch.distributed."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def make_logger(level: LogLevel) -> logging.Logger:
    """Give the logger `orttraining`, or `orttraining.rank-N` where there are several ranks.

    Ranks other than 0 are silent from INFO up; developers' levels speak on all ranks.
    """
    rank, world = rank_and_world()
    logger = logging.getLogger(f"orttraining.rank-{rank}" if world > 1 else "orttraining")
    logger.setLevel(PYTHON_LEVELS[level])
    logger.disabled = rank != 0 and level >= LogLevel.INFO
    engine_logger(logger).setLevel(ENGINE_LEVELS[level])
    _let_speak(logging.getLogger("orttraining"))
    if level <= LogLevel.DEVINFO:
        # The logger "torch_ort.recorder" logs why recordings were handed over.
        of_package = logging.getLogger("torch_ort")
        of_package.setLevel(PYTHON_LEVELS[level])
        _let_speak(of_package)
    return logger


def engine_logger(logger: logging.Logger) -> logging.Logger:
    """Give the logger of what the engine does, beside one that `make_logger` has made."""
    return logger.getChild("engine")


def _let_speak(logger: logging.Logger) -> None:
    if not logger.hasHandlers():
        handler = _StderrHandler()
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(name)s [%(levelname)s] - %(message)s")
        )
        logger.addHandler(handler)


class _StderrHandler(logging.StreamHandler):
    """Writes to standard error as it is at the time, which tests and notebooks replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


def say_once(logger: logging.Logger, text: str) -> None:
    """Warn, unless this process has said so already."""
    if text not in _said:
        _said.add(text)
        logger.warning(text)


def say_ignored(
    logger: logging.Logger, settings: options.ORTModuleOptions, by_torch_compile: bool = False
) -> None:
    """Warn of options that are set and have no effect with torch.compile or with an ORTModule."""
    for variable, why in options.asked_in_vain(settings, by_torch_compile):
        say_once(logger, f"{variable}: {why}")


def say_mode(logger: logging.Logger, mode: str | None) -> None:
    """Warn of a mode of torch.compile that has no effect."""
    if mode is not None and options.MODES[mode]:
        say_once(logger, f"mode {mode!r}: the same as 'default': {options.MODES[mode]}")


def introduce(
    logger: logging.Logger,
    settings: options.ORTModuleOptions,
    chosen: options.Options,
    programs: Sequence[Program],
    entry: str = "ORTModule",
) -> None:
    """Log at INFO that programs run in the engine, with whose kernels, and under which options.

    `entry` is how the user's model comes to the engine, "torch.compile" or "ORTModule". This is
    logged once in a process for each entry and type of device.
    """
    if rank_and_world()[0] != 0 or not logger.isEnabledFor(logging.INFO):
        return
    for device in sorted({program.device_type() for program in programs}):
        introduction = f"introduction of {entry} on {device}"
        if introduction not in _said:
            _said.add(introduction)
            logger.info(
                "%s: forward and backward run as one graph in the engine, on %s with %s (%s)",
                entry, device, _kernels_on(device, chosen), _rules(settings, entry),
            )  # fmt: skip


def _kernels_on(device: str, chosen: options.Options) -> str:
    """Say whose kernels run a graph."""
    kinds = [each for each in _C.passes() if each.own_kernels and each.name not in chosen.disable]
    regions = [each.own_kernels for each in kinds if each.for_regions]
    if "region_kernels" in chosen.disable:
        regions = []
    ours = []
    if device == "cpu":
        ours = [f"{name} ({chosen.isa or _C.isa_names()[-1]})" for name in regions]
        ours += [each.own_kernels for each in kinds if not each.for_regions]
        if "products" not in chosen.disable:
            ours.append("products of matrices")
    elif device == "cuda" and not _C.cuda.missing():  # whose generator writes regions alone
        ours = [f"{name} (CUDA C++)" for name in regions]
    if not ours:
        return "PyTorch's kernels"
    return f"kernels of its own for {listed(ours)}, else PyTorch's"


def _rules(settings: options.ORTModuleOptions, entry: str) -> str:
    policy = settings.fallback_policy
    states = {"ORTMODULE_FALLBACK_POLICY": not policy & type(policy).FALLBACK_DISABLE}
    # Under torch.compile Dynamo decides what becomes of Functions.
    if entry == "ORTModule":
        is_enabled = policy_of(settings).is_enabled
        states = {"ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": is_enabled, **states}
    return ", ".join(f"{name} {'ON' if is_on else 'OFF'}" for name, is_on in states.items())


def says_captured(logger: logging.Logger) -> bool:
    """Tell whether `say_captured` logs what could be recomputed, which needs names of inputs."""
    return rank_and_world()[0] == 0 and logger.isEnabledFor(logging.INFO)


def say_captured(
    logger: logging.Logger,
    programs: Sequence[Program],
    seconds: float,
    chosen: options.Options,
) -> None:
    """Log that a graph was captured, and the time of each stage.

    At INFO this includes the captured graph and what of it could be recomputed in backward; at
    DEVINFO the rewrites of each pass and the number of steps by form, at VERBOSE each step.
    """
    engine = engine_logger(logger)
    say_recomputable(logger, programs, chosen)
    if chosen.cuda_graphs and any(program.device_type() == "cpu" for program in programs):
        say_once(logger, "cuda_graphs: does nothing on the CPU, where no kernels are queued")
    for program in programs:
        spent = ", ".join(f"{name} {1000 * s:.0f} ms" for name, s in program.seconds.items())
        kind = "training" if program.is_training else "inference"
        logger.info("captured a %s graph in %.2fs: %s", kind, seconds, spent)
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "traced graph %d:\n%s", program.number, compiler.onnx_text(program.captured)
            )
        if engine.isEnabledFor(logging.INFO):
            for name, rewrites, milliseconds in program.passes:
                if rewrites:
                    engine.info("pass %s: %d rewrites in %.2f ms", name, rewrites, milliseconds)
            forms = Counter(form for _, _, form, _, _ in program.session.steps())
            counts = ", ".join(f"{count} {form}" for form, count in forms.most_common())
            engine.info("steps of graph %d: %s", program.number, counts)
        if engine.isEnabledFor(logging.DEBUG):
            steps = compiler.steps_text(program.session)
            engine.debug("steps of graph %d:\n%s", program.number, steps)


def say_recomputable(
    logger: logging.Logger, programs: Sequence[Program], chosen: options.Options
) -> None:
    """Log once at INFO what could be recomputed by name; warn if a level finds no layers."""
    training = [program for program in programs if program.is_training]
    layers = [
        program.recomputation.planned.num_layers
        for program in training
        if program.recomputation is not None and program.parameter_gradients
    ]  # a graph without parameters, as of a loss by itself, is not expected to have layers
    if chosen.memory_opt_level and layers and not any(layers):
        say_once(
            logger,
            f"ORTMODULE_MEMORY_OPT_LEVEL={chosen.memory_opt_level}: no layer of a transformer was "
            "recognized (a norm, attention, and a residual sum), so nothing is recomputed; use "
            "memory_budget, or ORTMODULE_MEMORY_OPT_CONFIG with entries of the table that is "
            "logged at level INFO: neither needs layers",
        )
    if not says_captured(logger) or chosen.memory_budget:
        return
    for program in training:
        report = compiler.recomputable(program, chosen)
        text = recomputable.table(program, report, chosen.memory_opt_level)
        if text not in _said:
            _said.add(text)
            logger.info(text)


def say_run(logger: logging.Logger, program: Program) -> None:
    """Log what is known after a run: the memory plan, at VERBOSE with the place of each tensor."""
    engine = engine_logger(logger)
    if not engine.isEnabledFor(logging.INFO):
        return
    plan = program.session.plan_report()
    if plan is not None:
        engine.info(
            "plan of graph %d: %d forward and %d backward steps, %d in place, %.1f KiB saved for "
            "backward, %.1f KiB at the peak",
            program.number, plan["steps_forward"], plan["steps_backward"], plan["in_place"],
            plan["saved_bytes"] / 1024, plan["peak_bytes"] / 1024,
        )  # fmt: skip
        engine.debug("plan of graph %d:\n%s", program.number, compiler.plan_text(program.session))
    if (replays := replays_of(program.session)) is not None:
        engine.info("CUDA graphs of graph %d: %s", program.number, replays)
