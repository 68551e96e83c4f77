"""The tables of random programs that do not run in the engine with eager's outcome, and why.

The second one has the reasons for which the recorder leaves graphs to AOTAutograd. A reason that is
in no table fails a program: somebody has to read it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
    ("AOTAutograd: [A-Za-z]*(Error|Exception): ",
     "PyTorch's tracing refuses it, so it runs in eager PyTorch"),
    ("has backward hooks, which a captured graph would not call",
     "an ORTModule runs such a module in eager PyTorch"),
    (
        "of an argument or a parameter, which keeps it after the call"
        "|forward assigns to `data` of an argument or a parameter",
        "an ORTModule runs such a call in eager PyTorch",
    ),
    ("forward gives other memory to a tensor", "refused, so it runs in eager PyTorch"),
    ("unfold gave, where PyTorch's functionalization", "refused, so it runs in eager PyTorch"),
    ("DataDependentOutputException|data-dependent: Python asks for a number in a tensor",
     "PyTorch itself reads a number from data"),
    ("node sym_float|a float that depends on data or sizes", "a float is made of a size"),
    ("dtype: got 'complex32'", "ONNX has no complex numbers of two halves"),
    ("argument of type complex", "an operator has a complex number as an argument"),
    ("Inference tensors cannot be saved for backward",
     "gradients are turned on in inference mode, so it runs in eager PyTorch"),
    ("backward.. is called under .*, for which its graph was not captured: AOTAutograd",
     "of such a graph only a backward outside of autocast is known"),
    ("cannot run again: its inputs were freed, or were written into after the call",
     "backward in another autocast than expected raises once its inputs are gone"),
    ("numbers of attributes are constants where the recorder cannot capture",
     "a module that counts, and makes floats of sizes, runs in eager PyTorch"),
    ("asks Dynamo to trace again, which a module's capture does without",
     "PyTorch's trace makes a tensor of a changing float, so it runs in eager PyTorch"),
    ("symbolic size: got BitwiseFn", "the engine's sizes have no operations on bits"),
    ("AOTAutograd has left out draws", "AOTAutograd leaves out draws that nothing reads"),
    ("Dynamo failed to run FX node with fake tensors", "Dynamo refuses it for all backends"),
)  # fmt: skip


# Of an ORTModule whose forward assigns attributes.
FIRST_CALLS = (
    "it ran in eager PyTorch: .*'fallbacks': 0,.*'captures_refused': 0, "
    "'calls_left_to_eager': [123],",
    "the first call of an ORTModule sets up what later ones rely on",
)
_ASSIGNS = re.compile(r"^\s*self\.\w+ (=|\W{1,2}=) ", re.MULTILINE)


def reason_for(words: str, road: str = "", lines: Sequence[str] = ()) -> str:
    """Say why a failure of a program with these lines is expected; empty where it is not."""
    assigns = road == "ortmodule" and any(map(_ASSIGNS.search, lines))
    table = (FIRST_CALLS, *TABLE) if assigns else TABLE
    return next((reason for pattern, reason in table if re.search(pattern, words)), "")


# Words by which the recorder says why it leaves a capture to AOTAutograd, and why that is right.
HANDED_OVER = (
    ("_local_scalar_dense.* depends on numbers", "Python reads a number from data"),
    (r"what is done depends on .* is unbacked", "sizes that data tells are compared"),
    ("operators that take graphs, or transforms of torch.func", "a checkpoint, or vmap"),
    ("which the caller brings, is written into", "Dynamo's graph writes into an argument"),
    ("which autograd watches, is written into", "gradients come from before the write, too"),
    ("input .* gets another shape", "an argument gets another shape in place"),
    ("depends on sizes and is no integer", "a truth or a float is made of sizes"),
    ("a size has to be constant", "AOTAutograd knows whether a size has to be constant"),
    ("a size and a number of the call are combined", "an expression of sizes and numbers"),
    ("outputs share memory, and it is not known whose", "AOTAutograd makes views anew"),
    ("shares its memory with another, and is no view of it", "AOTAutograd makes views anew"),
    ("output .* is a SymBool", "a truth leaves the graph of Dynamo"),
    ("is a SparseTensor|of layout torch.sparse", "a sparse tensor"),
    ("grad mode is switched inside", "an output is made under another grad mode"),
    ("outputs require grad, and no input gets one", "gradients of nothing"),
    ("promote_types.* makes tensors from none", "Dynamo's decomposition of torch.tensor"),
    ("'torch._C._SymNode' object has no attribute", "PyTorch's nodes of sizes lack abs and bits"),
    (
        "size of tensor a .* must match the size of tensor b .* at non-singleton",
        "a size that is 1 by chance is broadcast",
    ),
    ("NYI SymInt equality", "PyTorch's C++ compares no symbolic scalars"),
    ("dim: overflow", "PyTorch's largest integer stands for the end of a dim"),
    ("unhashable type: non-nested SymInt", "Python looks a number up in a dict"),
)


def unknown_of(reasons: list[str]) -> list[str]:
    """Give those of the recorder's reasons that no pattern of HANDED_OVER matches."""
    return [
        reason
        for reason in reasons
        if not any(re.search(pattern, reason) for pattern, _ in HANDED_OVER)
    ]
