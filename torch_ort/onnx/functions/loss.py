"""Losses of classes."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from torch_ort.onnx.functions.table import MICROSOFT, dtype_of, of_onnx

# No label: PyTorch's losses always have a number that they leave out.
_NO_LABEL = -(2**63)


@of_onnx("NegativeLogLikelihoodLoss")
def negative_log_likelihood(
    scores: Tensor, labels: Tensor, weights: Tensor | None = None, *,
    ignore_index: int | None = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Give the negative log-probabilities of labels, from those of all classes (batch, C, ...)."""
    ignored = _NO_LABEL if ignore_index is None else ignore_index
    if weights is not None and weights.requires_grad:
        return _by_formula(scores, labels, weights, ignored, reduction)
    if scores.ndim > 4:  # PyTorch's kernels take two spatial dims
        loss = negative_log_likelihood(
            scores.flatten(2), labels.flatten(1), weights, ignore_index=ignore_index,
            reduction=reduction,
        )  # fmt: skip
        return loss.view(labels.shape) if reduction == "none" else loss
    return F.nll_loss(scores, labels.long(), weights, ignore_index=ignored, reduction=reduction)


def _by_formula(
    scores: Tensor, labels: Tensor, weights: Tensor, ignored: int, reduction: str
) -> Tensor:
    """Compute the same for weights that want gradients, which PyTorch's kernels have not."""
    counts = labels != ignored
    at = labels.long().masked_fill(~counts, 0)
    shares = weights[at] * counts
    losses = -scores.gather(1, at.unsqueeze(1)).squeeze(1) * shares
    if reduction == "none":
        return losses
    return losses.sum() / shares.sum() if reduction == "mean" else losses.sum()


@of_onnx("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(
    scores: Tensor, labels: Tensor, weights: Tensor | None = None, *,
    ignore_index: int | None = None, reduction: str = "mean", wanted: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Give the cross-entropy of scores (batch, C, ...) and labels, and log-probabilities."""
    is_trained = weights is not None and weights.requires_grad
    if is_trained or (len(wanted) > 1 and wanted[1]):
        log_prob = scores.log_softmax(1)
        loss = negative_log_likelihood(
            log_prob, labels, weights, ignore_index=ignore_index, reduction=reduction
        )
        return loss, log_prob
    ignored = _NO_LABEL if ignore_index is None else ignore_index
    loss = F.cross_entropy(
        scores, labels.long(), weights, ignore_index=ignored, reduction=reduction
    )
    return loss, None


@of_onnx("SoftmaxCrossEntropyLossInternal", domain=MICROSOFT, numbers=(3,))
def softmax_cross_entropy_internal(
    scores: Tensor, labels: Tensor, weights: Tensor | None = None,
    ignore_index: list[int] | None = None, *, reduction: str = "mean", wanted: tuple[bool, ...],
    output_type: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same, where the label that is left out is an input, with results of another dtype."""
    if output_type:
        scores = scores.to(dtype_of(output_type))
    if weights is not None:
        weights = weights.to(scores.dtype)
    return softmax_cross_entropy(
        scores, labels, weights, ignore_index=ignore_index[0] if ignore_index else None,
        reduction=reduction, wanted=wanted,
    )  # fmt: skip
