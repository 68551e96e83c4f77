"""Operators that compute otherwise while the module is trained.

They are modules, whose mode `train()` and `eval()` of the whole change. Nodes of which the file
says that they train are none of these: they do so in both modes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ort import _C
from torch_ort.onnx.functions.table import BY_MODE, has_attribute, has_inputs, has_outputs, of_onnx

_says_it_trains = has_attribute("training_mode", 1)
_names_its_mode = has_inputs([2])
_gives_a_mask = has_outputs(1)
_gives_statistics = has_outputs(1, 2, 3, 4)


def _drops_by_mode(node: onnx.NodeProto) -> bool:
    return not _names_its_mode(node) and not _gives_a_mask(node)


def _normalizes_by_mode(node: onnx.NodeProto) -> bool:
    return not _says_it_trains(node) and not _gives_statistics(node)


@of_onnx("Dropout", domain=BY_MODE, numbers=(1,), draws=True, when=_drops_by_mode)
class Dropout(nn.Module):
    """Drops a share of the elements in training, by PyTorch's generator whatever the seed is."""

    def __init__(self, numbers: Mapping[int, Sequence[float]], *, seed: int = 0) -> None:
        super().__init__()
        self.ratio = numbers[1][0] if numbers.get(1) else 0.5

    def forward(self, x: Tensor, ratio: object = None) -> Tensor:
        """Give x, or what is left of it."""
        return F.dropout(x, self.ratio, self.training)

    def extra_repr(self) -> str:
        """Give the share."""
        return f"ratio={self.ratio}"


@of_onnx("BatchNormalization", domain=BY_MODE, when=_normalizes_by_mode)
class BatchNorm(nn.Module):
    """Normalizes by the statistics of the file, and in training by those of the batch.

    Training moves the statistics of the file as PyTorch's batch norms do, by the share
    1 - momentum; its variance is the unbiased estimate.
    """

    def __init__(
        self, numbers: object, *, epsilon: float = 1e-5, momentum: float = 0.9,
        training_mode: int = 0, spatial: int = 1, shared: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.shared = bool(shared)  # other nodes read the statistics, too
        self.epsilon, self.momentum = epsilon, momentum

    def forward(self, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Give x normalized per channel (batch, channels, ...).

        Raises Unsupported in training where moving the statistics would change other nodes.
        """
        if self.training and self.shared:
            raise _C.Unsupported(
                "BatchNormalization: training: other nodes read its running statistics, too; want "
                "a file in which they are its own, or eval(), which leaves them as they are"
            )
        return F.batch_norm(
            x, mean, var, scale, bias, self.training, 1 - self.momentum, self.epsilon
        )

    def extra_repr(self) -> str:
        """Give epsilon and momentum."""
        return f"epsilon={self.epsilon}, momentum={self.momentum}"
