"""The table of everything that the package replaces in torch or adds to it.

`TABLE` has a row for each: where, why, in which versions of torch, for whom, and why it stays where
it does. Nothing else assigns to objects of torch's (tests/style/test_patches.py). How rows are put
in place and undone, so that a thread that compiles with another backend meanwhile gets what it
would get without us, is patching.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_ort.pytorch import versions
from torch_ort.pytorch.patching import (
    Addition,
    Answer,
    Elsewhere,
    Function,
    MethodOfC,
    Names,
    OperatorKernels,
    Patch,
    Registry,
    Scope,
    Setting,
    UnseenMethod,
    Value,
)

COMPILE = Function(
    "torch:compile",
    "Operators that take graphs call it, and what Dynamo has once failed on it never compiles "
    "again; a recording has no tensors that it could look at.",
)
KNOWN_CONDITION = Function(
    "torch.fx.experimental.symbolic_shapes:_static_eval_sym_bool",
    "PyTorch's Python asks what is known of sizes; those of a recording are C++'s.",
)
HINT_DISPROVES = Function(
    "torch.fx.experimental.symbolic_shapes:_sym_node_hint_disproves",
    "As above: whether the value in this call rules a condition out.",
    since="2.13",
)
HINT_OF_GUARD = Function(
    "torch.fx.experimental.symbolic_shapes:guarding_hint_or_throw",
    "As above: the value in this call.",
    since="2.12",
)
HINT_OF_SIZE = Function(
    "torch.fx.experimental.symbolic_shapes:size_hint",
    "As above, under the name that it had before.",
    until="2.12",
)
HAS_HINT = Function(
    "torch.fx.experimental.symbolic_shapes:has_guarding_hint",
    "As above: whether there is one.",
    since="2.12",
)
SYMBOLS_OF_DATA = Function(
    "torch.fx.experimental.symbolic_shapes:free_unbacked_symbols",
    "As above: which sizes are data-dependent; a recording has an example value of each.",
)
LIES_LIKE_IMAGES = Function(
    "torch._prims_common:are_strides_like_channels_last_or_false",
    "As above: whether strides are those of images with channels last, which it takes for unknown.",
)
FLOOR_DIVISION = Function(
    "torch._meta_registrations:div_rtn",
    "As above: sizes of pooled images are divided as Python does. Some versions of torch look at "
    "the remainder too, so that a graph would serve odd sizes or even ones alone.",
)
EXPANDED_SIZES = Function(
    "torch.nn.functional:_infer_size",
    "It takes no symbols; the loss that calls it expands its weights.",
    until="2.13",
)
SYM_SUM = Addition(
    "torch._C:_SymNode.sym_sum",
    "PyTorch's Python calls it on the nodes of sizes, and those of C++ lack it.",
)
TRUNC = Addition("torch._C:_SymNode.trunc", "As above.")
LSTM_LAYER = Function(
    "torch._decomp.decompositions:one_layer_lstm",
    "Before torch 2.13, its states have a dim more than those of the kernel.",
)
UNSEEN_SIZES = Setting(
    "torch.fx.experimental._config:backed_size_oblivious",
    "A recording is one for all sizes, 0 and 1 among them; a trace of AOTAutograd's is not.",
    scope=Scope.CONTEXT,
)
BACKWARD_AUTOCAST = Setting(
    "torch._functorch.config:backward_pass_autocast",
    "AOTAutograd traces backward under forward's autocast, and eager PyTorch runs it outside.",
    scope=Scope.CONTEXT,
)
FLOOR_OF_FLOAT = Function(
    "torch:SymFloat.__floordiv__",
    "PyTorch rounds the quotient down, which may have been rounded up to an integer: 1.0 // 0.1 is "
    "9.0 in Python.",
)
FLOOR_BY_FLOAT = Function("torch:SymFloat.__rfloordiv__", "As above.")
FLOOR_OF_INTEGER = Function("torch:SymInt.__floordiv__", "As above, of integers by floats.")
FLOOR_BY_INTEGER = Function("torch:SymInt.__rfloordiv__", "As above.")
ROUNDED_INTEGER = Function(
    "torch:SymInt.__round__", "PyTorch leaves an integer as it is: round(14, -1) is 10 in Python."
)
TEXT_OF_SIZE = Function(
    "torch:SymInt.__repr__",
    "The user's program may do anything with the text of a size, so it is the text of the number.",
)
TEXT_OF_TRUTH = Function("torch:SymBool.__repr__", "As above, of what compares sizes.")
EQUAL_INTEGER = Function(
    "torch:SymInt.__eq__",
    "PyTorch finds no number equal to one of another class, as members of an enum.IntEnum are.",
)
UNEQUAL_INTEGER = Function("torch:SymInt.__ne__", "As above.")
EQUAL_FLOAT = Function("torch:SymFloat.__eq__", "As above.")
UNEQUAL_FLOAT = Function("torch:SymFloat.__ne__", "As above.")
CLASS_OF_INTEGER = Function(
    "torch:SymInt.__getattribute__",
    "The user's program may ask what kind of object a size is, or a number of the call: by "
    "isinstance, which asks the object for its class, or for what such numbers have.",
)
CLASS_OF_FLOAT = Function("torch:SymFloat.__getattribute__", "As above.")
CLASS_OF_TRUTH = Function("torch:SymBool.__getattribute__", "As above.")
KERNELS = OperatorKernels(
    "torch.ops:aten.*.py_kernels",
    "PyTorch's traces compute some operators in Python that we want whole, and copy what a dropout "
    "that does nothing was given.",
)
SUBCLASS = Function(
    "torch:Tensor._make_subclass",
    "A parameter that forward makes has no numbers in a recording: PyTorch's C++ cannot detach it.",
)
MODULE_READS = UnseenMethod(
    "torch.nn:Module.__getattribute__",
    "What forward reads of its modules is baked into a capture, and compared by later calls.",
)
MODULE_CALLS = Function(
    "torch.nn:Module.__call__",
    "Calls of modules that no graph can make become nodes of a capture.",
)
SCRIPT_METHOD = Function(
    "torch._C:ScriptMethod.__call__",
    "TorchScript's interpreter knows no symbols for sizes: scripts are replayed call by call.",
)
SCRIPT_FUNCTION = Function("torch._C:ScriptFunction.__call__", "As above.")
FUNCTION_APPLY = MethodOfC(
    "torch._C:_FunctionBase.apply",
    "Calls of torch.autograd.Functions become nodes of a capture. All ways to `apply` come through "
    "this method, names that a program has bound earlier included.",
)


def _ask_is_compiling() -> bool:
    from torch_ort.pytorch import patches

    return patches.IS_COMPILING.answer()


IS_COMPILING = Answer(
    "torch.compiler:is_compiling.__code__",
    "Modules that ask leave out what looks at numbers. The flag that it gives is the process's.",
    _ask_is_compiling,
)
GENERATOR = Value(
    "torch.random:default_generator",
    "Who sets it in a capture is noted, and it stays as it is.",
)
CUDA_GENERATORS = Value("torch.cuda:default_generators", "As above.")
FAKE_TENSOR_LOG = Function(
    "torch._subclasses.fake_tensor:log.filter",
    "What is wrong with a call in a capture is raised, by eager PyTorch if it is the user's.",
)
PASSED_OVER = Function(
    "torch._dynamo.convert_frame:compile_frame",
    "Tells why Dynamo passes over a function, as long as that is compiled for our backend.",
    until="2.13",
)
GUARD_LATENCY = Function(
    "torch._dynamo.guards:profile_guard_manager",
    "Dynamo empties all caches before it times the guards of a graph, for a line of its debug log. "
    "That took a quarter of the time in which a small model is compiled.",
)
COMPUTED_SIZES = Function(
    "torch.fx.experimental.proxy_tensor:_sym_register",
    "A trace takes a size that it has computed, and which is an input's, for what computes that "
    "input's: sizes of the parts of distributed tensors are computed of themselves then, without "
    "end.",
    since="2.13",
)
RECOMPILE_LIMIT = Function(
    "torch._dynamo.convert_frame:exceeds_recompile_limit",
    "Tells when Dynamo gives up compiling a function of ours again.",
    scope=Scope.PROCESS,
    stays="It is asked in calls of compiled functions, of which there may be one at any time; it "
    "comes with our backend, which a program that compiles for others does not import.",
)
FRAMES = Function(
    "torch._dynamo.convert_frame:ConvertFrameAssert.__call__",
    "Tells what Dynamo leaves to eager PyTorch of functions that are compiled for our backend.",
    scope=Scope.PROCESS,
    stays="As above.",
)
COMPILED_CALLS = Function(
    "torch._dynamo.eval_frame:OptimizeContext.__call__",
    "Watches calls of functions that are compiled for our backend.",
    scope=Scope.PROCESS,
    stays="As above.",
)
ASSIGNED_FORWARD = Function(
    "torch._dynamo.eval_frame:OptimizedModule.__setattr__",
    "Watches calls of a function that is assigned to `forward` of a module which is compiled for "
    "our backend: it runs in its place.",
    scope=Scope.PROCESS,
    stays="As above.",
)


def _ask_to_register(
    compiler_fn: Any = None, name: str | None = None, tags: Sequence[str] = ()
) -> Any:  # fmt: skip
    from torch_ort.pytorch import patches

    return patches.BACKENDS.register(compiler_fn, name, tags)


BACKENDS = Registry(
    "torch._dynamo.backends.registry:register_backend.__code__",
    "Threads that compile for the first time at once would each register our backend, which is an "
    "error for all but one.",
    _ask_to_register,
    scope=Scope.PROCESS,
    stays="Such a thread may come at any time; other backends' go on to torch's own.",
)
LOGGER_CALLS = Function(
    "torch._dynamo.variables.misc:LoggingLoggerVariable.call_method",
    "Dynamo breaks a graph where a logger is called; what is said once in a process may be said "
    "in a capture.",
)
RECURRENT_MODULES = Setting(
    "torch._dynamo.config:allow_rnn",
    "Dynamo refuses modules of recurrent layers, which the engine has kernels for.",
    scope=Scope.CONTEXT,
)
WRAPPED_MODULES = Function(
    "torch._dynamo.variables.builder:VariableBuilder.wrap_module",
    "As above: which modules these are.",
)
FUNCTIONS_IN_GRAPHS = Function(
    "torch._dynamo.variables.torch:TorchInGraphFunctionVariable.call_function",
    "Dynamo writes a recurrent layer as operators for each position of the sequence; one graph is "
    "to serve all lengths.",
)
INTEGERS_OF_MODULES = Setting(
    "torch._dynamo.config:allow_unspec_int_on_nn_module",
    "A counter in an attribute of a module is no constant of a function that is compiled for our "
    "backend, once it has changed.",
    scope=Scope.CONTEXT,
)
SIZES_OF_DATA = Setting(
    "torch._dynamo.config:capture_dynamic_output_shape_ops",
    "The recorder takes sizes that data tells, as those of a boolean mask, so that no graph has to "
    "break there.",
    scope=Scope.CONTEXT,
)
INNER_GRADIENTS = Setting(
    "torch._dynamo.config:trace_autograd_ops",
    "The recorder takes gradients that are computed in the middle of a function, and their own "
    "gradients, so that no graph has to break there.",
    scope=Scope.CONTEXT,
)
BACKWARD_IN_GRAPHS = Function(
    "torch._dynamo.variables.tensor:TensorVariable.method_backward",
    "With that setting Dynamo writes `backward()` as gradients that it adds up, too, and fails in "
    "functions with an optimizer; the graph breaks there as it does without.",
)
SIZES_THAT_CHANGE = Setting(
    "torch._dynamo.config:automatic_dynamic_shapes",
    "Dynamo cannot trace batches of gradients of tensors whose sizes are symbols: each size has a "
    "graph of its own then.",
    scope=Scope.CONTEXT,
)
SPECIALIZED_FLOATS = Setting(
    "torch._dynamo.config:specialize_float",
    "Dynamo cannot trace what Python computes of some floats that it takes for symbols, such as "
    "1 / 0.0, for which a program may have another branch: they are constants then.",
    scope=Scope.CONTEXT,
)
SPECIALIZED_INTEGERS = Setting(
    "torch._dynamo.config:specialize_int", "As above.", scope=Scope.CONTEXT
)
UNGUARDED_TENSORS = Setting(
    "torch._dynamo.config:skip_tensor_guards_with_matching_dict_tags",
    "Before torch 2.13, Dynamo does not see that requires_grad of a parameter has been switched.",
    scope=Scope.CONTEXT,
)
CHECKED_VALUES = Function(
    "torch:_is_all_true",
    "torch.distributions looks at the values of its arguments, unless Dynamo has been used in the "
    "process; a captured graph has none.",
)
LEFT_ALONE = Names(
    "torch._dynamo.trace_rules:add",
    "Dynamo is not to compile functions of ours, which autograd and kernels call.",
    scope=Scope.PROCESS,
    stays="Code of ours is never compiled.",
)
ALLOCATOR = Elsewhere(
    "c10:SetCPUAllocator",
    "Results of kernels that allocate them are made in their place of the plan "
    "(csrc/run/memory/placement.cpp). Threads that run no such kernel get torch's own memory.",
    scope=Scope.PROCESS,
    stays="It serves tensors that may outlive everything else; it comes with the first plan that "
    "places such a result.",
)

TABLE: tuple[Patch, ...] = tuple(row for row in list(globals().values()) if isinstance(row, Patch))


def note_missing() -> None:
    """Count those of what stays replaced that this torch lacks among its missing names."""
    for row in TABLE:
        path = row.target.replace(":", ".")
        is_lacking = row.stays and not isinstance(row, Elsewhere) and not row.exists
        if is_lacking and path not in versions.missing:
            versions.missing.append(path)
