"""A model and its loss as one module, so that the loss is part of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ModuleWithLoss(torch.nn.Module):
    """A model together with its loss; calls return `(loss, prediction)`.

    `loss_fn(prediction, labels)` gets the last positional argument, or the keyword argument
    `labels`; the model gets all others. Compile this module instead of the model: with the loss in
    the graph the engine can fuse it, skip rows whose labels are ignored, and need not hold the
    matrix of logits. The model itself is `.model`, to save or evaluate it.

        model = torch_ort.ORTModule(torch_ort.ModuleWithLoss(net, torch.nn.CrossEntropyLoss()))
        loss, prediction = model(x, labels)

    A call without labels raises TypeError.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Return the loss and the prediction."""
        if "labels" in kwargs:
            labels = kwargs.pop("labels")
        elif args:
            *args, labels = args
        else:
            raise TypeError("ModuleWithLoss: want labels as the last argument or by keyword")
        prediction = self.model(*args, **kwargs)
        return self.loss_fn(prediction, labels), prediction
