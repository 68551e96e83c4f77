"""The backends that train_step.py measures, by name."""

ORT_GRAPHS = "ort_graphs"  # the engine in CUDA graphs
# Those that are the engine.
OURS = ("ort", "ortmodule", ORT_GRAPHS)
# Modes of inductor, which are no backends by name: its kernels in CUDA graphs, and those that it
# found to be the fastest of several.
GRAPHS, AUTOTUNE = "inductor_graphs", "inductor_autotune"
MODES = {GRAPHS: "reduce-overhead", AUTOTUNE: "max-autotune-no-cudagraphs"}
# What a replay allocates, no counter of memory sees.
IN_GRAPHS = (GRAPHS, ORT_GRAPHS)
# Eager PyTorch with the products of oneDNN.
ONEDNN = "eager_onednn"
EAGER = ("eager", ONEDNN)
