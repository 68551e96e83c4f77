"""Calls of torch.autograd.Function as nodes of a graph: PythonOp and PythonOpGrad.

arguments.py takes a call apart, learn.py finds what it gives without running it in earnest, call.py
has the operators that stand for it in a trace, describe.py its attributes in files, wrap.py
`torch_ort.python_op`. The steps themselves are csrc/run/python_op.h.
"""
