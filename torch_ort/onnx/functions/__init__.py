"""Operators of ONNX as functions of PyTorch's, for those that the engine has no calls for.

A family of operators is a file, which registers its functions in table.py. They are written for
tensors alone: eager PyTorch runs them, and `torch.compile` and ORTModule capture what they call.
"""

from __future__ import annotations

from torch_ort.onnx.functions import activation as activation
from torch_ort.onnx.functions import attention as attention
from torch_ort.onnx.functions import classical as classical
from torch_ort.onnx.functions import elementwise as elementwise
from torch_ort.onnx.functions import images as images
from torch_ort.onnx.functions import indexing as indexing
from torch_ort.onnx.functions import linear as linear
from torch_ort.onnx.functions import loss as loss
from torch_ort.onnx.functions import matmul as matmul
from torch_ort.onnx.functions import modes as modes
from torch_ort.onnx.functions import normalization as normalization
from torch_ort.onnx.functions import quantization as quantization
from torch_ort.onnx.functions import recurrent as recurrent
from torch_ort.onnx.functions import reduction as reduction
from torch_ort.onnx.functions import signal as signal
from torch_ort.onnx.functions import windows as windows
from torch_ort.onnx.functions.table import TABLE as TABLE
from torch_ort.onnx.functions.table import Row as Row
from torch_ort.onnx.functions.types import types_of as types_of
