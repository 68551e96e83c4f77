"""The switch of ONNX Runtime Training for torch.autograd.Function."""

from __future__ import annotations

import logging

from torch_ort.functions import capturing


def enable_custom_autograd_support(to_enable: bool = True) -> None:
    """Let captures to come make PythonOps of Functions, or trace through all of them.

    Wins over ORTMODULE_ENABLE_CUSTOM_AUTOGRAD, in the whole process.
    """
    capturing.switch(to_enable)
    logging.getLogger("orttraining").log(
        logging.INFO if to_enable else logging.WARNING,
        "enable_custom_autograd_support: each torch.autograd.Function is %s from now on",
        "a PythonOp" if to_enable else "traced through, with its own backward,",
    )
