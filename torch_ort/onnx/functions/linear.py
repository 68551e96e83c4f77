"""Products with a weight of the file, as modules that other packages know.

They are `torch.nn.Linear` for whoever asks, such as PEFT, which puts others in their place. The
parameter stays where the file's name puts it, and in the layout of the file; calls pass it on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ort.onnx.functions.table import LINEAR, of_onnx


def _is_plain(node: onnx.NodeProto) -> bool:
    """Tell whether a Gemm is x W + b, where W may be transposed."""
    usual = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": None}
    given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    return all(usual.get(name, value) in (None, value) for name, value in given.items())


class _Linear(nn.Linear):
    """x W or x Wᵀ, and a bias, given with each call.

    Attributes:
        weight: The parameter as PyTorch has it, (out, in): a view of it where the file's is (in,
            out). Writing into it writes into the parameter.
    """

    def __init__(self, is_transposed: bool) -> None:
        nn.Module.__init__(self)
        self._is_transposed = is_transposed
        # The module that has the parameter, and its name there; None for no bias. Tuples, so that
        # it does not become a submodule here.
        self._weight: tuple[Any, ...] = ()
        self._bias: tuple[Any, ...] = ()

    def link(
        self, weight: tuple[nn.Module, str], bias: tuple[nn.Module, str] | None = None
    ) -> None:
        """Tell which parameters the calls pass."""
        self._weight, self._bias = weight, bias or ()
        self.out_features, self.in_features = self.weight.shape

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight (out, in)."""
        return self._as_pytorch(getattr(*self._weight))

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The bias; None if there is none."""
        return getattr(*self._bias) if self._bias else None

    def _as_pytorch(self, weight: Tensor) -> Tensor:
        return weight.t() if self._is_transposed else weight

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the modules of the parameters: a copy belongs to other ones."""
        return {**self.__dict__, "_weight": (), "_bias": ()}

    def extra_repr(self) -> str:
        """Give the layout of the weight."""
        return "weight (in, out)" if self._is_transposed else "weight (out, in)"

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply the last dim of x."""
        return F.linear(x, self._as_pytorch(weight), bias)


@of_onnx("MatMul", domain=LINEAR)
class MatMul(_Linear):
    """x W with a matrix (in, out)."""

    def __init__(self, numbers: object) -> None:
        super().__init__(is_transposed=True)


# What a MatMul is called that reads a matrix of the file in place of what transposes it.
BY_TRANSPOSED = "MatMulByTransposed"


@of_onnx(BY_TRANSPOSED, domain=LINEAR)
class MatMulByTransposed(_Linear):
    """x Wᵀ with a matrix (out, in)."""

    def __init__(self, numbers: object) -> None:
        super().__init__(is_transposed=False)


@of_onnx("Gemm", domain=LINEAR, when=_is_plain)
class Gemm(_Linear):
    """x W + b, or x Wᵀ + b."""

    def __init__(
        self, numbers: object, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
        transB: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(is_transposed=not transB)


def is_linear(module: object) -> bool:
    """Tell whether a module is one of these."""
    return isinstance(module, _Linear)


def path_of(weight: str) -> str:
    """Give the path of the module of a weight: beside it, under the name "linear"."""
    parent, _, last = weight.rpartition(".")
    return f"{parent}.linear" if parent and last == "weight" else f"{weight}_linear"


def transposed(graph: onnx.GraphProto, matrices: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Give the matrices of the file that Transpose nodes transpose, by their results."""
    return {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Transpose" and not node.domain and node.input and node.output
        and len(matrices.get(node.input[0], ())) == 2
        and [list(each.ints) for each in node.attribute if each.name == "perm"] in ([], [[1, 0]])
    }  # fmt: skip


def read_untransposed(graph: onnx.GraphProto, matrices: Mapping[str, str]) -> None:
    """Let products read a matrix of the file itself, by the result of what transposes it."""
    for node in graph.node:
        is_product = node.op_type == "MatMul" and not node.domain and len(node.input) == 2
        if is_product and node.input[1] in matrices:
            node.input[1] = matrices[node.input[1]]
            node.op_type = BY_TRANSPOSED


def has_weight(node: onnx.NodeProto, matrices: Mapping[str, Sequence[int]]) -> bool:
    """Tell whether a node multiplies by a matrix of the file, and adds at most a vector of it."""
    if len(node.input) < 2 or node.input[1] not in matrices:
        return False
    bias = node.input[2] if len(node.input) > 2 else ""
    return len(matrices[node.input[1]]) == 2 and (not bias or len(matrices.get(bias, [0, 0])) == 1)
