"""What operators give, without running them: sizes, strides and dtype from those of the arguments.

PyTorch knows all of this itself, and `Recorder` asks it for operators that have no rule here. Rules
are for the operators that training graphs are made of: they take a tenth of the time, and decide of
symbolic sizes what the engine wants decided. A test runs every rule beside the real operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_ort import _C
from torch_ort.pytorch.dispatch_compat import RESIZING
from torch_ort.pytorch.graph_compat import schema

Size = int | torch.SymInt
aten = torch.ops.aten


class Spec(NamedTuple):
    """A tensor without numbers. Strides in elements."""

    sizes: list[Size]
    strides: list[Size]
    dtype: torch.dtype
    device: torch.device


def spec_of(tensor: torch.Tensor) -> Spec:
    """Give what is known of a tensor without its numbers."""
    return Spec(list(tensor.shape), list(tensor.stride()), tensor.dtype, tensor.device)


def empty(spec: Spec) -> torch.Tensor:
    """Make a tensor as a spec says."""
    return torch.empty_strided(spec.sizes, spec.strides, dtype=spec.dtype, device=spec.device)


class NoRule(Exception):
    """Raised by a rule for arguments that it does not cover."""


Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}


def find(operator: Any) -> Rule | None:
    """Give the rule of an operator: it takes the operator's arguments, tensors as `Spec`s.

    It gives a Spec, or a tuple or list of Specs (and None) as the operator gives tensors; it raises
    NoRule where PyTorch has to be asked.
    """
    rule = RULES.get(operator)
    if rule is None and torch.Tag.pointwise in operator.tags and _gives_one_tensor(operator):
        rule = RULES[operator] = functools.partial(_pointwise, operator)
    return rule


def _gives_one_tensor(operator: Any) -> bool:
    return [str(returned.type) for returned in schema(operator).returns] == ["Tensor"]


def rule_of(*operators: Any) -> Callable[[Rule], Rule]:
    """Register the rule of some operators."""

    def register(rule: Rule) -> Rule:
        for operator in operators:
            RULES[operator] = rule
        return rule

    return register


# Sizes.


def same(a: Size, b: Size) -> bool:
    """Tell whether sizes are equal whatever the symbols are."""
    if type(a) is int and type(b) is int:
        return a == b
    return a is b or _C.same_sizes([a], [b])


def equal(a: Size, b: Size) -> bool:
    """Tell whether sizes are equal in the recorded call; a guard where that depends on symbols."""
    return same(a, b) or bool(a == b)


def value(size: Size) -> int:
    """Give the size in the recorded call, without a guard."""
    return size if type(size) is int else _C.size_value(size)


def broadcast(a: Size, b: Size) -> Size:
    """Give the size of two dims together.

    Where one is 1 only by chance, the guard says 1: no other graph could be recorded.
    """
    if same(a, b) or (type(b) is int and b == 1):
        return a
    if type(a) is int and a == 1:
        return b
    value_a, value_b = value(a), value(b)
    if value_a != value_b and 1 in (value_a, value_b):
        one, other = (a, b) if value_a == 1 else (b, a)
        equal(one, 1)
        return other
    if not equal(a, b):
        raise NoRule
    return a


def broadcast_sizes(*shapes: Sequence[Size]) -> list[Size]:
    """Broadcast shapes."""
    rank = max(map(len, shapes))
    sizes = list(shapes[0])
    for shape in shapes[1:]:
        if _C.same_sizes(sizes, shape):
            continue
        padded = [1] * (rank - len(sizes)) + sizes
        other = [1] * (rank - len(shape)) + list(shape)
        sizes = [broadcast(a, b) for a, b in zip(padded, other, strict=True)]
    return sizes


def numel(sizes: Sequence[Size]) -> Size:
    """Give the product of sizes."""
    return functools.reduce(lambda a, b: a * b, sizes, 1)


def is_contiguous(spec: Spec) -> bool:
    """Tell whether strides are row-major, whatever the symbols are."""
    expected = _C.contiguous_strides(spec.sizes)
    return all(
        same(stride, want) or (type(size) is int and size == 1)
        for stride, want, size in zip(spec.strides, expected, spec.sizes, strict=True)
    )


def _at(dim: int, rank: int) -> int:
    """Count a dim from the front; one number without dims has dims 0 and -1, as has a row."""
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise NoRule  # PyTorch words the error
    return dim % max(rank, 1)


def _dims(dim: int | Sequence[int] | None, rank: int) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(rank))
    dims = [_at(d, rank) for d in ([dim] if isinstance(dim, int) else dim)]
    return dims if len({*dims}) == len(dims) else _no_rule()


def rows(sizes: Sequence[Size], like: Spec, dtype: torch.dtype | None = None) -> Spec:
    """Give a row-major tensor."""
    sizes = list(sizes)
    return Spec(sizes, _C.contiguous_strides(sizes), dtype or like.dtype, like.device)


def in_order(sizes: Sequence[Size], order: Sequence[int]) -> list[Size]:
    """Give strides of dims that lie in this order, the outermost first."""
    strides = _C.contiguous_strides([sizes[d] for d in order])
    result: list[Size] = [0] * len(order)
    for d, stride in zip(order, strides, strict=True):
        result[d] = stride
    return result


def kept_strides(spec: Spec) -> list[Size]:
    """Give the strides of a new tensor that keeps the layout of another (preserve_format)."""
    if is_contiguous(spec) or dense_order(spec) is not None:
        return spec.strides
    # With gaps or overlaps: as an elementwise operator orders its result.
    return in_order(spec.sizes, _order_of(spec.sizes, [spec]))


def dense_order(spec: Spec) -> list[int] | None:
    """Give the order of the dims in memory, outermost first; None if there are gaps or overlaps."""
    strides = [value(stride) for stride in spec.strides]
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    wanted = in_order(spec.sizes, order)
    fits = all(
        same(stride, want) or (type(size) is int and size == 1)
        for stride, want, size in zip(spec.strides, wanted, spec.sizes, strict=True)
    )
    return order if fits else None


# Elementwise.


def _order_of(sizes: Sequence[Size], operands: Sequence[Spec]) -> list[int]:
    """Order the dims of a new result as TensorIterator does: by the operands' strides.

    An insertion sort from the innermost dim, in which pairs that no operand decides stay.
    """
    rank = len(sizes)
    strides = []
    for operand in operands:
        missing = rank - len(operand.sizes)
        padded = [0] * missing
        for size, full, stride in zip(operand.sizes, sizes[missing:], operand.strides, strict=True):
            expanded = type(size) is int and size == 1 and not same(size, full)
            padded.append(0 if expanded else value(stride))
        strides.append(padded)
    values = [value(size) for size in sizes]

    def is_outer(a: int, b: int) -> int:
        """1 if dim a belongs outside of dim b, -1 inside, 0 undecided."""
        for row in strides:
            if row[a] == 0 or row[b] == 0:
                continue
            if row[a] != row[b]:
                return 1 if row[a] > row[b] else -1
            if values[a] > values[b]:
                return 1
        return 0

    inner_first = list(range(rank - 1, -1, -1))
    for i in range(1, rank):
        moving = i
        for j in range(i - 1, -1, -1):
            verdict = is_outer(inner_first[j], inner_first[moving])
            if verdict > 0:
                inner_first[j], inner_first[moving] = inner_first[moving], inner_first[j]
                moving = j
            elif verdict < 0:
                break
    return inner_first[::-1]


@functools.lru_cache(maxsize=4096)
def _pointwise_dtype(operator: Any, described: tuple, names: tuple) -> torch.dtype:
    """Ask PyTorch for the dtype of a result, with tensors of two numbers."""

    def argument(item: Any) -> Any:
        if isinstance(item, _Kind):
            return torch.empty([2] * item.rank, dtype=item.dtype, device="meta")
        return item

    values = [argument(item) for item in described]
    count = len(values) - len(names)
    with torch.no_grad():
        result = operator(*values[:count], **dict(zip(names, values[count:], strict=True)))
    return result.dtype


class _Kind(NamedTuple):
    dtype: torch.dtype
    rank: int  # 0 or 1: scalars do not promote


def _pointwise(operator: Any, *args: Any, **kwargs: Any) -> Spec:
    described, operands = [], []
    for item in (*args, *kwargs.values()):
        if isinstance(item, Spec):
            operands.append(item)
            described.append(_Kind(item.dtype, min(len(item.sizes), 1)))
        elif isinstance(item, torch.SymInt):
            described.append(2)
        elif isinstance(item, torch.SymFloat | torch.SymBool | list | tuple):
            raise NoRule
        else:
            # Of a float, only that it is one decides of dtypes.
            described.append(1.5 if type(item) is float else item)
    if not operands or kwargs.get("memory_format") is not None:
        raise NoRule
    dtype = _pointwise_dtype(operator, tuple(described), tuple(kwargs))
    device = _common_device(operands)
    first = operands[0]
    if len(operands) == 1:
        strides = _C.contiguous_strides(first.sizes) if is_contiguous(first) else None
        return Spec(first.sizes, strides or kept_strides(first), dtype, device)
    sizes = broadcast_sizes(*(spec.sizes for spec in operands))
    if all(not spec.sizes or is_contiguous(spec) for spec in operands):
        full = [spec for spec in operands if len(spec.sizes) == len(sizes)]
        if any(_C.same_sizes(spec.sizes, sizes) for spec in full):
            return Spec(sizes, _C.contiguous_strides(sizes), dtype, device)
    return Spec(sizes, in_order(sizes, _order_of(sizes, operands)), dtype, device)


def _row_major_pointwise(operator: Any, *args: Any, **kwargs: Any) -> Spec:
    spec = _pointwise(operator, *args, **kwargs)
    return spec._replace(strides=_C.contiguous_strides(spec.sizes))


# Unlike those of others, their kernels do not ask how the operands lie in memory.
for _operator in (
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.pow.Scalar, aten.mvlgamma.default,
):  # fmt: skip
    RULES[_operator] = functools.partial(_row_major_pointwise, _operator)


# Not tagged as what they are.
for _operator in (
    aten.hardshrink_backward.default, aten.softshrink_backward.default, aten.floor_divide.default,
):  # fmt: skip
    RULES[_operator] = functools.partial(_pointwise, _operator)


@rule_of(aten.threshold_backward.default)
def _threshold_backward(gradient: Spec, x: Spec, threshold: float) -> Spec:
    return _pointwise(aten.mul.Tensor, x, gradient)  # its kernel takes them in this order


@rule_of(aten.isin.Tensor_Tensor)
def _isin(x: Spec, tested: Spec, **options: bool) -> Spec:
    return rows(x.sizes, x, torch.bool)


@rule_of(aten.angle.default)
def _angle(x: Spec) -> Spec:
    if x.dtype.is_complex:
        return rows(x.sizes, x, x.dtype.to_real())
    return _pointwise(aten.angle.default, x)


def _common_device(specs: Sequence[Spec]) -> torch.device:
    """Give the device of a result: numbers on the CPU may be of another."""
    for spec in specs:
        if spec.sizes:
            return spec.device
    for spec in specs:
        if spec.device.type != "cpu":
            return spec.device
    return specs[0].device


def format_strides(sizes: Sequence[Size], memory_format: torch.memory_format) -> list[Size]:
    """Give the strides of a memory format."""
    if memory_format == torch.contiguous_format:
        return _C.contiguous_strides(list(sizes))
    if memory_format == torch.channels_last and len(sizes) == 4:
        return in_order(sizes, [0, 2, 3, 1])
    if memory_format == torch.channels_last_3d and len(sizes) == 5:
        return in_order(sizes, [0, 2, 3, 4, 1])
    raise NoRule


@rule_of(aten.clone.default, aten._to_copy.default)
def _to_copy(
    x: Spec, *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None,
    pin_memory: bool | None = None, non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Spec:  # fmt: skip
    if memory_format is None or memory_format == torch.preserve_format:
        strides = kept_strides(x)
    else:
        strides = format_strides(x.sizes, memory_format)
    return Spec(x.sizes, strides, dtype or x.dtype, _device(device, x.device))


def _device(device: Any, default: torch.device) -> torch.device:
    return default if device is None else torch.device(device)


@rule_of(
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.empty_like.default, aten.rand_like.default, aten.randn_like.default,
)  # fmt: skip
def _like(
    x: Spec, fill: Any = None, *, dtype: torch.dtype | None = None, layout: Any = None,
    device: Any = None, pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Spec:  # fmt: skip
    return _to_copy(x, dtype=dtype, device=device, memory_format=memory_format)


@rule_of(aten.resize_as.default)
def _resize_as(x: Spec, like: Spec, *, memory_format: torch.memory_format | None = None) -> Spec:
    if memory_format is not None or len(x.sizes) != len(like.sizes):
        raise NoRule
    if not all(map(equal, x.sizes, like.sizes)):
        raise NoRule
    return x._replace(strides=kept_strides(x))


@rule_of(aten.bernoulli.p)
def _bernoulli(x: Spec, p: float, generator: Any = None) -> Spec:
    return rows(x.sizes, x)


@rule_of(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def _normal(mean: Spec | float, std: Spec | float = 1.0, *, generator: Any = None) -> Spec:
    given = [x for x in (mean, std) if isinstance(x, Spec)]
    if not all(x.dtype.is_floating_point for x in given):
        raise NoRule
    return rows(broadcast_sizes(*(x.sizes for x in given)), given[0])


@rule_of(aten.native_dropout.default)
def _dropout(x: Spec, p: float, train: bool | None) -> tuple[Spec, Spec]:
    result = Spec(x.sizes, kept_strides(x), x.dtype, x.device)
    return result, result._replace(dtype=torch.bool)


@rule_of(aten.native_dropout_backward.default)
def _dropout_backward(gradient: Spec, mask: Spec, scale: float) -> Spec:
    return _pointwise(aten.mul.Tensor, gradient, mask)


# Views.


@rule_of(
    aten.detach.default, aten.alias.default, aten.lift_fresh.default,
    # Which the engine computes.
    aten._conj.default, aten._neg_view.default,
)  # fmt: skip
def _alias(x: Spec) -> Spec:
    return x


@rule_of(aten.t.default)
def _t(x: Spec) -> Spec:
    return Spec(x.sizes[::-1], x.strides[::-1], x.dtype, x.device)


@rule_of(aten.transpose.int)
def _transpose(x: Spec, dim0: int, dim1: int) -> Spec:
    order = list(range(len(x.sizes)))
    if order:
        a, b = _at(dim0, len(order)), _at(dim1, len(order))
        order[a], order[b] = order[b], order[a]
    return _permute(x, order)


@rule_of(aten.permute.default)
def _permute(x: Spec, dims: Sequence[int]) -> Spec:
    order = [_at(d, len(x.sizes)) for d in dims]
    return Spec(
        [x.sizes[d] for d in order], [x.strides[d] for d in order], x.dtype, x.device
    )  # fmt: skip


@rule_of(aten.view.default, aten._unsafe_view.default)
def _view(x: Spec, sizes: Sequence[Size]) -> Spec:
    if not is_contiguous(x):
        raise NoRule
    sizes = list(sizes)
    total = numel(x.sizes)
    unknown = [i for i, size in enumerate(sizes) if type(size) is int and size == -1]
    if unknown:
        known = numel([size for size in sizes if not (type(size) is int and size == -1)])
        if value(known) == 0 or not equal(total % known, 0):
            raise NoRule
        sizes[unknown[0]] = total // known
    elif not equal(total, numel(sizes)):
        raise NoRule
    return rows(sizes, x)


@rule_of(aten.expand.default)
def _expand(x: Spec, sizes: Sequence[Size], *, implicit: bool = False) -> Spec:
    missing = len(sizes) - len(x.sizes)
    result: list[Size] = []
    strides: list[Size] = []
    for i, size in enumerate(sizes):
        own, stride = (x.sizes[i - missing], x.strides[i - missing]) if i >= missing else (1, 0)
        if type(size) is int and size == -1:
            size = own
        if same(size, own) and i >= missing:
            result.append(size)
            strides.append(stride)
            continue
        if value(own) == 1 and (value(size) != 1 or type(own) is int):
            equal(own, 1)
            result.append(size)
            strides.append(0)
        elif equal(own, size):
            result.append(own)
            strides.append(stride)
        else:
            raise NoRule
    return Spec(result, strides, x.dtype, x.device)


@rule_of(aten.unsqueeze.default)
def _unsqueeze(x: Spec, dim: int) -> Spec:
    at = _at(dim, len(x.sizes) + 1)
    stride = x.sizes[at] * x.strides[at] if at < len(x.sizes) else 1
    sizes, strides = list(x.sizes), list(x.strides)
    sizes.insert(at, 1)
    strides.insert(at, stride)
    return Spec(sizes, strides, x.dtype, x.device)


@rule_of(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(x: Spec, dim: int | Sequence[int] | None = None) -> Spec:
    rank = len(x.sizes)
    named = [] if dim is not None and not isinstance(dim, int) and not len(dim) else None
    asked = _dims(dim, rank) if named is None else named
    # Whether a dim goes decides of the rank: a guard, whatever the asker.
    gone = {d for d in asked if d < rank and equal(x.sizes[d], 1)}
    kept = [d for d in range(rank) if d not in gone]
    return Spec([x.sizes[d] for d in kept], [x.strides[d] for d in kept], x.dtype, x.device)


@rule_of(aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims)
def _squeeze_copy(x: Spec, dim: int | Sequence[int] | None = None) -> Spec:
    return rows(_squeeze(x, dim).sizes, x)


@rule_of(aten.slice.Tensor)
def _slice(
    x: Spec, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1
) -> Spec:
    at = _at(dim, len(x.sizes))
    size = x.sizes[at]
    first = _clamp(0 if start is None else start, size)
    last = size if end is None or (type(end) is int and end >= 2**62) else _clamp(end, size)
    length = last - first
    if type(length) is not int and not (type(first) is int and first == 0):
        if not bool(length >= 0):
            length = 0
    elif type(length) is int:
        length = max(length, 0)
    if not (type(step) is int and step == 1):
        length = (length + step - 1) // step
    sizes, strides = list(x.sizes), list(x.strides)
    sizes[at] = length
    strides[at] = strides[at] * step
    return Spec(sizes, strides, x.dtype, x.device)


def _clamp(index: Size, size: Size) -> Size:
    """Bring the border of a slice into a dim; guards tell on which side of its ends it lies."""
    if type(index) is int and index == 0:
        return 0
    if same(index, size):
        return size
    if bool(index < 0):
        index = index + size
        if bool(index < 0):
            return 0
        return index
    return size if bool(index > size) else index


@rule_of(aten.select.int)
def _select(x: Spec, dim: int, index: Size) -> Spec:
    at = _at(dim, len(x.sizes))
    size = x.sizes[at]
    if not (-value(size) <= value(index) < value(size)):
        raise NoRule  # PyTorch words the error
    if type(size) is not int or type(index) is not int:
        # The engine checks again: other sizes may make the index wrong.
        bool(index < size) and bool(index >= -size)
    return Spec(
        [*x.sizes[:at], *x.sizes[at + 1 :]], [*x.strides[:at], *x.strides[at + 1 :]],
        x.dtype, x.device,
    )  # fmt: skip


@rule_of(aten.split_with_sizes.default)
def _split_with_sizes(x: Spec, sizes: Sequence[Size], dim: int = 0) -> list[Spec]:
    at = _at(dim, len(x.sizes))
    if not equal(functools.reduce(lambda a, b: a + b, sizes, 0), x.sizes[at]):
        raise NoRule
    return [x._replace(sizes=[*x.sizes[:at], size, *x.sizes[at + 1 :]]) for size in sizes]


@rule_of(aten.split.Tensor)
def _split(x: Spec, size: Size, dim: int = 0) -> list[Spec]:
    total = x.sizes[_at(dim, len(x.sizes))]
    if type(size) is not int or type(total) is not int or size <= 0:
        raise NoRule
    count = max(1, -(-total // size))
    parts = [min(size, total - i * size) for i in range(count)]
    return _split_with_sizes(x, parts, dim)


@rule_of(aten.unbind.int)
def _unbind(x: Spec, dim: int = 0) -> list[Spec]:
    at = _at(dim, len(x.sizes))
    count = value(x.sizes[at])
    equal(x.sizes[at], count)  # a graph has so many results
    return [_select(x, at, 0)] * count


# Joining and taking apart.


def _is_channels_last(x: Spec) -> bool:
    """Tell whether PyTorch would suggest channels-last for something new that is like a tensor."""
    inner_first = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(len(x.sizes), ())
    least = 0
    for d in inner_first:
        size, stride = value(x.sizes[d]), value(x.strides[d])
        is_expanded = d == 1 and stride == 0
        is_one_channel = d == 0 and least == value(x.strides[1])
        if size == 0 or stride < least or is_expanded or is_one_channel:
            return False
        least = stride * max(size, 1)
    return bool(inner_first)


@rule_of(aten.cat.default)
def _cat(tensors: Sequence[Spec], dim: int = 0) -> Spec:
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors])
    full = [x for x in tensors if not (len(x.sizes) == 1 and value(x.sizes[0]) == 0)]
    if len(full) != len(tensors) or all(map(_is_channels_last, tensors)):
        raise NoRule
    rank = len(full[0].sizes)
    at = _at(dim, rank)
    sizes = list(full[0].sizes)
    for x in full[1:]:
        if len(x.sizes) != rank:
            raise NoRule
        for d in range(rank):
            if d == at:
                sizes[d] = sizes[d] + x.sizes[d]
            elif not equal(sizes[d], x.sizes[d]):
                raise NoRule
    return rows(sizes, full[0], dtype)


@rule_of(aten.stack.default)
def _stack(tensors: Sequence[Spec], dim: int = 0) -> Spec:
    first = tensors[0]
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors])
    for x in tensors[1:]:
        if len(x.sizes) != len(first.sizes) or not all(map(equal, first.sizes, x.sizes)):
            raise NoRule
    sizes = list(first.sizes)
    sizes.insert(_at(dim, len(sizes) + 1), len(tensors))
    return rows(sizes, first, dtype)


@rule_of(aten.embedding.default)
def _embedding(
    weight: Spec, indices: Spec, padding: Size = -1, scale: bool = False, sparse: bool = False
) -> Spec:
    if not is_contiguous(indices):
        raise NoRule
    return rows([*indices.sizes, weight.sizes[1]], weight)


@rule_of(aten.embedding_dense_backward.default)
def _embedding_backward(
    gradient: Spec, indices: Spec, num_weights: Size, padding: Size, scale: bool
) -> Spec:
    return rows([num_weights, gradient.sizes[-1]], gradient)


@rule_of(aten.slice_backward.default)
def _slice_backward(
    gradient: Spec, sizes: Sequence[Size], dim: int, start: Size, end: Size, step: Size
) -> Spec:
    return rows(sizes, gradient)


@rule_of(aten.select_backward.default)
def _select_backward(gradient: Spec, sizes: Sequence[Size], dim: int, index: Size) -> Spec:
    return rows(sizes, gradient)


@rule_of(aten.gather.default)
def _gather(x: Spec, dim: int, index: Spec, *, sparse_grad: bool = False) -> Spec:
    _at(dim, len(x.sizes))
    return rows(index.sizes, x) if is_contiguous(index) else _no_rule()


@rule_of(aten.index.Tensor)
def _index(x: Spec, indices: Sequence[Spec | None]) -> Spec:
    """Order the result's dims as the kernel's TensorIterator does: by the rows and the indices."""
    given = {d: index for d, index in enumerate(indices) if index is not None}
    if not given or any(index.dtype in (torch.bool, torch.uint8) for index in given.values()):
        raise NoRule
    first, last = min(given), max(given)
    if len(given) <= last - first:  # what several indices give stands in front if they are apart
        first = 0
    others = [d for d in range(len(x.sizes)) if d not in given]
    before, after = others[:first], others[first:]
    chosen = broadcast_sizes(*(index.sizes for index in given.values()))
    sizes = [*(x.sizes[d] for d in before), *chosen, *(x.sizes[d] for d in after)]
    strides = [*(x.strides[d] for d in before), *[0] * len(chosen), *(x.strides[d] for d in after)]
    operands = [x._replace(sizes=sizes, strides=strides)]
    full = [1] * len(before) + [value(size) for size in chosen] + [1] * len(after)
    for index in given.values():
        laid = empty(index._replace(
            sizes=[*map(value, index.sizes)], strides=[*map(value, index.strides)],
            device=torch.device("meta"),
        )).expand([*map(value, chosen)]).reshape(full)  # fmt: skip
        operands.append(spec_of(laid))
    return x._replace(sizes=sizes, strides=in_order(sizes, _order_of(sizes, operands)))


@rule_of(aten.index_put.default)
def _index_put(
    x: Spec, indices: Sequence[Spec | None], values: Spec, accumulate: bool = False
) -> Spec:
    return x._replace(strides=kept_strides(x))  # a copy that is written into


def _no_rule() -> Any:
    raise NoRule


# Products.


def _joins(a: Size, b: Size) -> None:
    if not equal(a, b):
        raise NoRule  # PyTorch words the error


@rule_of(aten.mm.default)
def _mm(a: Spec, b: Spec) -> Spec:
    _joins(a.sizes[1], b.sizes[0])
    return rows([a.sizes[0], b.sizes[1]], a)


@rule_of(aten.bmm.default)
def _bmm(a: Spec, b: Spec) -> Spec:
    _joins(a.sizes[0], b.sizes[0])
    _joins(a.sizes[2], b.sizes[1])
    return rows([a.sizes[0], a.sizes[1], b.sizes[2]], a)


@rule_of(aten.addmm.default)
def _addmm(x: Spec, a: Spec, b: Spec, *, beta: Any = 1, alpha: Any = 1) -> Spec:
    result = _mm(a, b)
    if not _C.same_sizes(broadcast_sizes(x.sizes, result.sizes), result.sizes):
        raise NoRule
    return result


# Reductions.


def _reduced(x: Spec, dim: Any, keepdim: bool, dtype: torch.dtype) -> Spec:
    rank = len(x.sizes)
    gone = set(_dims(dim, rank))
    sizes = [1 if d in gone else x.sizes[d] for d in range(rank)]
    if not keepdim:
        sizes = [x.sizes[d] for d in range(rank) if d not in gone]
    return rows(sizes, x, dtype)


def _sum_dtype(x: Spec, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64


@rule_of(aten.sum.dim_IntList)
def _sum(
    x: Spec, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Spec:  # fmt: skip
    return _reduced(x, dim, keepdim, _sum_dtype(x, dtype))


@rule_of(aten.mean.dim)
def _mean(
    x: Spec, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Spec:  # fmt: skip
    return _reduced(x, dim, keepdim, dtype or x.dtype)


@rule_of(aten.sum.default)
def _sum_all(x: Spec, *, dtype: torch.dtype | None = None) -> Spec:
    return rows([], x, _sum_dtype(x, dtype))


@rule_of(aten.mean.default)
def _mean_all(x: Spec, *, dtype: torch.dtype | None = None) -> Spec:
    return rows([], x, dtype or x.dtype)


@rule_of(aten.amax.default, aten.amin.default)
def _extreme(x: Spec, dim: Any = (), keepdim: bool = False) -> Spec:
    return _reduced(x, dim, keepdim, x.dtype)


# Norms, softmax, losses.


@rule_of(aten._softmax.default, aten._log_softmax.default)
def _softmax(x: Spec, dim: int, half_to_float: bool) -> Spec:
    _at(dim, len(x.sizes))
    if half_to_float or not is_contiguous(x):
        raise NoRule
    return rows(x.sizes, x)


@rule_of(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(gradient: Spec, output: Spec, dim: int, dtype: torch.dtype) -> Spec:
    if not (is_contiguous(gradient) and is_contiguous(output)):
        raise NoRule
    return rows(gradient.sizes, gradient, dtype)


def _is_cpu(*specs: Spec | None) -> bool:
    return all(spec is None or spec.device.type == "cpu" for spec in specs)


@rule_of(aten.native_layer_norm.default)
def _layer_norm(
    x: Spec, shape: Sequence[Size], weight: Spec | None, bias: Spec | None, eps: float
) -> tuple[Spec, Spec, Spec]:
    mixed = weight is not None and weight.dtype != x.dtype
    if not _is_cpu(x) or mixed:
        raise NoRule
    outer = len(x.sizes) - len(shape)
    statistics = rows([*x.sizes[:outer], *[1] * len(shape)], x)
    return rows(x.sizes, x), statistics, statistics


_FULL = (torch.float32, torch.float64)


@rule_of(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    gradient: Spec, x: Spec, shape: Sequence[Size], mean: Spec, rstd: Spec, weight: Spec | None,
    bias: Spec | None, mask: Sequence[bool],
) -> tuple[Spec | None, ...]:  # fmt: skip
    mixed = weight is not None and weight.dtype != x.dtype
    if not _is_cpu(x) or mixed:
        raise NoRule
    return (
        rows(x.sizes, x) if mask[0] else None,
        rows(weight.sizes, weight) if mask[1] and weight is not None else None,
        rows(bias.sizes, bias) if mask[2] and bias is not None else None,
    )


@rule_of(aten.binary_cross_entropy_with_logits.default)
def _cross_entropy_with_logits(
    x: Spec, target: Spec, weight: Spec | None = None, positive: Spec | None = None,
    reduction: int = 1,
) -> Spec:  # fmt: skip
    if reduction == 0 or not all(map(equal, x.sizes, target.sizes)):
        raise NoRule
    return rows([], x)


@rule_of(aten.mse_loss.default, aten.smooth_l1_loss.default)
def _loss_of_differences(
    x: Spec, target: Spec, reduction: int = 1, threshold: float | None = None
) -> Spec:
    each = _pointwise(aten.sub.Tensor, x, target)
    return rows([], each) if reduction else each


@rule_of(aten.huber_loss.default, aten.soft_margin_loss.default)
def _loss_like_its_input(x: Spec, target: Spec, reduction: int = 1, delta: float = 1.0) -> Spec:
    if not _C.same_sizes(broadcast_sizes(x.sizes, target.sizes), x.sizes):
        raise NoRule
    return rows([], x) if reduction else x._replace(strides=kept_strides(x))


@rule_of(
    aten.mse_loss_backward.default, aten.huber_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
)  # fmt: skip
def _loss_of_differences_backward(
    gradient: Spec, x: Spec, target: Spec, reduction: int, threshold: float | None = None
) -> Spec:
    if target.dtype != x.dtype or not _is_cpu(x):
        raise NoRule
    if not _C.same_sizes(broadcast_sizes(x.sizes, target.sizes), x.sizes):
        raise NoRule
    return rows(x.sizes, x)


@rule_of(aten.native_group_norm.default)
def _group_norm(
    x: Spec, weight: Spec | None, bias: Spec | None, batch: Size, channels: Size, rest: Size,
    groups: Size, eps: float,
) -> tuple[Spec, ...]:  # fmt: skip
    if not _is_cpu(x) or x.dtype not in _FULL or not is_contiguous(x):
        raise NoRule
    if any(spec is not None and spec.dtype != x.dtype for spec in (weight, bias)):
        raise NoRule
    statistics = rows([batch, groups], x)
    return rows(x.sizes, x), statistics, statistics


@rule_of(aten.native_group_norm_backward.default)
def _group_norm_backward(
    gradient: Spec, x: Spec, mean: Spec, rstd: Spec, weight: Spec | None, batch: Size,
    channels: Size, rest: Size, groups: Size, mask: Sequence[bool],
) -> tuple[Spec | None, ...]:  # fmt: skip
    if not _is_cpu(x) or x.dtype not in _FULL or not is_contiguous(x):
        raise NoRule
    per_channel = rows([channels], x)
    return (
        rows(x.sizes, x) if mask[0] else None,
        per_channel if mask[1] else None,
        per_channel if mask[2] else None,
    )


@rule_of(aten.nll_loss_forward.default)
def _nll_loss(
    x: Spec, target: Spec, weight: Spec | None, reduction: int, ignore: Size
) -> tuple[Spec, Spec]:
    if len(x.sizes) == 2:
        _joins(x.sizes[0], target.sizes[0])
    if reduction == 0:
        raise NoRule
    return rows([], x), rows([], x)


@rule_of(aten.nll_loss_backward.default)
def _nll_loss_backward(
    gradient: Spec, x: Spec, target: Spec, weight: Spec | None, reduction: int, ignore: Size,
    total: Spec,
) -> Spec:  # fmt: skip
    return rows(x.sizes, x) if is_contiguous(x) else _no_rule()


@rule_of(aten.log_sigmoid_forward.default)
def _log_sigmoid(x: Spec) -> tuple[Spec, Spec]:
    return (rows(x.sizes, x), rows(x.sizes, x)) if _is_cpu(x) else _no_rule()


@rule_of(aten.log_sigmoid_backward.default)
def _log_sigmoid_backward(gradient: Spec, x: Spec, buffer: Spec) -> Spec:
    if not _is_cpu(x) or not all(map(equal, gradient.sizes, x.sizes)):
        raise NoRule
    return gradient._replace(strides=kept_strides(gradient))


@rule_of(aten.multi_margin_loss.default)
def _multi_margin_loss(
    x: Spec, target: Spec, p: Any = 1, margin: Any = 1, weight: Spec | None = None,
    reduction: int = 1,
) -> Spec:  # fmt: skip
    return _margin_loss(x, reduction)


@rule_of(aten.multilabel_margin_loss_forward.default)
def _multilabel_margin_loss(x: Spec, target: Spec, reduction: int) -> tuple[Spec, Spec]:
    return _margin_loss(x, reduction), rows(target.sizes, x)


def _margin_loss(x: Spec, reduction: int) -> Spec:
    if not _is_cpu(x) or not is_contiguous(x) or len(x.sizes) != 2:
        raise NoRule
    return rows(x.sizes[:1] if reduction == 0 else [], x)


@rule_of(
    aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default
)  # fmt: skip
def _margin_loss_backward(gradient: Spec, x: Spec, *others: Any) -> Spec:
    return rows(x.sizes, x) if _is_cpu(x) and is_contiguous(x) else _no_rule()


@rule_of(aten._native_batch_norm_legit_functional.default)
def _batch_norm(
    x: Spec, weight: Spec | None, bias: Spec | None, mean: Spec, variance: Spec, training: bool,
    momentum: float, eps: float,
) -> tuple[Spec, ...]:  # fmt: skip
    others = [spec for spec in (weight, bias, mean, variance) if spec is not None]
    # Images in channels-last order stay so; all else becomes row-major.
    may_keep_order = not is_contiguous(x) and len(x.sizes) in (4, 5)
    if not training or not _is_cpu(x) or may_keep_order:
        raise NoRule
    if x.dtype not in _FULL or any(spec.dtype != x.dtype for spec in others):
        raise NoRule
    bool(numel(x.sizes) != 0)  # without rows a batch norm leaves its statistics alone
    statistics = rows([x.sizes[1]], x)
    return rows(x.sizes, x), statistics, statistics, rows(mean.sizes, x), rows(variance.sizes, x)


@rule_of(aten.native_batch_norm_backward.default)
def _batch_norm_backward(
    gradient: Spec, x: Spec, weight: Spec | None, mean: Spec | None, variance: Spec | None,
    saved_mean: Spec | None, saved_rstd: Spec | None, training: bool, eps: float,
    mask: Sequence[bool],
) -> tuple[Spec | None, ...]:  # fmt: skip
    if not _is_cpu(x) or x.dtype not in _FULL:
        raise NoRule
    if not is_contiguous(x) or (weight is not None and weight.dtype != x.dtype):
        raise NoRule
    channels = rows([x.sizes[1]], x)
    return (
        rows(x.sizes, x) if mask[0] else None,
        channels if mask[1] else None,
        channels if mask[2] else None,
    )


# Convolutions.


@rule_of(aten.convolution.default)
def _convolution(
    x: Spec, weight: Spec, bias: Spec | None, stride: Sequence[Size], padding: Sequence[Size],
    dilation: Sequence[Size], transposed: bool, output_padding: Sequence[Size], groups: Size,
) -> Spec:  # fmt: skip
    rank = len(weight.sizes) - 2
    if not _is_cpu(x) or len(x.sizes) != rank + 2 or x.dtype != weight.dtype:
        raise NoRule
    memory_format = _convolution_format(x, weight)
    in_channels = weight.sizes[0] if transposed else weight.sizes[1] * groups
    _joins(x.sizes[1], in_channels)
    out_channels = weight.sizes[1] * groups if transposed else weight.sizes[0]

    def per_dim(values: Sequence[Size], d: int) -> Size:
        return values[d] if len(values) > 1 else values[0]

    sizes: list[Size] = [x.sizes[0], out_channels]
    for d in range(rank):
        reach = per_dim(dilation, d) * (weight.sizes[d + 2] - 1)
        step, pad, size = per_dim(stride, d), per_dim(padding, d), x.sizes[d + 2]
        if transposed:
            extra = per_dim(output_padding, d) if output_padding else 0
            sizes.append((size - 1) * step - 2 * pad + reach + extra + 1)
            continue
        covered = size + 2 * pad - reach - 1
        if not (type(covered) is int and covered >= 0) and not bool(covered >= 0):
            raise NoRule
        sizes.append(covered // step + 1)
    return Spec(sizes, format_strides(sizes, memory_format), x.dtype, x.device)


def _convolution_format(x: Spec, weight: Spec) -> torch.memory_format:
    """Give the layout of all that a convolution of the CPU gives: channels last if one operand."""
    last = 0
    for spec in (x, weight):
        if is_contiguous(spec):
            continue
        if len(spec.sizes) != 4 or dense_order(spec) != [0, 2, 3, 1]:
            raise NoRule
        last += 1
    return torch.channels_last if last else torch.contiguous_format


@rule_of(aten.convolution_backward.default)
def _convolution_backward(
    gradient: Spec, x: Spec, weight: Spec, bias_sizes: Sequence[Size] | None,
    stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: Size,
    mask: Sequence[bool],
) -> tuple[Spec | None, ...]:  # fmt: skip
    if not _is_cpu(x):
        raise NoRule
    memory_format = _convolution_format(x, weight)

    def like(spec: Spec) -> Spec:
        return spec._replace(strides=format_strides(spec.sizes, memory_format))

    return (
        like(x) if mask[0] else None,
        like(weight) if mask[1] else None,
        rows([gradient.sizes[1]], gradient) if mask[2] else None,
    )


# Images of other sizes.


@rule_of(*(getattr(aten, name).default for name in RESIZING))
def _resize(x: Spec, sizes: Sequence[Size], *others: Any) -> Spec:
    return _image([*x.sizes[:2], *sizes], x, _image_format(x))


# Their kernels give channels that stand last again.
_KEEPING_ORDER = [
    getattr(aten, f"{name}_backward").default
    for name in RESIZING
    if "nearest3d" not in name and "nearest_exact3d" not in name and "bicubic" not in name
]


@rule_of(*_KEEPING_ORDER)
def _resize_backward(
    gradient: Spec, sizes: Sequence[Size], given: Sequence[Size], *others: Any
) -> Spec:  # fmt: skip
    return _image(given, gradient, _image_format(gradient))


@rule_of(
    aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact3d_backward.default,
    aten.upsample_bicubic2d_backward.default,
)  # fmt: skip
def _resize_backward_to_rows(
    gradient: Spec, sizes: Sequence[Size], given: Sequence[Size], *others: Any
) -> Spec:  # fmt: skip
    return _image(given, gradient, torch.contiguous_format)


def _image(sizes: Sequence[Size], like: Spec, memory_format: torch.memory_format) -> Spec:
    are_sizes = all(type(size) is not int or size > 0 for size in sizes[2:])
    if not _is_cpu(like) or len(sizes) != len(like.sizes) or not are_sizes:
        raise NoRule
    return like._replace(sizes=list(sizes), strides=format_strides(sizes, memory_format))


def _image_format(x: Spec) -> torch.memory_format:
    if is_contiguous(x):
        return torch.contiguous_format
    order = dense_order(x)
    if order is None:
        raise NoRule
    formats = {(0, 2, 3, 1): torch.channels_last, (0, 2, 3, 4, 1): torch.channels_last_3d}
    return formats.get(tuple(order), torch.contiguous_format)


# Attention of the CPU.


@rule_of(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(
    query: Spec, key: Spec, value: Spec, dropout: float = 0.0, is_causal: bool = False, *,
    attn_mask: Spec | None = None, scale: float | None = None,
) -> tuple[Spec, Spec]:  # fmt: skip
    batch, heads, length, _ = query.sizes
    sums = [batch, heads, length]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (
        Spec(query.sizes, kept_strides(query), query.dtype, query.device),
        Spec(sums, in_order(sums, [0, 2, 1]), dtype, query.device),
    )


@rule_of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(
    gradient: Spec, query: Spec, key: Spec, value: Spec, *others: Any, **named: Any
) -> tuple[Spec, ...]:
    def like(x: Spec) -> Spec:
        return x._replace(strides=in_order(x.sizes, [0, 2, 1, 3]))

    return like(query), like(key), like(value)


# New tensors.


def _new(
    sizes: Sequence[Size], dtype: torch.dtype | None, device: Any, layout: Any = None
) -> Spec:  # fmt: skip
    if layout not in (None, torch.strided):
        raise NoRule
    sizes = list(sizes)
    return Spec(
        sizes, _C.contiguous_strides(sizes), dtype or torch.get_default_dtype(),
        _device(device, torch.get_default_device()),
    )  # fmt: skip


@rule_of(aten.zeros.default, aten.ones.default, aten.empty.memory_format)
def _filled(
    sizes: Sequence[Size], *, dtype: torch.dtype | None = None, layout: Any = None,
    device: Any = None, pin_memory: bool | None = None, memory_format: Any = None,
) -> Spec:  # fmt: skip
    return _no_rule() if memory_format is not None else _new(sizes, dtype, device, layout)


@rule_of(aten.full.default)
def _full(
    sizes: Sequence[Size], fill: Any, *, dtype: torch.dtype | None = None, layout: Any = None,
    device: Any = None, pin_memory: bool | None = None,
) -> Spec:  # fmt: skip
    if dtype is None:
        kinds = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
        if type(fill) not in kinds:
            raise NoRule
        dtype = kinds[type(fill)]
    return _new(sizes, dtype, device, layout)


@rule_of(aten.scalar_tensor.default)
def _scalar_tensor(
    number: Any, *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None,
    pin_memory: bool | None = None,
) -> Spec:  # fmt: skip
    return _new([], dtype, device, layout)


@rule_of(aten.arange.start_step)
def _arange(
    start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, layout: Any = None,
    device: Any = None, pin_memory: bool | None = None,
) -> Spec:  # fmt: skip
    if any(isinstance(number, float | torch.SymFloat) for number in (start, end, step)):
        raise NoRule
    if not (type(step) is int and step == 1) or not bool(end - start >= 0):
        raise NoRule
    return _new([end - start], dtype or torch.int64, device, layout)


@rule_of(
    aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default
)  # fmt: skip
def _new_like(
    x: Spec, sizes: Sequence[Size], *, dtype: torch.dtype | None = None, layout: Any = None,
    device: Any = None, pin_memory: bool | None = None,
) -> Spec:  # fmt: skip
    return _new(sizes, dtype or x.dtype, _device(device, x.device), layout)


@rule_of(aten.arange.default)
def _arange_to(end: Any, **kwargs: Any) -> Spec:
    return _arange(0, end, **kwargs)


@rule_of(aten.arange.start)
def _arange_from(start: Any, end: Any, **kwargs: Any) -> Spec:
    return _arange(start, end, **kwargs)
