"""Data parallelism as a part of the graph: it gathers parameters, and sums gradients, itself.

`DistributedDataParallel` and `fully_shard` communicate in hooks, between graphs. After `shard` or
`replicate` the modules communicate where they read their parameters. A graph of the whole model
then has all communication in it, so that the engine can run it beside other work, join what is
small, and gather a layer shortly before it is needed. In eager PyTorch the modules compute the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from torch_ort._C import UserError

M = TypeVar("M", bound=nn.Module)
# Gives what a module computes with from the parameter that it keeps.
Read = Callable[[Tensor], Tensor]


def shard(
    module: M,
    mesh: DeviceMesh | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> M:
    """Keep a part of each parameter on each rank, and gather it where a module reads it.

    Parameters become DTensors, split along their first dim, under their own names: optimizers and
    `torch.distributed.checkpoint` see those. They have the values of rank 0. Gradients are the mean
    over the ranks, split in the same way. Compile the module afterwards, as a whole:
    `torch.compile(shard(model, mesh), backend="ort")`.

    Args:
        module: It is changed in place.
        mesh: One dim of ranks; all ranks unless given.
        param_dtype: What parameters are cast to before they are gathered, and so what the module
            computes with; gradients are summed in it, too.
        reshard_after_forward: Whether backward gathers parameters again. Otherwise they are held
            from forward on.

    Returns:
        The module.

    Raises:
        UserError: The mesh has several dims, a parameter has none or is a DTensor, or `shard` or
            `replicate` has changed a module already.
    """
    mesh = _mesh_of(module, mesh)

    def gather(parameter: Tensor) -> Tensor:
        given = parameter if param_dtype is None else parameter.to(param_dtype)
        assert isinstance(given, DTensor)
        whole = given.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("sum")])

    def read(parameter: Tensor) -> Tensor:
        part = _MeanOfGradients.apply(parameter, mesh.size())
        if reshard_after_forward and torch.is_grad_enabled():
            return checkpoint(gather, part, use_reentrant=False)
        return gather(part)

    for parameter in list(module.parameters()):
        split = distribute_tensor(parameter.data, mesh, [Shard(0)])
        _replace(module, parameter, nn.Parameter(split, parameter.requires_grad))
    _read_by(module, read, mesh.get_group())
    return module


def replicate(module: M, mesh: DeviceMesh | None = None) -> M:
    """Keep all parameters on each rank, and average their gradients over the ranks.

    Parameters, and buffers, get the values of rank 0. Compile the module afterwards, as a whole:
    `torch.compile(replicate(model), backend="ort")`.

    Args:
        module: It is changed in place.
        mesh: One dim of ranks; all ranks unless given.

    Returns:
        The module.

    Raises:
        UserError: As `shard` does.
    """
    mesh = _mesh_of(module, mesh)
    group = mesh.get_group()
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, group=group, group_src=0)

    def read(parameter: Tensor) -> Tensor:
        return _SumOfGradients.apply(parameter, group.group_name, mesh.size())

    _read_by(module, read, group)
    return module


class _MeanOfGradients(torch.autograd.Function):
    """Divides the gradient, which has been summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


class _SumOfGradients(torch.autograd.Function):
    """Averages the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        mean = (gradient / ctx.ranks).contiguous()
        flying = torch.ops._c10d_functional.all_reduce(mean, "sum", ctx.group)
        return torch.ops._c10d_functional.wait_tensor(flying), None, None


def _mesh_of(module: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        kind = next((each.device.type for each in module.parameters()), "cpu")
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
    if mesh.ndim != 1:
        raise UserError(f"parallel: mesh: got {mesh.ndim} dims, want 1; pass one of its dims")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserError(f"parallel: parameter '{name}': got a DTensor, want a plain tensor")
        if parameter.ndim == 0:
            raise UserError(f"parallel: parameter '{name}': got 0 dims, want 1 or more")
    for name, part in module.named_modules():
        if isinstance(part, _Parallel):
            raise UserError(f"parallel: module '{name}': shard or replicate has changed it already")
    return mesh


class _Parallel:
    """Marks classes of modules that communicate where they read their parameters."""

    communicates_in: ClassVar[dist.ProcessGroup]


def _owners(module: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Give the modules that have parameters of their own, and the names of these."""
    for part in module.modules():
        names = [name for name, each in part._parameters.items() if each is not None]
        if names:
            yield part, names


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put another parameter in all places of one."""
    for part, names in _owners(module):
        for name in names:
            if part._parameters[name] is old:
                part._parameters[name] = new


def _read_by(module: nn.Module, read: Read, group: dist.ProcessGroup) -> None:
    """Let modules read their parameters by a function, which communicates in a group.

    The parameters stay where they are. A property of the class comes before them where the name is
    looked up.
    """
    for part, names in list(_owners(module)):
        properties: dict[str, Any] = {name: property(_reader(name, read)) for name in names}
        kind = type(part)
        if isinstance(part, nn.RNNBase):
            properties |= _of_recurrent_layer
        words = {
            "__doc__": kind.__doc__,
            "__module__": kind.__module__,
            "communicates_in": group,
        }
        part.__class__ = type(kind.__name__, (_Parallel, kind), {**properties, **words})


def _reader(name: str, read: Read) -> Callable[[nn.Module], Tensor]:
    def get(self: nn.Module) -> Tensor:
        parameter = self._parameters[name]
        assert parameter is not None
        return read(parameter)

    return get


def _flat_weights(self: nn.RNNBase) -> list[Tensor | None]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


# A recurrent layer keeps its parameters in a list, too, and on GPUs in one piece of memory. Both
# would be of parameters that nobody has gathered. It also reads all of them in each call, to see
# whether they are those of the list, which is read anew here.
_of_recurrent_layer = {
    "_flat_weights": property(_flat_weights, lambda self, value: None),
    "_weights_have_changed": lambda self: False,
    "flatten_parameters": lambda self: None,
}
