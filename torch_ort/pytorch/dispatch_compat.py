"""Private names of torch for recordings: functionalization, tensor wrappers, symbolic sizes.

Each has a test in tests/pytorch/test_dispatch_compat.py, which fails when torch changes it.
"""

from __future__ import annotations

import abc
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch_ort import _C
from torch_ort.core.user_code import OUR_FOLDER, TORCH_FOLDER
from torch_ort.pytorch import patches, patching
from torch_ort.pytorch.private import (
    DispatchKey,
    FakeTensor,
    FakeTensorMode,
    _disabled_torch_function_impl,
    enable_python_dispatcher,
    no_python_dispatcher,
)
from torch_ort.pytorch.size_compat import NodeOfSizes

__all__ = [
    "RESIZING",
    "Leaf",
    "WithoutNumbers",
    "dropout_passes_through",
    "enable_python_dispatcher",
    "fakes",
    "functionalization",
    "functionalized",
    "has_gradient",
    "is_base",
    "is_differentiable_view",
    "is_functionalized",
    "is_one_of_several_views",
    "is_written",
    "layers_taken_apart",
    "nothing_compiled",
    "operators_whole",
    "outside_inference_mode",
    "parameters_made",
    "plain_functions",
    "shape_questions_answered",
    "sizes_seen_as_numbers",
    "sparse_gradients_whole",
    "storage_key",
    "unwrapped",
    "viewed",
    "viewed_again",
    "without_numbers",
    "without_saved_tensor_hooks",
]


class Leaf(torch.Tensor):
    """A tensor of a recording: sizes, strides, dtype and device, but no numbers.

    Operators never see one: they are answered by the recorder's mode.
    """

    __torch_function__ = _disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, sizes: Sequence[Any], strides: Sequence[Any], dtype: torch.dtype, device: torch.device
    ) -> Leaf:  # fmt: skip
        """Make one."""
        return torch.Tensor._make_wrapper_subclass(
            cls, sizes, strides=strides, dtype=dtype, device=device
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:  # fmt: skip
        """Refuse a call outside of the recording."""
        raise _C.Unsupported(f"{func}: called during capture with a tensor that has no data")


def without_numbers(kind: type[torch.Tensor], like: torch.Tensor, dtype: torch.dtype) -> Any:
    """Give a tensor of a subclass, with no memory, of another one's sizes and device."""
    return torch.Tensor._make_wrapper_subclass(kind, like.shape, dtype=dtype, device=like.device)


def plain_functions() -> Any:
    """Give a context in which `__torch_function__` of subclasses is not called."""
    return torch._C.DisableTorchFunctionSubclass()


@contextmanager
def functionalization() -> Iterator[None]:
    """Run what writes into tensors as operators that give new ones; views stay views."""
    before = torch._C._functionalization_reapply_views_tls()
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()
        torch._functionalize_enable_reapply_views(before)  # for the recording around this one


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Capture code of inference mode in the block as code that runs without gradients.

    Inference mode leaves out what takes operators apart that are made of others. Whole, they may
    give what they were given, as dropout does in eval mode, which their schemas do not say.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def dropout_passes_through() -> Iterator[None]:
    """Let a dropout that does nothing give its argument, as in eager PyTorch.

    PyTorch's own traces make a copy, so that what is written into the one is not in the other.
    """
    dropout = torch.ops.aten.dropout.default
    theirs = patches.KERNELS.of(dropout)
    ours = {key: _passing_through(kernel) for key, kernel in theirs.items()}
    with patches.KERNELS.by({dropout: ours}):
        yield


def _passing_through(theirs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def dropout(tensor: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
        return theirs(tensor, p, train) if train and p != 0 else tensor

    return dropout


@contextmanager
def operators_whole() -> Iterator[None]:
    """Let operators be called, forward and backward, that PyTorch's traces compute in Python.

    What they make of them reads memory many times where a kernel does once, and gives NaN where
    an infinity meets a weight of zero. Layers of LSTMs, which they have to take apart, get states
    as their kernels give them.
    """
    aten = torch.ops.aten
    ours: dict[Any, dict] = {operator: {} for operator in _WITH_KERNELS}
    for name in RESIZING:
        whole, sized = getattr(aten, name).default, getattr(aten, name).vec
        ours[whole] = {}
        theirs = patches.KERNELS.of(sized)
        ours[sized] = {key: _with_sizes(whole, kernel) for key, kernel in theirs.items()}
    if not patches.KERNELS.of(aten.one_hot.default):  # its kernel reads numbers before torch 2.13
        ours[aten.one_hot.default] = {DispatchKey.CompositeImplicitAutograd: _one_hot}
    with patches.KERNELS.by(ours), patches.LSTM_LAYER.by(_lstm_layer):
        yield


@contextmanager
def layers_taken_apart() -> Iterator[None]:
    """Let a layer be several operators that, without gradients, eager PyTorch computes by one.

    In parts it gets the engine's products, attention and regions.
    """
    layer = torch.ops.aten._transformer_encoder_layer_fwd.default
    ours = {key: functools.partial(_encoder_layer, layer, key) for key in _FIRST}
    with patches.KERNELS.by({layer: {**patches.KERNELS.of(layer), **ours}}):
        yield


@contextmanager
def operators_taken_apart(parts: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Let operators without gradients be functions of others, where these do not decline.

    A function that gives NotImplemented leaves a call to its operator.
    """
    ours = {
        operator: {
            **patches.KERNELS.of(operator),
            **{key: functools.partial(_in_parts, operator, function, key) for key in _FIRST},
        }
        for operator, function in parts.items()
    }
    with patches.KERNELS.by(ours):
        yield


def _in_parts(
    operator: Any, function: Callable[..., Any], key: Any, *args: Any, **kwargs: Any
) -> Any:
    made = function(*args, **kwargs)
    return operator._op_dk(key, *args, **kwargs) if made is NotImplemented else made


def _encoder_layer(operator: Any, key: Any, *args: Any) -> torch.Tensor:
    """Compute what an encoder layer of torch.nn does in eval mode, [batch, length, width]."""
    linear, layer_norm = torch.nn.functional.linear, torch.nn.functional.layer_norm
    x, width, heads, qkv_weight, qkv_bias, out_weight, out_bias, *rest = args
    use_gelu, norm_first, eps, *rest = rest
    weights, masks = rest[:8], [each for each in rest[8:] if each is not None]
    # A width that is a symbol would have to be a constant, which Dynamo has not seen in the layer.
    is_plain = not x.is_nested and x.dim() == _BATCH_OF_SEQUENCES and isinstance(x.shape[2], int)
    if masks or not is_plain:
        return operator._op_dk(key, *args)
    norms, (up, up_bias, down, down_bias) = (weights[:2], weights[2:4]), weights[4:]
    batch, length, _ = x.shape

    def normalize(x: torch.Tensor, which: int) -> torch.Tensor:
        return layer_norm(x, (width,), *norms[which], eps)

    def attend(x: torch.Tensor) -> torch.Tensor:
        parts = linear(x, qkv_weight, qkv_bias).view(batch, length, 3, heads, width // heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return linear(mixed.transpose(1, 2).reshape(batch, length, width), out_weight, out_bias)

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        x = linear(x, up, up_bias)
        x = torch.nn.functional.gelu(x) if use_gelu else torch.relu(x)
        return linear(x, down, down_bias)

    if norm_first:
        x = x + attend(normalize(x, 0))
        x = x + feed_forward(normalize(x, 1))
    else:
        x = normalize(x + attend(x), 0)
        x = normalize(x + feed_forward(x), 1)
    return x.contiguous()  # whatever the layout of what was given


_BATCH_OF_SEQUENCES = 3  # dims


@contextmanager
def sparse_gradients_whole() -> Iterator[None]:
    """Let an operator of ours give a sparse gradient where PyTorch's formula would make one."""
    ours = {
        operator: {
            **patches.KERNELS.of(operator),
            **{key: functools.partial(kernel, operator, key) for key in keys},
        }
        for operator, (kernel, keys) in _OF_SPARSE.items()
    }
    with patches.KERNELS.by(ours):
        yield


def _embedding_backward(
    operator: Any, key: Any, gradient: torch.Tensor, indices: torch.Tensor, num_weights: Any,
    padding_idx: Any, scale: bool, is_sparse: bool,
) -> torch.Tensor:  # fmt: skip
    given = (gradient, indices, num_weights, padding_idx, scale)
    if is_sparse:
        return torch.ops.torch_ort.sparse_embedding_backward(*given)
    return operator._op_dk(key, *given, is_sparse)


def _embedding_bag_backward(
    operator: Any, key: Any, gradient: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor,
    bags: torch.Tensor, sizes: torch.Tensor, largest: torch.Tensor, num_weights: Any, scale: bool,
    mode: int, is_sparse: bool, weights: torch.Tensor | None, padding_idx: int = -1,
) -> torch.Tensor:  # fmt: skip
    given = (gradient, indices, offsets, bags, sizes, largest, num_weights, scale, mode)
    if is_sparse:
        return torch.ops.torch_ort.sparse_embedding_bag_backward(*given, weights, padding_idx)
    return operator._op_dk(key, *given, is_sparse, weights, padding_idx)


def _gather_backward(
    operator: Any, key: Any, gradient: torch.Tensor, source: torch.Tensor, dim: int,
    index: torch.Tensor, is_sparse: bool,
) -> torch.Tensor:  # fmt: skip
    if is_sparse:
        return torch.ops.torch_ort.sparse_gather_backward(gradient, source, dim, index)
    return operator._op_dk(key, gradient, source, dim, index, is_sparse)


_COMPOSED = [DispatchKey.CompositeImplicitAutograd]
_FIRST = [DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA]
_OF_SPARSE = {
    torch.ops.aten.embedding_backward.default: (_embedding_backward, _COMPOSED),
    torch.ops.aten._embedding_bag_backward.default: (_embedding_bag_backward, _FIRST),
    torch.ops.aten.gather_backward.default: (_gather_backward, _COMPOSED),
}


def _one_hot(labels: torch.Tensor, num_classes: Any = -1) -> torch.Tensor:
    if isinstance(num_classes, int) and num_classes < 0:
        with no_python_dispatcher():
            return torch.ops.aten.one_hot.default(labels, num_classes)
    check = torch.ops.aten._assert_async.msg
    check((labels >= 0).all(), "Class values must be non-negative.")
    check((labels < num_classes).all(), "Class values must be smaller than num_classes.")
    classes = torch.arange(num_classes, dtype=torch.int64, device=labels.device)
    return (labels.unsqueeze(-1) == classes).to(torch.int64)


def _lstm_layer(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output, states = theirs(*args, **kwargs)
    return output, tuple(state.squeeze(0) if state.dim() > 2 else state for state in states)


_WITH_KERNELS = (
    torch.ops.aten.hardshrink.default,
    torch.ops.aten.softshrink.default,
    torch.ops.aten.multi_margin_loss.default,
    torch.ops.aten.multilabel_margin_loss_forward.default,
)
RESIZING = (
    *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
    *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
)  # fmt: skip


def _with_sizes(whole: Any, theirs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Give an operator that takes sizes or factors; what C++ has for it knows no symbolic sizes."""

    def resize(
        image: torch.Tensor, sizes: Sequence[Any] | None, *rest: Any
    ) -> torch.Tensor:  # fmt: skip
        *corners, factors = rest
        given = image.shape[2:]
        if (sizes is None) == (factors is None) or len(sizes or factors) != len(given):
            return theirs(image, sizes, *rest)  # raises PyTorch's error
        if sizes is None:
            sizes = [_times(n, factor) for n, factor in zip(given, factors, strict=True)]
        return whole(image, sizes, *corners, *(factors or [None] * len(given)))

    return resize


def _times(size: Any, factor: float) -> Any:
    """Give a size times a factor, as an integer; exact where the factor is a fraction of bits."""
    numerator, denominator = float(factor).as_integer_ratio()
    if denominator <= _MOST_PARTS:
        return size * numerator // denominator
    return torch.sym_int(size * factor)


_MOST_PARTS = 1024  # so that products with it are exact in floating point


def parameters_made() -> AbstractContextManager[None]:
    """Let the code of a recording make parameters."""
    return patches.SUBCLASS.by(_make_subclass)


def _make_subclass(
    theirs: Any, kind: type, data: torch.Tensor, *settings: Any, **others: Any
) -> torch.Tensor:
    if kind is not torch.nn.Parameter or not is_functionalized(data):
        return theirs(kind, data, *settings, **others)
    made = data.detach().requires_grad_(*settings)
    _C.forbid_numbers(made)
    made._is_param = True  # isinstance() uses this
    return made


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Let autograd save as it does without the hooks that are active now."""
    hooks = torch._C._autograd
    taken = []
    while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(pair)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(taken):
            hooks._push_saved_tensors_default_hooks(*pair)


def nothing_compiled() -> AbstractContextManager[None]:
    """Refuse `torch.compile` in this thread."""
    return patches.COMPILE.by(_refuse_to_compile)


def _refuse_to_compile(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    raise _C.Unsupported("torch.compile: called while a graph is captured")


def is_written(tensor: torch.Tensor) -> bool:
    """Tell whether the memory of a wrapped tensor has been written into."""
    return torch._functionalize_has_data_mutation(tensor)


def functionalized(leaf: torch.Tensor, is_parameter: bool = False) -> torch.Tensor:
    """Wrap a tensor, so that writing into it becomes an operator."""
    wrapped = torch._to_functional_tensor(leaf)
    _C.forbid_numbers(wrapped)
    if is_parameter:
        wrapped._is_param = True  # isinstance() uses this
    return wrapped


class WithoutNumbers(TorchFunctionMode):
    """Refuses what asks wrapped tensors for numbers, in Python and in foreign C++.

    Operators never do: the recorder answers them. `packed` and `reshaped` have what came of tensors
    without a copy because of how these lie in memory: as they are, or in another shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[torch.Tensor] = []
        self.reshaped: list[torch.Tensor] = []
        self.is_adding_windows = False  # a function runs that adds windows which overlap

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:  # fmt: skip
        """Call a function of torch's."""
        if func in _GIVE_NUMBERS and is_functionalized(args[0]):
            name = getattr(func, "__name__", str(func))
            raise _C.Unsupported(
                f"Tensor.{name}: called during capture, where tensors have no data"
            )
        if func in _ADD_WINDOWS:
            return self._add_windows(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if is_functionalized(result):
            _C.forbid_numbers(result)
            if func in _PACK or func in _RESHAPE:
                (given,) = args[:1] or (kwargs["input"],)
                if storage_key(result) == storage_key(given):
                    (self.packed if func in _PACK else self.reshaped).append(result)
        elif type(result) in (tuple, list):
            for item in result:
                if is_functionalized(item):
                    _C.forbid_numbers(item)
        return result

    def _add_windows(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        for given in (*args, *kwargs.values()):
            if is_functionalized(given):
                torch._sync(given)  # what was written into windows of it comes before
        self.is_adding_windows = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.is_adding_windows = False
        _C.forbid_numbers(result)
        return result


_ADD_WINDOWS = {torch.istft, torch.Tensor.istft}
_GIVE_NUMBERS = {
    torch.Tensor.numpy,
    torch.Tensor.data_ptr,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.tolist,
}

_PACK = {torch.Tensor.contiguous, torch.Tensor.ravel, torch.ravel}
_RESHAPE = {
    torch.Tensor.reshape, torch.Tensor.reshape_as, torch.Tensor.flatten,
    torch.reshape, torch.flatten,
}  # fmt: skip


def is_functionalized(value: Any) -> bool:
    """Tell whether a value is a wrapped tensor."""
    return isinstance(value, torch.Tensor) and torch._is_functional_tensor(value)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Give the value of a wrapped tensor after all writes into it."""
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor)


def is_base(tensor: torch.Tensor) -> bool:
    """Tell whether a wrapped tensor is no view of another."""
    return not torch._C._functionalization.get_view_meta_sequence(tensor)


def viewed(tensor: torch.Tensor) -> torch.Tensor:
    """Give the tensor of which autograd takes another for a view; itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def is_one_of_several_views(tensor: torch.Tensor) -> bool:
    """Tell whether an operator gave a wrapped tensor and others, which autograd forbids to edit."""
    return torch._functionalize_is_multi_output_view(tensor)


def viewed_again(tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Make the view that a wrapped tensor is of its base, of another base."""
    functions = torch._C._functionalization
    with torch.no_grad():
        return functions.apply_view_meta_sequence(base, functions.get_view_meta_sequence(tensor))


def has_gradient(tensor: torch.Tensor) -> bool:
    """Tell whether autograd watches a tensor; a view made without it says so, but has no node."""
    return tensor.requires_grad and (tensor._base is None or tensor.grad_fn is not None)


def is_differentiable_view(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Tell whether all that autograd does between a base and its view is to view."""
    if tensor._base is not base or tensor._backward_hooks:
        return False
    node = tensor.grad_fn
    while node is not None and node is not base.grad_fn:
        if getattr(node, "variable", None) is base:  # AccumulateGrad of a leaf
            return True
        is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        if is_custom or type(node).__name__ == "CppFunction" or not node.next_functions:
            return False
        node = node.next_functions[0][0]
    return node is not None


def storage_key(tensor: torch.Tensor) -> int:
    """Tell the memory of tensors apart."""
    return tensor.untyped_storage()._cdata


@contextmanager
def fakes() -> Iterator[Callable[..., torch.Tensor]]:
    """Run operators on PyTorch's fakes in the block; gives a function that makes one.

    It takes sizes, strides, dtype and device.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # the cache would ask for sizes that ours do not have

    def make(sizes: Any, strides: Any, dtype: torch.dtype, device: torch.device) -> FakeTensor:
        meta = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
        return FakeTensor(mode, meta, device)

    with mode:
        yield make


@contextmanager
def shape_questions_answered() -> Iterator[None]:
    """Answer what PyTorch's Python asks about sizes that are ours."""
    with ExitStack() as stack:
        for question, answer in _ANSWERS.items():
            stack.enter_context(question.by(functools.partial(_for_our_sizes, answer)))
        stack.enter_context(patches.SYMBOLS_OF_DATA.by(_no_symbols))
        stack.enter_context(patches.LIES_LIKE_IMAGES.by(_lies_like_images))
        stack.enter_context(patches.FLOOR_DIVISION.by(_pooled_size))
        stack.enter_context(patches.EXPANDED_SIZES.by(_expanded_sizes))
        stack.enter_context(patches.SYM_SUM.by(_sym_sum))
        for division in (patches.FLOOR_OF_FLOAT, patches.FLOOR_OF_INTEGER):
            stack.enter_context(division.by(_floor_division))
        for division in (patches.FLOOR_BY_FLOAT, patches.FLOOR_BY_INTEGER):
            stack.enter_context(division.by(_floor_division_by))
        stack.enter_context(sizes_seen_as_numbers())
        stack.enter_context(patches.TRUNC.by(_trunc))
        stack.enter_context(patches.UNSEEN_SIZES.by(True))
        yield


def _for_our_sizes(ours: Any, theirs: Any, asked: Any, *args: Any, **kwargs: Any) -> Any:
    node = getattr(asked, "node", asked)
    if isinstance(node, NodeOfSizes):
        return ours(asked)
    return theirs(asked, *args, **kwargs)


def _lies_like_images(theirs: Any, sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Tell by the sizes of this call; calls are compared by the order of an input's dims."""
    return theirs(
        *([_for_our_sizes(_C.size_value, int, n) for n in each] for each in (sizes, strides))
    )


def _never_disproves(asked: Any) -> bool:
    return False


def _has_hint(asked: Any) -> bool:
    return True


_ANSWERS = {
    patches.KNOWN_CONDITION: _C.known_condition,
    patches.HINT_DISPROVES: _never_disproves,
    patches.HINT_OF_GUARD: _C.size_value,
    patches.HINT_OF_SIZE: _C.size_value,
    patches.HAS_HINT: _has_hint,
}


def _no_symbols(theirs: Any, asked: Any) -> frozenset:
    return frozenset()  # a recording knows the value of every size


def _expanded_sizes(theirs: Any, *shapes: Sequence[Any]) -> Any:
    has_symbols = any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)
    return torch.broadcast_shapes(*shapes) if has_symbols else theirs(*shapes)


def _pooled_size(theirs: Any, size: Any, divisor: int) -> Any:
    return size // divisor


@contextmanager
def sizes_seen_as_numbers() -> Iterator[None]:
    """Let the user's program see numbers in symbols: their texts, their classes, and rounded."""
    with ExitStack() as stack:
        for text, kind in ((patches.TEXT_OF_SIZE, int), (patches.TEXT_OF_TRUTH, bool)):
            stack.enter_context(text.by(functools.partial(_text_of_number, kind)))
        for equality, is_equal in _EQUALITIES.items():
            stack.enter_context(equality.by(functools.partial(_compared, is_equal)))
        stack.enter_context(patches.ROUNDED_INTEGER.by(_rounded))
        for attributes, kind in _CLASSES.items():
            stack.enter_context(attributes.by(functools.partial(_attribute, kind)))
        yield


def _text_of_number(kind: type, theirs: Any, number: Any) -> str:
    """Give the text of a number to the user's program, and of an expression to messages."""
    return repr(kind(number)) if _is_asked_by_program() else theirs(number)


_EQUALITIES = {
    patches.EQUAL_INTEGER: True, patches.EQUAL_FLOAT: True,
    patches.UNEQUAL_INTEGER: False, patches.UNEQUAL_FLOAT: False,
}  # fmt: skip


def _compared(is_equal: bool, theirs: Any, number: Any, other: Any) -> Any:
    """Compare with numbers of classes that are derived from Python's, and with complex ones."""
    if isinstance(other, complex):
        if other.imag:
            return not is_equal
        other = other.real
    for kind in (int, float):
        if isinstance(other, kind) and type(other) not in (int, float, bool):
            return theirs(number, kind(other))
    return theirs(number, other)


_CLASSES = {
    patches.CLASS_OF_INTEGER: int, patches.CLASS_OF_FLOAT: float, patches.CLASS_OF_TRUTH: bool,
}  # fmt: skip


def _attribute(kind: type, theirs: Any, number: Any, name: str) -> Any:
    """Let numbers that the user's program has be of Python's kinds of numbers."""
    if name not in _PARTS[kind] or not _is_asked_by_program():
        return theirs(number, name)
    if name == "__class__":
        return kind
    is_itself = name in _ITSELF and kind is not bool
    return number if is_itself else getattr(kind(number), name)


# What Python's numbers have, and PyTorch's symbols do not; and their classes.
_ITSELF = ("real", "numerator")
_PARTS = {
    kind: {
        "__class__",
        *(n for n in dir(kind) if not n.startswith("__") and not hasattr(symbol, n)),
    }
    for kind, symbol in ((int, torch.SymInt), (float, torch.SymFloat), (bool, torch.SymBool))
}  # fmt: skip


def _is_asked_by_program() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    folders = (TORCH_FOLDER, OUR_FOLDER)
    return frame is not None and not frame.f_code.co_filename.startswith(folders)


# What stands between the program and a patch: `isinstance` asks abstract classes by code of Python.
_BETWEEN = (patching.__file__, abc.ABCMeta.__instancecheck__.__code__.co_filename)


def _sym_sum(theirs: Any, node: Any, others: Sequence[Any]) -> Any:
    total = others[0]
    for other in others[1:]:
        total = total.add(other)
    return total


def _floor_division(theirs: Any, number: Any, other: Any) -> Any:
    """Divide as Python does, where nodes of ours stand for numbers of the program."""
    made = _floats_divided(number, other, number, other)
    return theirs(number, other) if made is None else made


def _floor_division_by(theirs: Any, number: Any, other: Any) -> Any:
    made = _floats_divided(number, other, other, number)
    return theirs(number, other) if made is None else made


def _floats_divided(number: Any, other: Any, over: Any, under: Any) -> torch.SymFloat | None:
    """Give a rounded quotient, of which at least one is a float; None for other divisions."""
    is_float = any(isinstance(each, float | torch.SymFloat) for each in (number, other))
    is_number = isinstance(other, int | float | torch.SymInt | torch.SymFloat)
    node = number.node
    is_ours = isinstance(node, NodeOfSizes) or hasattr(node, "made")
    if not (is_float and is_number and is_ours):
        return None
    a, b = (
        node.wrap_float(float(each)) if isinstance(each, int | float) else each.node
        for each in (over, under)
    )
    return torch.SymFloat(a.floordiv(b))


def _rounded(theirs: Any, number: torch.SymInt, digits: int | None = None) -> Any:
    is_whole = digits is None or digits >= 0
    return theirs(number, digits) if is_whole else round(int(number), digits)


def _trunc(theirs: Any, node: Any) -> Any:
    held = _C.number_in(node)
    if held is not None:
        return held.made(math.trunc, held)
    number = _C.known_float(torch.SymFloat(node))
    return node.floor() if number is None else node.wrap_int(int(number))
