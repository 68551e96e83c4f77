"""The recorder: forward and backward of a function as one graph of ATen calls, by running it once.

The function runs on tensors without data. PyTorch's own C++ does the rest: autograd, the
operators that are made of others, and functionalization, which turns writes into new tensors. What
arrives below them is written down, and answered by a rule (torch_ort/rules).

It takes a fraction of AOTAutograd's time, and does less: `HandOver` says what is left to that.

Sizes are symbols of C++ (csrc/capture/size_symbols.h), so that arithmetic on them and guards need
no Python. A recording that cannot be right is handed over: inputs that autograd watches are
written, numbers are read from data, transforms of torch.func are used. AOTAutograd takes longer,
but is never wrong. If a rule raises, PyTorch is asked; if it refuses the arguments too, the error
is the program's. Any other error is a bug: strict mode raises it, otherwise AOTAutograd captures
after a line at level WARNING.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_ort import _C
from torch_ort.core import autocast
from torch_ort.core.open_sizes import open_dims
from torch_ort.core.refusals import HandOver, NoCapture
from torch_ort.core.scopes import set_here
from torch_ort.core.user_code import OUR_FOLDER, TORCH_FOLDER, Line
from torch_ort.functions.call import form_of_call
from torch_ort.functions.describe import is_python_op
from torch_ort.guards.overlapping_writes import overlapping_writes_refused
from torch_ort.pytorch.autograd_compat import newest_node, running_node
from torch_ort.pytorch.dispatch_compat import (
    Leaf,
    WithoutNumbers,
    dropout_passes_through,
    functionalized,
    has_gradient,
    is_functionalized,
    is_written,
    layers_taken_apart,
    nothing_compiled,
    operators_whole,
    parameters_made,
    shape_questions_answered,
    sparse_gradients_whole,
    storage_key,
    unwrapped,
    without_saved_tensor_hooks,
)
from torch_ort.pytorch.generators import note_draw
from torch_ort.pytorch.graph_compat import (
    OpOverload,
    input_description,
    output_descriptions,
    schema,
)
from torch_ort.pytorch.trace_compat import said_to_be_compiling
from torch_ort.record.backwards import (
    BACKWARD,
    INSIDE,
    are_equal,
    erase_inside,
    with_inside_alone,
)
from torch_ort.record.bodies import Body, ControlFlowRecorder, recording_branches
from torch_ort.record.reasons import enters_program
from torch_ort.record.results import OutputsTaken, Results, is_leaf
from torch_ort.rules import answers
from torch_ort.rules.answers import Answers, answering, leaf_of
from torch_ort.rules.data_sizes import NewSize, example_of
from torch_ort.rules.forms import Spec, dense_order, in_order, is_contiguous, spec_of
from torch_ort.rules.numbers import Conditions, conditions_collected, node_of_number
from torch_ort.rules.symbols import Symbolic

# Our code between the user's line and the operator.
_BETWEEN = (
    answers.__file__,
    os.path.join(OUR_FOLDER, "guards", "hooks.py"),
    os.path.join(OUR_FOLDER, "functions", ""),
    os.path.join(OUR_FOLDER, "pytorch", ""),
)


class RecordedGraph(torch.nn.Module):
    """A graph and the constants that it names, without the code of an fx.GraphModule."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self.graph = graph


_GIVES_ROW_MAJOR = "forward gives an argument back in row-major order, which is a copy if not dense"
_WRITES_RESHAPED = (
    "forward writes into `reshape` or `contiguous` of an argument that is not dense, which may be "
    "a view or a copy"
)


@dataclass
class Recording:
    """A recorded function: `graph` has inputs as `primals_i`, and `tangents_i` if it trains."""

    module: RecordedGraph
    num_outputs: int  # number of the graph's results that are no gradients
    results: Results  # results of the function
    tangents: list[int]  # outputs for which a gradient comes back
    written: list[int]  # inputs that the graph writes into, none of which autograd watches
    # Inputs that the function makes leaves of, or leaves no more: what requires_grad is then.
    switched: dict[int, bool]
    # Inputs that, where they are not dense, may not be replaced by a dense copy, and why.
    uncopied: dict[int, str]
    around: autocast.State  # the autocast under which the function was called
    # Eager PyTorch runs backward under the autocast in which backward() is called. These are the
    # states in which it computes what the graph's backward does.
    states: list[autocast.State]
    # The graph for a backward under the autocast around forward, where that is another one.
    inside: RecordedGraph | None
    asked: Conditions  # on numbers
    is_like_first: bool = True  # whether a first run, which set constants, made the same calls

    @property
    def is_training(self) -> bool:
        """Tell whether the graph has a backward."""
        return bool(self.tangents)


def record(
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    is_settled: Callable[[], bool] = lambda: True,
    is_complete: bool = False,
    new_size: NewSize | None = None,
    keeps_casts: bool = False,
) -> Recording:
    """Record a function of flat inputs, `Leaf`s and integers.

    A function that is not settled after its first run is run again: what it does then counts. The
    graph gives what results are made of; if it is to be complete, for files, every result.
    `new_size` makes the symbol of a size that only data tells; None: the graph must have none.
    If it `keeps_casts`, autocast's cache serves the recording as it does in eager PyTorch, so that
    a weight which is used twice is cast once, and its gradients are added in the lower precision.
    Raises HandOver where it cannot; whatever the function raises comes through.
    """
    first = _Recorder(inputs, new_size, keeps_casts).run(function, is_complete)
    if is_settled():
        return first
    recording = _Recorder(inputs, new_size, keeps_casts).run(function, is_complete)
    recording.is_like_first = _are_alike(recording, first)
    return recording


def _are_alike(a: Recording, b: Recording) -> bool:
    """Tell whether two recordings make the same calls, with equal constants."""
    if _calls_of(a) != _calls_of(b):
        return False
    names = {node.target for node in a.module.graph.find_nodes(op="get_attr")}
    return all(_is_equal(getattr(a.module, name), getattr(b.module, name)) for name in names)


def _calls_of(recording: Recording) -> list[tuple[Any, ...]]:
    nodes = recording.module.graph.nodes
    return [(node.op, node.target, repr(node.args), repr(node.kwargs)) for node in nodes]


def _is_equal(a: Any, b: Any) -> bool:
    """Tell whether two constants are tensors of the same numbers; graphs are made anew."""
    if a is b or not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b)
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


class RecordedInputs:
    """Inputs for `record` that stand for those of a call.

    Sizes and integers are symbols, or, for a graph that serves no other ones, those of the call.
    """

    def __init__(self, are_fixed: bool = False, fixes_ones: bool = False) -> None:
        self._are_fixed = are_fixed
        self._fixes_ones = fixes_ones
        self.has_ones = False  # a size that may vary is 1
        self._open_dims = open_dims()
        self._sizes = _C.SizeSymbols()
        self._count = 0

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Make inputs and record in the block, where `torch.compiler.is_compiling()` is true."""
        with said_to_be_compiling():
            yield

    def held(self, tensor: torch.Tensor, name: str) -> Leaf:
        """Give an input for a tensor whose sizes never change."""
        return input_like(tensor, spec_of(tensor))

    def tensor(self, tensor: torch.Tensor, name: str) -> Leaf:
        """Give an input for a tensor that each call provides anew."""
        sizes = [
            self._symbol(size, is_size=True) if self._may_vary(name, dim) else size
            for dim, size in enumerate(tensor.shape)
        ]
        strides = in_order(sizes, _C.memory_order(tensor) or range(len(sizes)))
        return input_like(tensor, Spec(sizes, strides, tensor.dtype, tensor.device))

    def integer(self, value: int, name: str) -> int | torch.SymInt:
        """Give what stands for an integer that each call provides."""
        return self._symbol(value, is_size=False)

    def unbacked_size(self, value: int, most: int | None = None) -> torch.SymInt:
        """Give a symbol for a data-dependent size; `value` is an example of what it may be."""
        self._count += 1
        return self._sizes.unbacked(f"t{self._count - 1}", value, most)

    def new_size(self, most: int | None) -> torch.SymInt:
        """Give a symbol for a size that only data tells, and that is at most a number."""
        return self.unbacked_size(example_of(most), most)

    def _may_vary(self, name: str, dim: int) -> bool:
        return self._open_dims is None or dim in self._open_dims.get(name, ())

    def _symbol(self, value: int, is_size: bool) -> int | torch.SymInt:
        if self._are_fixed or (is_size and value == 1 and self._fixes_ones):
            return value
        self.has_ones |= is_size and value == 1
        self._count += 1
        return self._sizes.symbol(f"s{self._count - 1}", value, is_size)

    def guards(self) -> list[str]:
        """Give the conditions on symbols, as Python, under which the same would be recorded."""
        return self._sizes.guards()


def input_like(tensor: torch.Tensor, spec: Spec) -> Leaf:
    """Give an input that stands for a tensor, in a form of its own."""
    leaf = leaf_of(spec)
    leaf.wants_gradient = tensor.requires_grad
    leaf.is_parameter = isinstance(tensor, torch.nn.Parameter)
    return leaf


class _Recorder:
    def __init__(
        self, inputs: Sequence[Any], new_size: NewSize | None, keeps_casts: bool
    ) -> None:  # fmt: skip
        self._keeps_casts = keeps_casts
        self._inputs = list(inputs)
        self._graph = fx.Graph()
        self._module = RecordedGraph(self._graph)
        self._mode = _Mode(self._graph, self._module)
        self._mode.new_size = new_size
        self._primals = [self._placeholder(i, value) for i, value in enumerate(inputs)]
        self._wrapped: dict[int, torch.Tensor] = {}  # by position
        self._with_grad = torch.is_grad_enabled()
        self._around = autocast.state_now()
        trains = self._with_grad and any(
            isinstance(value, Leaf) and value.wants_gradient for value in inputs
        )
        self._branches = None if trains else ControlFlowRecorder(self._mode, self._wrapped)

    def run(self, function: Callable[..., Sequence[Any]], is_complete: bool) -> Recording:
        try:
            return self._run(function, is_complete)
        except NoCapture:
            raise
        except Exception as error:
            # AOTAutograd cannot trace the function instead, since it has no data-dependent
            # branches.
            if self._branches is None or not self._branches.first_line:
                raise
            raise NoCapture(
                f"a graph with a data-dependent branch or loop ({self._branches.first_line}): "
                f"{error}"
            ) from error

    @enters_program
    def _run(self, function: Callable[..., Sequence[Any]], is_complete: bool) -> Recording:
        with (
            _tracing_state(self._keeps_casts),
            shape_questions_answered(),
            nothing_compiled(),
            dropout_passes_through(),
            operators_whole(),
            layers_taken_apart(),
            sparse_gradients_whole(),
            parameters_made(),
            answering(self._mode) as asked,
            conditions_collected() as conditions,
        ):
            with recording_branches(self._branches), overlapping_writes_refused(_line):
                results = list(function(*self._wrap_inputs()))
            switched = self._switched()
            taken = OutputsTaken(self._wrapped, results, is_complete)
            outputs = taken.outputs
            asking = [
                i
                for i in taken.read()
                if isinstance(outputs[i], torch.Tensor) and has_gradient(outputs[i])
            ]
            self._leaves = [outputs[i] for i in asking if is_leaf(outputs[i])]
            needing = [i for i in asking if not is_leaf(outputs[i])]
            is_training = bool(needing)
            if torch.is_grad_enabled() != self._with_grad or (is_training and not self._with_grad):
                raise HandOver("grad mode is switched inside, and not back or for an output")
            written = self._write_back()
            values = [self._node_of(output) for output in outputs]
            states, inside = [autocast.OFF], None
            if is_training:
                states, inside = self._record_backwards([outputs[i] for i in needing], values)
            else:
                self._graph.output(tuple(values))
        made = Results(taken.results, self._inputs)
        uncopied = self._uncopied(asked, made)
        return Recording(
            self._module, len(outputs), made, needing, written, switched, uncopied, self._around,
            states, inside, conditions,
        )  # fmt: skip

    def _switched(self) -> dict[int, bool]:
        """Give the inputs of which the function has set `requires_grad`; refuse other effects."""
        switched = {}
        for position, wrapped in self._wrapped.items():
            leaf = self._inputs[position]
            if wrapped.grad is not None:
                raise NoCapture(
                    "forward calls backward(), which adds to the gradients of its arguments and "
                    "parameters; torch.autograd.grad gives them as results"
                )
            if wrapped.requires_grad == leaf.wants_gradient or not wrapped.is_leaf:
                continue
            if is_written(wrapped):
                raise NoCapture(f"forward writes into input {position} and sets its requires_grad")
            leaf.wants_gradient = switched[position] = wrapped.requires_grad
        return switched

    def _uncopied(self, asked: WithoutNumbers, made: Results) -> dict[int, str]:
        """Give the inputs that no dense copy may replace where they are not dense, and why."""
        packed = [*asked.packed, *asked.reshaped]
        if any(map(is_written, packed)):
            return dict.fromkeys(self._wrapped, _WRITES_RESHAPED)
        memory = set(map(storage_key, asked.packed))
        given = {i for i in made.inputs if storage_key(self._wrapped[i]) in memory}
        return dict.fromkeys(given, _GIVES_ROW_MAJOR)

    def _placeholder(self, position: int, value: Any) -> fx.Node:
        node = self._graph.placeholder(f"primals_{position + 1}")
        node.meta = {"val": value, "desc": input_description(position)}
        return node

    def _wrap_inputs(self) -> list[Any]:
        arguments = []
        for position, (value, node) in enumerate(zip(self._inputs, self._primals, strict=True)):
            if not isinstance(value, Leaf):
                arguments.append(value)
                continue
            value.node = node
            wrapped = functionalized(value, value.is_parameter)
            if value.wants_gradient:
                wrapped.requires_grad_(True)
            self._wrapped[position] = wrapped
            arguments.append(wrapped)
        return arguments

    def _write_back(self) -> list[int]:
        """Let the graph write into inputs as the function did; give their positions."""
        written = []
        for position, wrapped in self._wrapped.items():
            leaf = self._inputs[position]
            now = unwrapped(wrapped)
            changed = _C.same_sizes(list(wrapped.shape), leaf.spec.sizes) and _C.same_sizes(
                list(wrapped.stride()), leaf.spec.strides
            )
            if not changed:
                raise HandOver(f"input {position} gets another shape")
            if now is leaf:
                continue
            if leaf.wants_gradient or wrapped.requires_grad:
                raise HandOver(f"input {position}, which autograd watches, is written into")
            written.append(position)
        for position in written:
            wrapped, leaf = self._wrapped[position], self._inputs[position]
            self._mode.write(leaf, unwrapped(wrapped))
        return written

    def _node_of(self, output: Any) -> Any:
        number = node_of_number(output)
        if number is not None and number.is_int():
            output = number.as_size()
        if not isinstance(output, torch.Tensor):
            return self._mode.symbol_node(output) if isinstance(output, torch.SymInt) else output
        return self._mode.node_of(unwrapped(output))

    def _record_backwards(
        self, outputs: list[torch.Tensor], values: list[Any]
    ) -> tuple[list[autocast.State], RecordedGraph | None]:
        """Record backward without autocast, and, if forward was called under it, with it, too.

        Give the states for which the first one is right, and the graph of the second where that is
        another. It is where a block of forward has switched autocast off.
        """
        around = self._around
        tangents = self._add_tangents(outputs)
        gradients = self._record_backward(BACKWARD, outputs, tangents, autocast.OFF, not around)
        if all(gradient is None for gradient in gradients):
            raise HandOver("outputs require grad, and no input gets one")
        states, inside = [autocast.OFF], None
        if around:
            others = self._record_backward(INSIDE, outputs, tangents, around, True)
            if are_equal(self._graph, gradients, others):
                states.append(around)
            else:
                inside = self._inside_alone(values, others)
            erase_inside(self._graph)
        _set_joint_output(self._graph, values, gradients)
        return states, inside

    def _add_tangents(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Add an input for the gradient of each output; give what stands for them."""
        wrapped = []
        last = self._primals[-1]
        for i, output in enumerate(outputs):
            spec = unwrapped(output).spec
            tangent = leaf_of(spec if _is_dense(spec) else _as_rows(spec))
            with self._graph.inserting_after(last):  # all placeholders come first
                last = tangent.node = self._graph.placeholder(f"tangents_{i + 1}")
            last.meta = {"val": tangent}
            wrapped.append(functionalized(tangent))
        return wrapped

    @enters_program
    def _record_backward(
        self, tag: str, outputs: list[torch.Tensor], tangents: list[torch.Tensor],
        state: autocast.State, is_last: bool,
    ) -> list[Any]:  # fmt: skip
        """Record backward under autocast of a state; give the nodes of gradients by input."""
        self._mode.tag = tag
        wanted = [p for p, value in self._wrapped.items() if value.requires_grad]
        inputs = [self._wrapped[p] for p in wanted]
        with (
            torch.autograd.set_multithreading_enabled(False),
            autocast.in_state(state),
            overlapping_writes_refused(_line),
        ):
            found = torch.autograd.grad(
                outputs, [*inputs, *self._leaves], tangents, allow_unused=True,
                retain_graph=not is_last,
            )  # fmt: skip
        if any(gradient is not None for gradient in found[len(wanted) :]):
            raise NoCapture(
                "forward makes a tensor that requires grad, and returns both it and what is "
                "computed from it: its gradient would be lost; make it a parameter of the module"
            )
        gradients: list[Any] = [None] * len(self._inputs)
        for position, gradient in zip(wanted, found, strict=False):
            if gradient is not None:
                if not is_functionalized(gradient):
                    raise HandOver(f"the gradient of input {position} is a constant")
                gradients[position] = self._mode.node_of(unwrapped(gradient))
        return gradients

    def _inside_alone(self, values: list[Any], gradients: list[Any]) -> RecordedGraph:
        graph, *outputs = with_inside_alone(self._graph, values, gradients)
        _set_joint_output(graph, *outputs)
        module = RecordedGraph(graph)
        for name, tensor in self._module.named_buffers(remove_duplicate=False):
            module.register_buffer(name, tensor)
        return module


def _set_joint_output(graph: fx.Graph, values: list[Any], gradients: list[Any]) -> None:
    output = graph.output((*values, *gradients))
    of = [p if gradient is not None else None for p, gradient in enumerate(gradients)]
    output.meta["desc"] = output_descriptions(len(values), of)


def _is_dense(spec: Spec) -> bool:
    return is_contiguous(spec) or dense_order(spec) is not None


def _as_rows(spec: Spec) -> Spec:
    return spec._replace(strides=_C.contiguous_strides(spec.sizes))


@contextlib.contextmanager
def _tracing_state(keeps_casts: bool) -> Iterator[None]:
    """Switch off hooks that outlive a recording; forget what autocast's cache keeps of it."""
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(cached and keeps_casts)
        # Saved-tensor hooks around the call are for tensors that the graph saves when it runs, and
        # numbers of gradients can be checked then alone.
        with (
            without_saved_tensor_hooks(),
            torch.autograd.set_detect_anomaly(False),
            torch.set_grad_enabled(torch.is_grad_enabled()),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        torch.clear_autocast_cache()  # it would keep tensors without data


class _Mode(Answers):
    """Writes down every operator, and answers it with tensors without data."""

    def __init__(self, graph: fx.Graph, module: RecordedGraph) -> None:
        super().__init__()
        self.tag = "is_forward"
        self._root = self._graph = graph
        self._prefix = ""  # of the names of nodes
        self._module = module
        self._constants: dict[int, tuple[torch.Tensor, fx.Node]] = {}  # by identity
        # The user's lines that have made the nodes of autograd, by their numbers.
        self._lines: dict[int, Line] = {}
        self._last_line: Line | None = None  # of the last node that has run in backward
        # Numbers of values: nodes of equal calls have the same one.
        self._value_numbers: dict[fx.Node, int] = {}
        self._values: dict[tuple, int] = {}

    def form(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Give the forms of what an operator gives; Functions tell theirs when they are run."""
        if is_python_op(func):
            return _C.call_plainly(lambda: form_of_call(func, *args, **kwargs))
        return super().form(func, args, kwargs)

    def line(self) -> Line | None:
        """Give the user's line that runs; in backward, the one whose gradient is computed."""
        line = _line(sys._getframe(2))  # the caller is a frame of this package
        if line is not None:
            # The first call after a node was made is the node's operator. Later calls may make no
            # node.
            self._lines.setdefault(newest_node(), line)
            return line
        if self.tag == "is_forward":
            return None
        node = running_node()
        if node is not None:
            self._last_line = self._lines.get(node, self._last_line)
        # Between two nodes autograd adds gradients, for the node that has just run.
        return self._last_line

    def note(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Record one call."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            note_draw()
        if any(type(arg) is torch.SymFloat for arg in args):
            args = _with_integers(func, args, result)
        if func is torch.ops.aten._assert_scalar.default and type(args[0]) is torch.SymBool:
            args = (Symbolic(args[0]), *args[1:])
        node = self._graph.create_node(
            "call_function", func, self._arguments(args), self._arguments(kwargs),
            name=self._prefix + schema(func).name.partition("::")[2],
        )  # fmt: skip
        node.meta = {"val": result, "partitioner_tag": self.tag}
        if self.functions.is_adding_windows:
            node.meta["adds_windows"] = True
        line = self.line()
        if line is not None:
            node.meta["line"] = line
        if isinstance(result, Leaf):
            result.node = node
        else:
            self._note_items(node, result)

    def _note_items(self, node: fx.Node, items: Any) -> None:
        for i, item in enumerate(items or ()):
            if isinstance(item, Leaf):
                item.source = (node, i)
            elif isinstance(item, tuple | list):
                self._note_items(self._item(node, i, item), item)

    def _item(self, parent: fx.Node, index: int, value: Any) -> fx.Node:
        with parent.graph.inserting_after(parent):
            node = parent.graph.create_node("call_function", operator.getitem, (parent, index))
        node.meta = {"val": value, "partitioner_tag": parent.meta["partitioner_tag"]}
        return node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Give the node that makes a tensor."""
        if not isinstance(tensor, Leaf):
            return self._constant(tensor)
        if tensor.node is None:
            tensor.node = self._item(*tensor.source, tensor)
        return tensor.node

    def value_key(self, tensor: torch.Tensor) -> Any:
        """Give what is equal for tensors that the same calls have made of the same ones."""
        return self._value_number(self.node_of(tensor), _LONGEST_CHAIN)

    def _value_number(self, node: fx.Node, depth: int) -> int:
        if node not in self._value_numbers:
            is_pure = node.op == "call_function" and _is_pure(node.target)
            words: Any = (node.name,)
            if is_pure and depth:
                numbered = fx.node.map_arg(
                    (node.args, node.kwargs),
                    lambda arg: _Numbered(self._value_number(arg, depth - 1)),
                )
                words = (node.target, repr(numbered))
            self._value_numbers[node] = self._values.setdefault(words, len(self._values))
        return self._value_numbers[node]

    def symbol_node(self, size: torch.SymInt) -> fx.Node:
        """Give a node for an integer that leaves the graph."""
        node = self._graph.create_node("call_function", torch.sym_int, (Symbolic(size),))
        node.meta = {"val": size, "partitioner_tag": self.tag}
        return node

    @contextlib.contextmanager
    def writing_to(self, body: Body) -> Iterator[None]:
        """Record in a body."""
        before = self._graph, self._prefix
        self._graph, self._prefix = body.graph, body.prefix
        try:
            yield
        finally:
            self._graph, self._prefix = before

    def add(self, target: Any, args: tuple, value: Any, origin: str = "") -> fx.Node:
        """Record a call that is no operator's."""
        name = self._prefix + target.__name__
        node = self._graph.create_node("call_function", target, args, name=name)
        node.meta = {"val": value, "partitioner_tag": self.tag, "origin": origin}
        return node

    def add_input(self, leaf: Leaf) -> None:
        """Record an input of the body that is written to."""
        name = f"{self._prefix}input"
        leaf.node = self._graph.create_node("placeholder", name, name=name)
        leaf.node.meta = {"val": leaf}

    def set_outputs(self, outputs: list[fx.Node]) -> None:
        """Set the results of the body that is being recorded; drop nodes that they do not need."""
        graph = self._graph
        graph.output(tuple(outputs))
        for node in reversed(graph.nodes):
            if node.op == "call_function" and not node.users and _is_pure(node.target):
                graph.erase_node(node)

    def write(self, target: Leaf, source: torch.Tensor) -> None:
        """Record that the graph writes into an input."""
        node = self._graph.create_node(
            "call_function", torch.ops.aten.copy_.default,
            (self.node_of(target), self.node_of(source)),
        )  # fmt: skip
        node.meta = {"val": target, "partitioner_tag": self.tag}

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) not in self._constants:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise HandOver(f"a {type(tensor).__name__} is a constant")
            if tensor.requires_grad:
                raise HandOver("a constant requires grad")
            name = f"tensor_constant{len(self._constants)}"
            self._module.register_buffer(name, tensor)
            node = self._root.get_attr(name)  # even if a body is the first to read it
            node.meta = {"val": tensor, "partitioner_tag": self.tag}
            self._constants[id(tensor)] = (tensor, node)
        return self._constants[id(tensor)][1]

    def _arguments(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, tuple | list):
            return type(value)(map(self._arguments, value))
        if isinstance(value, dict):
            return {name: self._arguments(item) for name, item in value.items()}
        if isinstance(value, torch.SymInt):
            return Symbolic(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise HandOver(f"argument {value} depends on sizes and is no integer")
        return value


_LONGEST_CHAIN = 20  # of calls that are compared


class _Numbered(NamedTuple):
    number: int


def _is_pure(target: Any) -> bool:
    if target is operator.getitem:
        return True
    is_operator = isinstance(target, OpOverload) and bool(schema(target).returns)
    return is_operator and torch.Tag.nondeterministic_seeded not in target.tags


def _with_integers(func: Any, args: tuple, result: Any) -> tuple:
    """Put integers in place of floats that are integers (sizes) where that changes nothing."""
    operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
    is_same = (
        torch.Tag.pointwise in func.tags
        and isinstance(result, Leaf)
        and all(operand.is_floating_point() for operand in operands)
    )
    if not is_same:
        raise HandOver(f"{func} has an argument that depends on sizes and is no integer")
    return tuple(torch.sym_int(arg) if type(arg) is torch.SymFloat else arg for arg in args)


_given = threading.local()  # `line`: the line of a graph that has replaced the user's code


def at_line(line: Line | None) -> contextlib.AbstractContextManager[None]:
    """Set the user's line that runs in the block, where no Python frame shows it."""
    return set_here(_given, "line", line)


_NOT_GIVEN = object()


def _line(frame: FrameType | None) -> Line | None:
    """Give the user's line that runs; None where only torch's own run."""
    given = getattr(_given, "line", _NOT_GIVEN)
    if given is not _NOT_GIVEN:
        return given
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OUR_FOLDER) and not name.startswith(_BETWEEN):
            break  # the caller of torch_ort
        if not name.startswith((TORCH_FOLDER, OUR_FOLDER, "<")):
            return Line(name, frame.f_lineno)
        frame = frame.f_back
    return None
