"""Descriptions of a model's inputs and outputs, and checks of the model and data against them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ort.core.user_code import calling_line, warn_at
from torch_ort.pytorch.module_compat import pytree

NO_ONNX = (
    "model: got ModelProto, want a torch.nn.Module: the engine captures forward and backward of "
    "modules; build the model in PyTorch and give its weights to load_state_dict"
)


class IODescription:
    """An input or output: `name_`, `shape_`, `dtype_` and `num_classes_`.

    Args:
        name: Of the input or output; by it a step takes and gives it.
        shape: Sizes as numbers, or as names where they vary.
        dtype: None if any will do.
        num_classes: How many classes labels have; kept, the engine does not need it.

    Raises:
        ValueError: the name is no string, or the shape no list of numbers and names.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int | str],
        dtype: torch.dtype | None = None,
        num_classes: int | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"IODescription: name: got {name!r}, want a string")
        if not isinstance(shape, list | tuple):
            raise ValueError(f"IODescription: shape of {name}: got {shape!r}, want a list")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"IODescription: dtype of {name}: got {dtype!r}, want a torch.dtype")
        self.name_ = name
        self.shape_ = list(shape)
        self.dtype_ = dtype
        self.num_classes_ = num_classes

    def __repr__(self) -> str:
        return f"IODescription({self.name_!r}, {self.shape_}, {self.dtype_})"

    def difference(self, tensor: Tensor, compares_dtype: bool = True) -> str:
        """Tell in words what of a tensor is not as described; "" if all is."""
        if compares_dtype and self.dtype_ not in (None, tensor.dtype):
            return f"dtype: got {tensor.dtype}, described as {self.dtype_}"
        shape = list(tensor.shape)
        if len(shape) != len(self.shape_):
            return f"shape: got {shape}, described as {self.shape_}"
        for got, want in zip(shape, self.shape_, strict=True):
            if isinstance(want, int) and got != want:
                return f"shape: got {shape}, described as {self.shape_}"
        return ""


class Watch:
    """Compares data with descriptions, and warns once of each name that contradicts its own."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def look(
        self, described: Iterable[IODescription], values: Iterable[Any], compares_dtype: bool = True
    ) -> None:
        """Compare values with their descriptions; a UserWarning stands at the caller's line."""
        for each, value in zip(described, values, strict=False):
            if not isinstance(value, Tensor) or each.name_ in self._warned:
                continue
            difference = each.difference(value, compares_dtype)
            if difference:
                self._warned.add(each.name_)
                message = f"{each.name_}: {difference}; the data is taken as it is"
                warn_at(calling_line(), message, UserWarning)


class Described(torch.nn.Module):
    """A model, and its loss if that stands beside it, with described inputs and outputs.

    A call takes the inputs in the order of their names, the label of the loss last, and gives a
    tuple of the outputs in the order of theirs. Inputs go to the model by name if they are
    parameters of its forward, and in their order if they are not. Outputs are those of a mapping
    that has their names, or the tensors of the model's result in their order.

    Args:
        model: Any module.
        loss_fn: Called as `loss_fn(prediction, label)`; None if the model gives the loss itself,
            or if none is wanted.
        inputs: Names, of the label too.
        outputs: Names.
        loss: Which output `loss_fn` gives.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Tensor], Tensor] | None,
        inputs: Sequence[str],
        outputs: Sequence[str],
        loss: str,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        of_model = tuple(inputs if loss_fn is None else inputs[:-1])
        self.names = of_model if _are_parameters(of_model, model) else None
        self.outputs = tuple(outputs)
        self.loss = loss

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Give the described outputs."""
        if self.loss_fn is None:
            found = named(self._call(inputs), self.outputs)
            return tuple(found[name] for name in self.outputs)
        *others, label = inputs
        prediction = self._call(others)
        loss = self.loss_fn(prediction, label)
        found = named(prediction, [name for name in self.outputs if name != self.loss])
        return tuple(loss if name == self.loss else found[name] for name in self.outputs)

    def _call(self, inputs: Sequence[Any]) -> Any:
        if self.names is None:
            return self.model(*inputs)
        return self.model(**dict(zip(self.names, inputs, strict=True)))


def named(result: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Give the parts of a model's result by name.

    Raises RuntimeError where there are fewer than names.
    """
    if isinstance(result, Mapping) and all(name in result for name in names):
        return {name: result[name] for name in names}
    leaves = [leaf for leaf in pytree.tree_leaves(_as_dict(result)) if isinstance(leaf, Tensor)]
    if len(leaves) < len(names):
        raise RuntimeError(
            f"outputs: the model gave {len(leaves)}, the description has {len(names)} of it: "
            f"{', '.join(names)}"
        )
    return dict(zip(names, leaves, strict=False))


def _as_dict(result: Any) -> Any:
    return dict(result) if isinstance(result, Mapping) else result


def _are_parameters(names: Sequence[str], model: torch.nn.Module) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = inspect.signature(model.forward).parameters.values()
    return {*names} <= {it.name for it in taken if it.kind in kinds}


def check_model(model: Any, loss_fn: Any) -> None:
    """Raise for what no trainer of this package takes.

    TypeError for a model that is no module, or one around a module; RuntimeError for a loss that
    cannot be called with a prediction and a label.
    """
    if type(model).__name__ == "ModelProto":
        raise TypeError(NO_ONNX)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, want a torch.nn.Module")
    if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"model: got {type(model).__name__}, want the module inside; "
            "ranks of torch.distributed train together without it"
        )
    if loss_fn is None:
        return
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: got {type(loss_fn).__name__}, want a function or None")
    called = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    try:
        inspect.signature(called).bind(None, None)
    except TypeError as error:
        raise RuntimeError(
            f"loss_fn: want a function of two arguments, prediction and label: {error}"
        ) from error
    except ValueError:  # a builtin that does not tell
        return


def bind(what: str, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict:
    """Give the values of a call by name; those that are not given are left out.

    Raises RuntimeError for more values than names, and for a name that is unknown or comes twice.
    """
    if len(args) > len(names):
        raise RuntimeError(f"{what}: got {len(args)} inputs, want {len(names)}: {', '.join(names)}")
    found = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names or name in found:
            why = "twice" if name in found else f"want one of {', '.join(names)}"
            raise RuntimeError(f"{what}: got an input {name!r}, {why}")
        found[name] = value
    return found


def demand(what: str, names: Sequence[str], found: Mapping[str, Any]) -> list[Any]:
    """Give the values of names; raises RuntimeError where some are missing."""
    missing = [name for name in names if name not in found]
    if missing:
        raise RuntimeError(
            f"{what}: got {len(found)} inputs, want {len(names)}: {', '.join(names)}; "
            f"missing: {', '.join(missing)}"
        )
    return [found[name] for name in names]
