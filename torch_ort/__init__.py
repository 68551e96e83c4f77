"""torch_ort: a training compiler for PyTorch, `torch.compile(model, backend="ort")`.

PyTorch finds the backend through an entry point, so torch.compile needs no import of this package.
Importing it gives ORTModule, the optimizers, and the tools that show what the compiler did. This
file has public names only.
"""

import torch as _torch

from torch_ort import _build_info, _installed

_installed.check_processor(_build_info.PROCESSOR)
_installed.check_torch(
    _build_info.TORCH_VERSION, _torch.__version__, _build_info.CXX11_ABI,
    _torch.compiled_with_cxx11_abi(),
)  # fmt: skip
_installed.warn_of_namesakes(_build_info.VERSION)

from torch_ort import optim  # noqa: E402
from torch_ort._C import DeviceError, Error, InternalError, Unsupported, UserError  # noqa: E402
from torch_ort.core.counting import counters, empty_cache, reset_counters  # noqa: E402
from torch_ort.integrations import names as _names  # noqa: E402
from torch_ort.reports.profile_result import Profile  # noqa: E402
from torch_ort.reports.profiling import profile  # noqa: E402
from torch_ort.reports.report import Report, explain  # noqa: E402
from torch_ort.seeding import set_seed  # noqa: E402

_names.register()

__version__ = _build_info.VERSION
__all__ = [
    "DebugOptions",
    "DeviceError",
    "Error",
    "InternalError",
    "LogLevel",
    "ModuleWithLoss",
    "ORTModule",
    "Profile",
    "Report",
    "Unsupported",
    "UserError",
    "__version__",
    "compile",
    "counters",
    "empty_cache",
    "explain",
    "export_onnx",
    "load_onnx",
    "optim",
    "profile",
    "python_op",
    "reset_counters",
    "set_seed",
]

# Names of packages that accompanied ONNX Runtime Training's torch_ort, and what to use instead.
_ELSEWHERE = {
    "ORTInferenceModule": "ORTModule under torch.no_grad()",
    "OpenVINOProviderOptions": "ORTModule under torch.no_grad(), which needs no provider",
}


def __getattr__(name: str) -> object:
    # Imported late, so that `python -m torch_ort.options` is the first to import the options.
    if name in ("DebugOptions", "LogLevel", "ModuleWithLoss", "ORTModule"):
        from torch_ort import ortmodule

        return getattr(ortmodule, name)
    if name == "python_op":
        from torch_ort.functions.wrap import python_op

        return python_op
    # These take long to import.
    if name == "load_onnx":
        from torch_ort.onnx.load import load_onnx

        return load_onnx
    if name == "export_onnx":
        from torch_ort.onnx.save import export_onnx

        return export_onnx
    if name == "compile":
        from torch_ort import scripted

        return scripted.compile
    if name in _ELSEWHERE:
        raise ImportError(
            f"torch_ort.{name}: this package has no such name, which was in torch-ort-infer; use "
            f"{_ELSEWHERE[name]} instead",
            name="torch_ort",
        )
    raise AttributeError(f"module 'torch_ort' has no attribute {name!r}")
