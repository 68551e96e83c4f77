"""A model and its loss as one module, so that the loss is part of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ModuleWithLoss(torch.nn.Module):
    """Computes a model's prediction and its loss: `(loss, prediction)`.

    The last positional argument, or the keyword argument `labels`, goes to
    `loss_fn(prediction, labels)`; the model gets the others. Wrap this module, and not the model,
    in an ORTModule or torch.compile: what the engine knows of the loss (labels that are ignored,
    gradients that only the loss needs) it can use. The model itself, to be saved or evaluated, is
    `.model`.
    Raises TypeError for a call without labels.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Give the loss and the prediction."""
        if "labels" in kwargs:
            labels = kwargs.pop("labels")
        elif args:
            *args, labels = args
        else:
            raise TypeError("ModuleWithLoss: want labels as the last argument or by keyword")
        prediction = self.model(*args, **kwargs)
        return self.loss_fn(prediction, labels), prediction
