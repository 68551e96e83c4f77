"""Calls of torch.autograd.Function as nodes of a graph: PythonOp and PythonOpGrad.

arguments.py divides a call's arguments, learn.py finds the shapes of its results by trial calls,
call.py has the operators that represent it in a trace, describe.py its attributes in files, wrap.py
`torch_ort.python_op`. The steps that run such nodes are in csrc/run/autograd/python_op.h.
"""
