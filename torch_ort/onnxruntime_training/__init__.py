"""What users of ONNX Runtime Training know by name, apart from ORTModule: nothing here compiles.

They import it by other paths: `torch_ort.trainers`, `torch_ort.convergence`, `torch_ort.compat`,
`torch_ort.experimental`, `torch_ort.utils.data` and, for optimizers, `torch_ort.optim`. Modules
there only name what is in this folder.
"""
