"""A Function as it is called at one place of a program, and its operators in a trace."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from torch_ort import _C
from torch_ort.core import autocast
from torch_ort.core.user_code import TORCH_FOLDER
from torch_ort.functions import arguments as _arguments
from torch_ort.functions.arguments import Arguments, full_name
from torch_ort.functions.learn import Learner, Learnt
from torch_ort.pytorch import autograd_compat, patching, trace_compat
from torch_ort.rules.forms import Spec, empty, spec_of

_logger = logging.getLogger("torch_ort")
# The calls, by the keys with which the operators are called. Graphs hold their calls; a call that
# nothing holds is freed.
_calls: weakref.WeakValueDictionary[int, FunctionCall | BackwardCall] = (
    weakref.WeakValueDictionary()
)
_named: set[str] = set()
# Frames between the call of a Function and the user's line.
_BETWEEN = (TORCH_FOLDER, os.path.dirname(patching.__file__) + os.sep)


def call_of(key: int) -> Any:
    """Give the call that an operator's key stands for; a BackwardCall for python_op_grad."""
    if key not in _calls:
        raise _C.InternalError(f"PythonOp: no Function has the key {key}")
    return _calls[key]


class FunctionCall:
    """A Function with its constants, called with tensors of one form."""

    def __init__(
        self, function: type, arguments: Arguments, requires_grad: tuple[bool, ...],
        grad_mode: bool, state: autocast.State,
    ) -> None:  # fmt: skip
        self.function = function
        self.name = full_name(function)
        # This keeps constants alive whose addresses are in files.
        self.values = arguments.values
        self.convention = arguments.convention
        self.num_seen = arguments.num_seen
        self.requires_grad = requires_grad
        self.grad_mode = grad_mode
        self.learnt: Learnt
        self.tensors: list[Spec] = []
        self.sizes: list[Any] = []
        self._backward: dict[tuple[bool, ...], BackwardCall] = {}
        self._form: Any = None
        run = _with_autocast(function.apply, state)
        self._run = arguments.filler(run)
        self._num_tensors, self._num_floats = len(arguments.tensors), len(arguments.floats)
        # What it learns holds for other floats too: every call of the graph checks it.
        trial = arguments.with_recorded_floats().filler(run) if arguments.floats else self._run
        self._learner = Learner(function, trial, requires_grad, grad_mode, self.num_seen)
        self.key = 0

    def learn(self, tensors: list[torch.Tensor], sizes: list[Any]) -> list[Spec]:
        """Give the forms of forward's results for tensors of a trace."""
        tensors = tensors[: self._num_tensors]
        form = trace_compat.form_key([*tensors, *sizes])
        if form != self._form:
            learnt = self._learner.forward(tensors, sizes)
            self._note(learnt)
            self._form = form
            self.tensors, self.sizes = [spec_of(tensor) for tensor in tensors], sizes
        return self.learnt.outputs

    def prepare(self) -> int:
        """Make the key; the Function's results are known once `learn` was called."""
        if not self.key:
            self.key = self._add([], 0)
            _calls[self.key] = self
            weakref.finalize(self, _C.remove_python_function, self.key)
        return self.key

    def backward(self, given: Sequence[torch.Tensor | None]) -> BackwardCall:
        """Give the call of backward where outputs have a gradient or none as given."""
        wanted = tuple(gradient is not None for gradient in given)
        if wanted not in self._backward:
            self._backward[wanted] = BackwardCall(self)
        return self._backward[wanted]

    def learn_gradients(self, given: Sequence[torch.Tensor | None]) -> list[Spec | None]:
        """Learn the gradients that backward gives."""
        return self._learner.backward(self.learnt, self.tensors, self.sizes, given)

    def forget_trace(self) -> None:
        """Free the objects of the trace; called when the graph has been read."""
        if self._form is None:
            return
        self.learnt.made = None
        self.learnt.outputs = []
        self._form = None
        self.tensors, self.sizes = [], []
        for backward in self._backward.values():
            backward.forget_trace()

    def _note(self, learnt: Learnt) -> None:
        written = [False] * (self._num_tensors + self._num_floats)
        for position in learnt.written:
            if position is not None:
                written[position] = True
        if any(written):
            self._say_copied()
        returned = learnt.returned
        count = len(returned) if isinstance(returned, tuple) else 1
        self.learnt = learnt
        _C.set_python_function_form(self.key, written, learnt.places, count)

    def _add(self, places: list[int], count: int) -> int:
        requires_grad = [*self.requires_grad, *[False] * self._num_floats]
        return _C.add_python_function(
            self._checked_run(), self.name, requires_grad, [False] * len(requires_grad),
            self.grad_mode, places, count,
        )  # fmt: skip

    def _checked_run(self) -> Callable[..., Any]:
        """Wrap `run` to check what forward returns besides tensors."""
        run, name = self._run, self.name
        itself = weakref.ref(self)

        def checked(*given: Any) -> Any:
            results = run(*given)
            if type(results) is torch.Tensor:
                return results
            call = itself()
            expected = call.learnt.returned if call is not None else results
            if isinstance(results, tuple) and isinstance(expected, tuple):
                for i, (item, want) in enumerate(zip(results, expected, strict=False)):
                    is_same = isinstance(item, torch.Tensor) or item is want or item == want
                    if not is_same:
                        raise _C.UserError(
                            f"{name}: result {i} of forward is no tensor, and changes: got "
                            f"{item!r}, want {want!r} as when the graph was captured"
                        )
            return results

        return checked

    def _say_copied(self) -> None:
        if self.name not in _named and not hasattr(self.function, "alias_input"):
            _named.add(self.name)
            _logger.warning(
                "%s writes into its arguments (mark_dirty): they are copied first; declare what "
                "may be written over in its alias_input",
                self.name,
            )


class BackwardCall:
    """The backward of a call, where a certain set of outputs has gradients."""

    def __init__(self, forward: FunctionCall) -> None:
        self.forward = weakref.proxy(forward)
        self.key = forward._add(
            forward.learnt.places,
            len(forward.learnt.returned) if isinstance(forward.learnt.returned, tuple) else 1,
        )
        self.gradients: list[Spec | None] | None = None
        self.positions: list[int] = []
        self._form: Any = None
        _calls[self.key] = self
        weakref.finalize(self, _C.remove_python_function, self.key)

    def learn(self, given: Sequence[torch.Tensor | None]) -> list[Spec]:
        """Give the forms of the gradients, without the missing ones, for gradients of a trace."""
        form = trace_compat.form_key(list(given))
        if self.gradients is None or form != self._form:
            self.gradients = self.forward.learn_gradients(given)
            self.positions = [i for i, form in enumerate(self.gradients) if form is not None]
            self._form = form
            _C.set_gradients(self.key, self.positions)
        return [form for form in self.gradients if form is not None]

    def forget_trace(self) -> None:
        """Let go of symbolic sizes."""
        self.gradients = None
        self._form = None


def is_called_by_graph(frame: FrameType | None) -> bool:
    """Tell whether a frame, in which a Function is called, is that of a graph's step."""
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in (__file__, _arguments.__file__)


def _with_autocast(apply: Callable[..., Any], state: autocast.State) -> Callable[..., Any]:
    for device, dtype in state:
        apply = torch.autocast(device, dtype)(apply)
    return apply


class Calls:
    """The calls of one capture, or of one wrapped Function: equal ones are one.

    Graphs of ours keep their calls themselves; those that another backend of torch.compile makes
    do not, for which `keeps` is.
    """

    def __init__(self, keeps: bool = False) -> None:
        self._kept: list[FunctionCall] | None = [] if keeps else None
        self._by_form: dict[tuple, FunctionCall] = {}
        self._lock = threading.Lock()

    def put(self, function: type, args: Sequence[Any]) -> Any:
        """Put a call into the current trace; give the Function's results."""
        arguments = Arguments(args)
        grad_mode = torch.is_grad_enabled()
        state = autocast.state_now()
        requires_grad = tuple(
            tensor.requires_grad and i < arguments.num_seen
            for i, tensor in enumerate(arguments.tensors)
        )
        form = (
            function, arguments.key(), requires_grad, grad_mode, state,
            trace_compat.form_key([*arguments.tensors, *arguments.sizes]),
        )  # fmt: skip
        with self._lock:
            call = self._by_form.get(form)
            if call is None:
                call = FunctionCall(function, arguments, requires_grad, grad_mode, state)
                self._by_form[form] = call
        _, outputs = torch.ops.torch_ort.python_op(
            [*arguments.tensors, *arguments.floats], arguments.sizes, call.prepare()
        )
        return self._results(call, arguments, outputs)

    def forget(self) -> None:
        """Free the objects of the trace, and all calls that no graph holds."""
        for call in self._by_form.values():
            call.forget_trace()
        if self._kept is not None:
            self._kept += self._by_form.values()
        self._by_form.clear()

    def _results(
        self, call: FunctionCall, arguments: Arguments, outputs: list[torch.Tensor]
    ) -> Any:
        learnt = call.learnt
        results = list(outputs)
        for i, position in enumerate(learnt.written):
            if position is not None:
                results[i] = arguments.tensors[position]
                results[i].copy_(outputs[i])
        if not isinstance(learnt.returned, tuple):
            return results[0] if results else learnt.returned
        returned = list(learnt.returned)
        for place, result in zip(learnt.places, results, strict=True):
            returned[place] = result
        return tuple(returned)


_of_dynamo: list[Calls] = []  # Dynamo's captures end with ours


def keep_for_traces(calls: Calls) -> None:
    """Let go of the calls at the end of each capture from now on."""
    _of_dynamo.append(calls)


def end_of_capture() -> None:
    """Free the objects of a trace that ends; graphs hold the calls that they need."""
    for calls in _of_dynamo:
        calls.forget()


# ---- the operators


class _Tracked(torch.autograd.Function):
    """The autograd rule of python_op."""

    @staticmethod
    def forward(ctx: Any, key: int, sizes: list[Any], *tensors: torch.Tensor) -> tuple:
        ctx.set_materialize_grads(False)
        with autograd_compat.below_autograd():
            context, outputs = torch.ops.torch_ort.python_op(list(tensors), sizes, key)
        call = call_of(key)
        ctx.call, ctx.num_sizes = call, len(tensors)
        ctx.save_for_backward(context)
        fixed = [
            output
            for output, differs in zip(outputs, call.learnt.differentiable, strict=True)
            if not differs
        ]
        ctx.mark_non_differentiable(context, *fixed)
        return context, *outputs

    @staticmethod
    def backward(ctx: Any, _: Any, *given: torch.Tensor | None) -> tuple:
        (context,) = ctx.saved_tensors
        backward = ctx.call.backward(given)
        found = torch.ops.torch_ort.python_op_grad(context, list(given), backward.key)
        gradients: list[torch.Tensor | None] = [None] * ctx.num_sizes
        for position, gradient in zip(backward.positions, found, strict=True):
            gradients[position] = gradient
        return None, None, *gradients


def _python_op(tensors: list[torch.Tensor], sizes: list[Any], function: int) -> tuple:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        context, *outputs = _Tracked.apply(function, sizes, *tensors)
        return context, outputs
    with autograd_compat.below_autograd():
        return torch.ops.torch_ort.python_op(tensors, sizes, function)


def _fake_python_op(tensors: list[torch.Tensor], sizes: list[Any], function: int) -> tuple:
    context, outputs = _form_of_forward(tensors, sizes, function)
    return empty(context), [empty(output) for output in outputs]


def _fake_python_op_grad(
    ctx: torch.Tensor, grads: list[torch.Tensor | None], function: int
) -> list[torch.Tensor]:
    return [empty(gradient) for gradient in _form_of_backward(ctx, grads, function)]


def form_of_call(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Give the forms of what one of the operators gives."""
    is_forward = operator is torch.ops.torch_ort.python_op.default
    return (_form_of_forward if is_forward else _form_of_backward)(*args, **kwargs)


def _form_of_forward(
    tensors: list[torch.Tensor], sizes: list[Any], function: int
) -> tuple[Spec, list[Spec]]:
    return Spec([], [], torch.int64, torch.device("cpu")), call_of(function).learn(tensors, sizes)


def _form_of_backward(
    ctx: torch.Tensor, grads: list[torch.Tensor | None], function: int
) -> list[Spec]:
    return call_of(function).learn(grads)


_library = torch.library.Library("torch_ort", "FRAGMENT")
_library.impl("python_op", _python_op, "Autograd")
torch.library.register_fake("torch_ort::python_op", _fake_python_op)
torch.library.register_fake("torch_ort::python_op_grad", _fake_python_op_grad)
# Only a run can show what effects a Function has besides its results.
for _operator in (torch.ops.torch_ort.python_op, torch.ops.torch_ort.python_op_grad):
    torch.fx.node.has_side_effect(_operator.default)
