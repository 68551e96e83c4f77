"""Runs the calls of an ORTModule: by a captured graph that fits, a new one, or plain PyTorch."""

from __future__ import annotations

import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_ort import _C, fallback, options
from torch_ort.capture import logs
from torch_ort.capture.captured_module import ModuleCapture
from torch_ort.capture.module import HOOKS_RUN, capture_module
from torch_ort.capture.module_function import describe_call
from torch_ort.capture.module_state import ModuleState, replacing_tensors
from torch_ort.capture.recorded import hand_over
from torch_ort.core import counting, refusals
from torch_ort.core.policy import (
    FallbackPolicy,
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from torch_ort.core.user_code import calling_line, warn_at
from torch_ort.engine import agreement, watchers
from torch_ort.functions.capturing import policy_of
from torch_ort.guards.hooks import gathered_part, hook_with_effects
from torch_ort.guards.number_places import AssignedNumbers, NumberPlace
from torch_ort.guards.structure import Structure, UnknownType
from torch_ort.options import Options, ORTModuleOptions
from torch_ort.ortmodule.debug_options import DebugOptions
from torch_ort.ortmodule.graph_optimizers import rewrite_for
from torch_ort.ortmodule.saved_files import SavedFiles
from torch_ort.pytorch import ranks, versions
from torch_ort.pytorch.generators import TorchGenerators
from torch_ort.pytorch.module_compat import pytree
from torch_ort.pytorch.trace_compat import (
    has_tangents,
    in_forward_mode,
    in_function_transform,
    is_jit_tracing,
)
from torch_ort.steps.state import GraphState

DATA_PARALLEL = (
    "ORTModule is not compatible with torch.nn.DataParallel; "
    "please use torch.nn.parallel.DistributedDataParallel instead"
)

Watcher = Callable[[Any], None]  # called with the result of a call

# The most captures of one module: more than a program needs, but few enough to be noticed.
MAX_CAPTURES = 32
MAX_FIRST_CALLS = 3  # a flag may be set again by other calls, as those that evaluate
# `is_capturing`: a module inside of another's capture is traced as a part of it.
_thread = threading.local()


@dataclass
class _Captured:
    """One captured graph of the module."""

    capture: ModuleCapture
    state: GraphState
    floats: dict[str, float]  # floats that are constants of the graph, by the argument's name
    # Whether it has run with a size or an integer of 0, and without; some kernels treat tensors
    # without elements specially.
    has_run: set[bool] = field(default_factory=set)


class Calls:
    """Runs calls of a module in the engine; on failure in PyTorch, if the policy allows it."""

    def __init__(
        self, module: torch.nn.Module, options: Options, settings: ORTModuleOptions,
        logger: logging.Logger, run: Callable[..., Any], files: SavedFiles | None = None,
        pending: ORTModuleFallbackException | None = None,
    ) -> None:  # fmt: skip
        self._module = module
        self._run_plain = run  # the module itself, or what its forward was
        self.settings = settings
        self._files = files
        may_fall_back = settings.fallback_policy.allows(ORTModuleONNXModelException)
        # Whether guards of the engine may run a failed call in eager PyTorch.
        self._options = replace(options, strict=options.strict or not may_fall_back)
        self._strict = options.strict
        self.logger = logger
        self._captured: list[_Captured] = []
        # Where numbers change from call to call, and where they can only be constants: arguments,
        # by name, and attributes.
        self._open: dict[Any, str | NumberPlace] = {}
        self._constant: set[Any] = set()
        self._in_pytorch = False
        # Calls that fit none of MAX_CAPTURES graphs: how many have run in PyTorch since the last
        # capture, how many do before the next one, and the reason that was given.
        self._num_waited = 0
        self._num_first_calls = 0
        self._num_to_wait = MAX_CAPTURES
        self._said_too_many: str | None = None
        self._said: set[str] = set()  # logged reasons for which some calls run in PyTorch
        # Each brings sub-modules into the engine, if there are any, and returns a watcher of the
        # results that the module gives in PyTorch. The first is called instead of a warning that
        # the module runs in PyTorch, the second together with the warning.
        self.instead_of_pytorch: Callable[[], Watcher | None] | None = None
        self.take_apart: Callable[[], Watcher | None] | None = None
        # Tells whether the sub-modules that the first of them has brought all run in PyTorch.
        self.stay_out: Callable[[], bool] | None = None
        self._why_apart: ORTModuleFallbackException | None = None
        # Brings the parts between which parameters are gathered into the engine.
        self.take_between_gathers: Callable[[], None] | None = None
        self._watch_result: Watcher | None = None
        self.subject = "the module"  # in messages
        self.is_inside = False  # only forward runs here: hooks of the module run around it
        self._is_never_captured = pending is not None
        if pending is not None:
            self._fall_back(pending, "capture")

    @property
    def options(self) -> Options:
        """Those of the graphs."""
        return self._options

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        """Run one call.

        Raises what the module raises, and an ORTModuleFallbackException where the engine fails and
        the policy does not allow PyTorch.
        """
        if self._is_never_captured or is_traced():
            return self._run_plain(*args, **kwargs)
        if self._in_pytorch:
            result = self._run_plain(*args, **kwargs)
            self._watch(result)
            return result
        if in_forward_mode() and self._has_tangents(args, kwargs):
            why, which = fallback.FORWARD_MODE, "calls with tangents run"
            return self._run_this_in_pytorch(why, "forward", which, args, kwargs)
        try:
            captured, flat = self._find(args, kwargs)
        except Exception as error:
            return self._run_in_pytorch(fallback.failure_of(error, "capture"), args, kwargs)
        if captured is None:
            in_parts = self.instead_of_pytorch is not None or gathered_part(self._module)
            hook = None if in_parts else hook_with_effects(self._module)
            if hook is not None and not hook.is_of_shards:  # the hook may be removed later
                why = f"{hook.words}, {HOOKS_RUN}"
                return self._run_this_in_pytorch(why, "capture", "calls with it run", args, kwargs)
            if len(self._captured) >= MAX_CAPTURES and self._is_to_wait():
                why = self._why_too_many(args, kwargs)
                return self._run_this_in_pytorch(
                    why, "capture", "calls that fit none of them run", args, kwargs
                )
            found = fallback.within_boundary(
                lambda: self._find_or_capture(args, kwargs), lambda failure: failure, "capture"
            )
            if isinstance(found, fallback.Failure):
                if self._is_first_call(found.error):
                    return self._run_plain(*args, **kwargs)
                return self._run_in_pytorch(replace(found, stage="capture"), args, kwargs)
            captured, flat = found
        return self._run(captured, flat, args, kwargs)

    def _is_first_call(self, error: Exception) -> bool:
        """Tell whether a call sets up what later ones rely on: these are captured."""
        if not isinstance(error, refusals.FirstCallDiffers):
            return False
        self._num_first_calls += 1
        return self._num_first_calls <= MAX_FIRST_CALLS

    def _is_to_wait(self) -> bool:
        """Tell whether a call that fits no graph runs in PyTorch because there are many graphs.

        After that a graph is captured again, in place of the one that was not used for longest;
        each time twice as many calls run in PyTorch before.
        """
        if self._num_waited < self._num_to_wait:
            self._num_waited += 1
            return True
        self._num_waited = 0
        self._num_to_wait *= 2
        return False

    def _why_too_many(self, args: tuple, kwargs: dict) -> str:
        if self._said_too_many is None:
            why = self._captured[0].capture.mismatch(args, kwargs)
            self._said_too_many = (
                f"captured {MAX_CAPTURES} times, and this call fits none of the graphs (it "
                f"differs from the latest one in: {why}); keep that constant from call to call"
            )
        return self._said_too_many

    def _find_or_capture(self, args: tuple, kwargs: dict) -> tuple[_Captured, list[Any]]:
        with replacing_tensors:
            captured, flat = self._find(args, kwargs)
            return self._capture(args, kwargs) if captured is None else (captured, flat)

    def _find(self, args: tuple, kwargs: dict) -> tuple[_Captured | None, list[Any]]:
        """Give the graph that fits a call, and its arguments; the last one used is tried first."""
        for i, captured in enumerate(self._captured):
            flat = captured.capture.match(args, kwargs)
            if flat is not None:
                if i:
                    self._captured = [captured, *(c for c in self._captured if c is not captured)]
                return captured, flat
        return None, []

    def log(self, text: str) -> None:
        """Warn of something, once in a process."""
        logs.say_once(self.logger, text)

    def recapture(self) -> None:
        """Forget all captured graphs, and that the module runs in PyTorch."""
        self._captured.clear()
        self._in_pytorch = False
        self._num_waited, self._num_to_wait, self._said_too_many = 0, MAX_CAPTURES, None
        self._watch_result = None

    # ---- running

    def _run(self, captured: _Captured, flat: list[Any], args: tuple, kwargs: dict) -> Any:
        capture = captured.capture
        if captured.state.failed:  # its backward has failed, of which a warning has been given
            return self._after_failed_backward(captured, args, kwargs)
        has_zero = 0 in capture.integers_of(flat)
        if has_zero in captured.has_run:
            try:
                return capture.call(flat, args, kwargs)
            except Exception as error:
                failure = fallback.failure_of_later_run(error, captured.state.is_repeatable)
            return self._run_in_pytorch(failure, args, kwargs)
        return self._run_first(captured, flat, has_zero, args, kwargs)

    def _run_first(
        self, captured: _Captured, flat: list[Any], has_zero: bool, args: tuple, kwargs: dict
    ) -> Any:
        """Run a graph that may fail; if it does, its writes and random draws are undone."""
        result = fallback.within_boundary(
            lambda: captured.capture.call(flat, args, kwargs),
            lambda failure: failure,
            "forward",
            captured.state,
        )
        if isinstance(result, fallback.Failure):
            return self._run_otherwise(captured, result, has_zero, args, kwargs)
        captured.has_run.add(has_zero)
        captured.state.note_first_run()
        return result

    def _run_otherwise(
        self, captured: _Captured, failure: fallback.Failure, has_zero: bool, args: tuple,
        kwargs: dict,
    ) -> Any:  # fmt: skip
        """Run a call after the first run of its graph has failed."""
        capture, error = captured.capture, failure.error
        if captured.state.communicates:  # other ranks take part in this run alone
            raise error
        if has_zero and captured.has_run and isinstance(error, RuntimeError | IndexError):
            # Calls without elements get a graph of their own.
            capture.refuse_empty()
            return self(args, kwargs)
        self._captured.remove(captured)
        if capture.is_recorded and fallback.may_come_from_a_rule(error):
            hand_over(error)
            self._options = replace(self._options, disable=(*self._options.disable, "recorder"))
            return self(args, kwargs)
        if not isinstance(error, _C.Error) and not self._may_fall_back(_onnx_error(error)):
            raise error  # an error of a kernel, which PyTorch would raise as well
        return self._run_in_pytorch(failure, args, kwargs)

    def _after_failed_backward(self, captured: _Captured, args: tuple, kwargs: dict) -> Any:
        if captured.state.is_differentiated_twice:  # only calls of this kind are affected
            return self._run_plain(*args, **kwargs)
        self._captured.remove(captured)
        if self.settings.fallback_retry:
            return self(args, kwargs)
        self._in_pytorch = True
        return self._run_plain(*args, **kwargs)

    def _has_tangents(self, args: tuple, kwargs: dict) -> bool:
        given = pytree.tree_leaves((args, kwargs))
        return has_tangents([*given, *ModuleState(self._module).tensors])

    # ---- falling back

    def _run_this_in_pytorch(
        self, why: str, stage: str, which: str, args: tuple, kwargs: dict
    ) -> Any:  # fmt: skip
        """Run a call in PyTorch that no graph can serve; others go on running in the engine."""
        error = ORTModuleONNXModelException(why)
        if not self._may_fall_back(error):
            raise error
        result = self._run_plain(*args, **kwargs)
        if why not in self._said:
            self._said.add(why)
            self._say_fallback(error, stage, which)
        return result

    def _run_in_pytorch(self, failure: fallback.Failure, args: tuple, kwargs: dict) -> Any:
        is_gathered = isinstance(failure.error, refusals.GatheredInside)
        if is_gathered and self.take_between_gathers is not None:
            self._in_pytorch = True  # except for the parts, from this call on
            self.take_between_gathers()
            return self._run_plain(*args, **kwargs)
        error = _onnx_error(failure.error)
        if failure.stage == "capture" and self.instead_of_pytorch is not None:
            result = self._run_plain(*args, **kwargs)
            self.logger.info("taken apart, because %s", error)
            self._in_pytorch = True
            self._why_apart = error
            self._watch_result = self.instead_of_pytorch()
            self._watch(result)
            return result
        if not self._may_fall_back(error):
            raise error
        result = self._run_plain(*args, **kwargs)  # an error of the user's program is raised here
        self._fall_back(error, failure.stage)
        self._watch(result)
        return result

    @property
    def is_in_pytorch(self) -> bool:
        """Tell whether calls run in PyTorch from now on."""
        return self._in_pytorch or self._is_never_captured

    def _watch(self, result: Any) -> None:
        if self._watch_result is not None:
            self._watch_result(result)

    def _may_fall_back(self, error: ORTModuleFallbackException) -> bool:
        return not self._strict and self.settings.fallback_policy.allows(type(error))

    def _fall_back(self, error: ORTModuleFallbackException, stage: str) -> None:
        """Run in PyTorch from now on, or for this call; count it, and say so."""
        retries = self.settings.fallback_retry
        self._in_pytorch = not retries
        until = "this call runs" if retries else f"{self.subject} runs from now on"
        if self._in_pytorch and self._may_do_in_parts(error):
            self._watch_result = self.take_apart()
        if self._watch_result is not None:
            until = "those parts of the module that can be captured run in the engine, the rest"
        self._say_fallback(error, stage, until)
        self.logger.info("%s", "".join(traceback.format_exception(error)))

    def _may_do_in_parts(self, error: ORTModuleFallbackException) -> bool:
        forced = (
            FallbackPolicy.FALLBACK_FORCE_TORCH_FORWARD
            | FallbackPolicy.FALLBACK_FORCE_TORCH_BACKWARD
        )
        cause = error.__cause__
        is_due_to_forward = isinstance(cause, Exception) and refusals.is_due_to_forward(cause)
        is_forced = bool(self.settings.fallback_policy & forced)
        return self.take_apart is not None and is_due_to_forward and not is_forced

    def _say_fallback(self, error: ORTModuleFallbackException, stage: str, until: str) -> None:
        counting.count(f"fallbacks_{stage}")
        self._warn(error, until)

    def _warn(self, error: ORTModuleFallbackException, until: str) -> None:
        warn_at(
            calling_line(),
            f"ORTModule: {type(error).__name__}: {fallback.reason_of(error)}; {until} in plain "
            "PyTorch (set ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE to get an error instead)",
            fallback.FallbackWarning,
        )

    def refuse_silence(self) -> None:
        """Raise after a call of which nothing ran in the engine, if no warning says so.

        That is where the module was taken apart, and none of its parts can be captured: raises the
        ORTModuleFallbackException of the whole if the policy does not allow PyTorch.
        """
        error = self._why_apart
        if error is None or self.stay_out is None or self._may_fall_back(error):
            return
        if self.stay_out():
            raise type(error)(*error.args) from error.__cause__

    def refuse_bypass(self) -> None:
        """Warn once of calls that never come to forward.

        Raises an ORTModuleFallbackException if the policy does not allow PyTorch.
        """
        error = ORTModuleONNXModelException(
            "nothing of this call ran in the engine: it did not come to the module's forward, "
            "because the call itself was replaced"
        )
        if not self._may_fall_back(error):
            raise error
        if str(error) not in self._said:
            self._said.add(str(error))
            self._warn(error, "such calls run")

    # ---- capture

    def _capture(self, args: tuple, kwargs: dict) -> tuple[_Captured, list[Any]]:
        held = ModuleState(self._module)
        try:
            call = describe_call(self._module, args, kwargs, held)
        except UnknownType as error:
            refusals.blame_forward(error)
            raise ORTModuleIOError(str(error)) from error
        device = _device_of(held, call)
        self._say_why(args, kwargs)
        floats = {name: value for name, value in call.constants.items() if type(value) is float}
        self._note_changed_numbers(floats)
        start = time.perf_counter()
        captured = self._capture_with_fewer_symbols(args, kwargs, floats, _has_empty(call), device)
        flat = captured.capture.match(args, kwargs)
        if flat is None:
            raise ORTModuleONNXModelException(captured.capture.mismatch(args, kwargs))
        self._captured = [captured, *self._captured[: MAX_CAPTURES - 1]]
        self._say_captured(captured, time.perf_counter() - start)
        return captured, flat

    def _note_changed_numbers(self, floats: dict[str, float]) -> None:
        """Find the numbers in which this call differs from earlier ones."""
        for captured in self._captured:
            self._leave_open(
                name
                for name, value in captured.floats.items()
                if name in floats and floats[name] != value
            )
            self._leave_open(
                place
                for place, value in captured.capture.constant_numbers
                if place.holds_another(value)
            )

    def captures_for(self, args: tuple, kwargs: dict) -> list[tuple[ModuleCapture, list[Any]]]:
        """Give the captures that serve a call, with what each takes of it."""
        found = [(each.capture, each.capture.match(args, kwargs)) for each in self._captured]
        return [(capture, flat) for capture, flat in found if flat is not None]

    def _leave_open(self, places: Iterable[str | NumberPlace]) -> bool:
        """Let numbers be open in later captures; tell whether any was not."""
        keyed = {place if isinstance(place, str) else place.key: place for place in places}
        new = keyed.keys() - self._open.keys() - self._constant
        self._open |= {key: keyed[key] for key in keyed if key in new}
        return bool(new)

    def _capture_with_fewer_symbols(
        self, args: tuple, kwargs: dict, floats: dict[str, float], is_empty: bool,
        device: str,
    ) -> _Captured:  # fmt: skip
        """Capture with as much left open as the module's forward allows."""
        first_error: Exception | None = None
        assigned: AssignedNumbers | None = None
        attempts = self._attempts(is_empty)
        while attempts:
            opens, are_fixed = attempts.pop(0)
            left_open = [*self._open.values()] if opens else []
            names = frozenset(each for each in left_open if isinstance(each, str))
            places = [each for each in left_open if not isinstance(each, str) and each.can_be_open]
            random = TorchGenerators()
            try:
                captured = self._try_to_capture(
                    args, kwargs, floats, names, places, are_fixed, device
                )
            except AssignedNumbers as error:
                random.restore()
                assigned = error
                if self._leave_open(error.places):
                    attempts = self._attempts(is_empty)
            except refusals.FirstCallDiffers as error:
                random.restore()
                # Numbers that the loop sets again and again differ from call to call.
                if not (self._num_first_calls and self._leave_open(error.places)):
                    raise
                attempts = self._attempts(is_empty)
            except Exception as error:
                if self._strict and not isinstance(error, _C.Unsupported):
                    raise  # a bug, which fewer symbols might hide
                random.restore()
                first_error = first_error or fallback.failure_of(error, "capture").error
            else:
                if not opens:
                    self._constant |= self._open.keys()
                    self._open.clear()
                return captured
        raise first_error or assigned

    def _attempts(self, is_empty: bool) -> list[tuple[bool, bool]]:
        """List what to try in turn: whether numbers are open, and whether sizes are fixed."""
        attempts = [(False, False), (False, True)]
        if self._open:
            attempts.insert(0, (True, False))
        if is_empty:  # in a trace no symbol can be 0
            attempts = [(opens, True) for opens, _ in attempts[:1] + attempts[-1:]]
        return [*dict.fromkeys(attempts)]

    def _try_to_capture(
        self, args: tuple, kwargs: dict, floats: dict[str, float], names: frozenset[str],
        places: Sequence[NumberPlace], are_fixed: bool, device: str,
    ) -> _Captured:  # fmt: skip
        rewrite = rewrite_for(self._module, device, self._options.opset)
        say_run = functools.partial(logs.say_run, self.logger)
        says = logs.says_captured(self.logger)
        state = GraphState(self._options, self._files, rewrite, say_run, names_inputs=says)

        def capture_alone() -> ModuleCapture:
            return capture_module(
                self._module, args, kwargs, state, numbers=names,
                places=places, are_fixed=are_fixed, run=self._run_plain,
                functions=policy_of(self.settings), is_inside=self.is_inside,
            )  # fmt: skip

        _thread.is_capturing = True
        try:
            if ranks.are_there():
                capture = agreement.agree(ranks.groups_of(self._module), capture_alone, state)
            else:
                capture = capture_alone()
        finally:
            _thread.is_capturing = False
        watchers.note(state.programs)
        baked = {name: value for name, value in floats.items() if name not in names}
        return _Captured(capture, state, baked)

    def _say_why(self, args: tuple, kwargs: dict) -> None:
        if self._captured and self.logger.isEnabledFor(logging.INFO):
            why = self._captured[0].capture.mismatch(args, kwargs)
            self.logger.info("captured again, because %s", why)

    def _say_captured(self, captured: _Captured, seconds: float) -> None:
        programs = captured.state.programs
        logs.introduce(self.logger, self.settings, self._options, programs)
        if captured.capture.unseen:
            names = ", ".join(captured.capture.unseen)
            self.logger.info(
                "values that forward reads and no guard compares, constant until recapture(): %s",
                names,
            )
        logs.say_captured(self.logger, programs, seconds, self._options)


def is_part_of_capture() -> bool:
    """Tell whether a call belongs to a graph that is captured in this thread."""
    return torch.compiler.is_compiling() or getattr(_thread, "is_capturing", False)


def is_traced() -> bool:
    """Tell whether a call is part of a trace or of a function transform in this thread."""
    return is_part_of_capture() or in_function_transform() or is_jit_tracing()


def _onnx_error(error: Exception) -> ORTModuleFallbackException:
    """Give an exception that a policy knows."""
    if isinstance(error, ORTModuleFallbackException):
        return error
    wrapped = ORTModuleONNXModelException(fallback.reason_of(error))
    wrapped.__cause__ = error
    return wrapped


def _has_empty(call: Structure) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.numel() == 0 for leaf in call.leaves)


def _device_of(held: ModuleState, call: Structure) -> str:
    """Give the type of the device that a call runs on.

    Raises ORTModuleDeviceException unless the module, or else its inputs, name exactly one.
    """
    devices = {
        tensor.device for tensor in held.tensors if tensor.dim() or tensor.is_floating_point()
    }
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ORTModuleDeviceException(
            f"the parameters and buffers of the module are on several devices: got {names}, want "
            "one"
        )
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    if not devices and not tensors:
        raise ORTModuleDeviceException(
            "a device must be specified in the module or its inputs, got no tensor in either; pass "
            "a tensor to the call"
        )
    return (devices.pop() if devices else tensors[0].device).type


def make_calls(
    module: torch.nn.Module, debug: DebugOptions, run: Callable[..., Any] | None = None
) -> Calls:
    """Make what runs a module's calls by its options; `run` is the module's forward if not itself.

    Raises an ORTModuleFallbackException for what is never captured, and may not run in plain
    PyTorch: a DataParallel, and any module with a torch that lacks what captures need.
    """
    compile_config, own_config = options.split(debug.config)
    settings = options.resolve_ortmodule(own_config | {"log_level": debug.log_level})
    chosen = options.in_force(options.resolve(compile_config), compile_config, settings)
    logger = logs.make_logger(settings.log_level)
    logs.say_ignored(logger, settings)
    pending = _why_never_captured(module)
    if pending is not None:
        may_fall_back = settings.fallback_policy.allows(type(pending))
        if chosen.strict or not may_fall_back:
            raise pending
    files = SavedFiles(debug.save_path, debug.onnx_prefix) if debug.save_onnx else None
    return Calls(module, chosen, settings, logger, run or module, files, pending)


def _why_never_captured(module: torch.nn.Module) -> ORTModuleFallbackException | None:
    if isinstance(module, torch.nn.DataParallel):
        return ORTModuleTorchModelException(DATA_PARALLEL)
    try:
        versions.check()
    except _C.Unsupported as error:
        return _onnx_error(error)
    return None
