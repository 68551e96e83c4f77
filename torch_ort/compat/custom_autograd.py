"""The switch of ONNX Runtime Training for torch.autograd.Function, which has nothing to do here."""

from __future__ import annotations

import logging


def enable_custom_autograd_support(to_enable: bool = True) -> None:
    """Say that functions are traced through, whatever is asked for."""
    logger = logging.getLogger("orttraining")
    if to_enable:
        logger.info(
            "enable_custom_autograd_support: nothing has to be enabled: each "
            "torch.autograd.Function is traced through, with its own backward"
        )
    else:
        logger.warning(
            "enable_custom_autograd_support: got False, which changes nothing: each "
            "torch.autograd.Function is traced through, with its own backward"
        )
