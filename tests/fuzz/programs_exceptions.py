"""The one table of random programs that do not run in the engine with eager's outcome, and why."""

from __future__ import annotations

import re

# Words of a failure as a pattern, and the reason.
TABLE = (
    (
        "writes into (an argument that (shares its memory|is not dense)"
        "|`reshape` or `contiguous` of an argument|a leaf Variable)",
        "such a call of an ORTModule runs in eager PyTorch",
    ),
    (
        "forward (draws numbers in the memory order of|reads the memory of|gives) an argument"
        ".* not dense",
        "an ORTModule runs such a call in eager PyTorch",
    ),
    (
        "AOTAutograd: [A-Za-z]*(Error|Exception): ",
        "PyTorch's tracing refuses it, so it runs in eager PyTorch",
    ),
    ("unfold gave, where PyTorch's functionalization", "refused, so it runs in eager PyTorch"),
    (
        "DataDependentOutputException|data-dependent: Python asks for a number in a tensor",
        "PyTorch itself reads a number from data",
    ),
    ("node sym_float|a float that depends on data or sizes", "a float is made of a size"),
    ("dtype: got 'complex32'", "ONNX has no complex numbers of two halves"),
    ("argument of type complex", "an operator has a complex number as an argument"),
    (
        "Inference tensors cannot be saved for backward",
        "gradients are turned on in inference mode, so it runs in eager PyTorch",
    ),
    ("AOTAutograd has left out draws", "AOTAutograd leaves out draws that nothing reads"),
    ("Dynamo failed to run FX node with fake tensors", "Dynamo refuses it for all backends"),
)


def reason_for(words: str) -> str:
    """Say why a failure is expected; empty where it is not."""
    return next((reason for pattern, reason in TABLE if re.search(pattern, words)), "")
