"""Fallback of an ORTModule to plain PyTorch: kinds of failure, and the policy that allows them."""

from __future__ import annotations

import enum


class ORTModuleFallbackException(Exception):
    """Base of the errors that an ORTModule raises if the policy allows no plain PyTorch."""


class ORTModuleInitException(ORTModuleFallbackException):
    """The package cannot work in this environment; kept for programs that name the class."""


class ORTModuleDeviceException(ORTModuleFallbackException):
    """The module and its inputs are on no device or on several; one is needed."""


class ORTModuleIOError(ORTModuleFallbackException):
    """An input or output is of a type that a captured graph cannot take."""


class ORTModuleTorchModelException(ORTModuleFallbackException):
    """The module is of a kind that cannot be wrapped."""


class ORTModuleONNXModelException(ORTModuleFallbackException):
    """The module cannot be captured, compiled or run as a graph."""


class FallbackPolicy(enum.IntFlag):
    """Which failures make an ORTModule run in plain PyTorch instead of raising an error.

    Values combine with `|`; `FALLBACK_DISABLE` wins over all others. The option `fallback_policy`
    and the variable ORTMODULE_FALLBACK_POLICY take the names, joined by `|`.
    """

    FALLBACK_DISABLE = 1
    FALLBACK_FORCE_TORCH_FORWARD = 2
    FALLBACK_FORCE_TORCH_BACKWARD = 4
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16
    FALLBACK_UNSUPPORTED_TORCH_MODEL = 32
    FALLBACK_UNSUPPORTED_ONNX_MODEL = 64
    FALLBACK_BAD_INITIALIZATION = 128

    def allows(self, kind: type[Exception]) -> bool:
        """Tell whether a failure of exactly this class may end in plain PyTorch."""
        if self & FallbackPolicy.FALLBACK_DISABLE:
            return False
        return any(self & bit and kind in kinds for bit, kinds in _KINDS.items())


_ALL = (
    ORTModuleFallbackException,
    ORTModuleDeviceException,
    ORTModuleIOError,
    ORTModuleTorchModelException,
    ORTModuleONNXModelException,
)
_KINDS = {
    FallbackPolicy.FALLBACK_FORCE_TORCH_FORWARD: _ALL,
    FallbackPolicy.FALLBACK_FORCE_TORCH_BACKWARD: _ALL,
    FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE: (ORTModuleDeviceException,),
    FallbackPolicy.FALLBACK_UNSUPPORTED_DATA: (ORTModuleIOError,),
    FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL: (ORTModuleTorchModelException,),
    FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL: (ORTModuleONNXModelException,),
    FallbackPolicy.FALLBACK_BAD_INITIALIZATION: (
        ORTModuleInitException,
        ORTModuleTorchModelException,
    ),
}

DEFAULT_POLICY = (
    FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE
    | FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
    | FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
    | FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
)
