"""The names of ONNX Runtime Training by import path, and where they are in torch_ort.

A name that torch_ort has not built yet raises ImportError, and says what does its work meanwhile.
Each name is looked for when its module is imported, so a placed file needs no change when more is
built.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ROOT = "onnxruntime.training"
_HERE = "torch_ort.onnxruntime_training"  # of what has no path that is shorter


@dataclass(frozen=True)
class Names:
    """Some names of one old module.

    `names` stand with spaces between them, `old=new` where the name is another one now. `source` is
    the module that has them, or will have. `instead` follows "use" in the error.
    """

    names: str
    source: str = ""
    instead: str = ""

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Give each old name with the new one."""
        for name in self.names.split():
            old, _, new = name.partition("=")
            yield old, new or old


_LOOP = "ORTModule in a training loop of PyTorch"
_FUSED_ADAM = Names("FusedAdam AdamWMode", "torch_ort.optim")
_FP16_OPTIMIZER = Names("FP16_Optimizer", "torch_ort.optim")
_SAMPLERS = Names(
    "LoadBalancingDistributedSampler LoadBalancingDistributedBatchSampler",
    "torch_ort.utils.data",
    "torch.utils.data.DistributedSampler",
)
_LEVELS = Names("DebugOptions LogLevel", "torch_ort.ortmodule")
_EXTENSIONS = Names("ORTMODULE_TORCH_CPP_DIR", f"{_HERE}.compat.extensions")
_OPTIMIZER_PASSES = Names("register_graph_optimizer", "torch_ort.ortmodule")
_LOSS_SCALERS = Names("LossScaler DynamicLossScaler", "torch_ort.trainers.loss_scaler")
_OPTIMIZER_CONFIGS = Names(
    "AdamConfig LambConfig SGDConfig _OptimizerConfig=OptimizerConfig", "torch_ort.optim"
)
_TRAINER = Names("ORTTrainer TrainStepInfo", "torch_ort.trainers.v1")
_TRAINER_OPTIONS = Names("ORTTrainerOptions", "torch_ort.trainers.v1")
_NATIVE_BLOCKS = Names(
    "Block TrainingBlock ForwardBlock Model empty_base base load_checkpoint_to_model "
    "save_checkpoint",
    instead=_LOOP,
)
_NATIVE_LOSSES = Names(
    "MSELoss CrossEntropyLoss BCEWithLogitsLoss L1Loss",
    instead="the losses of torch.nn, in a ModuleWithLoss",
)
_NATIVE_OPTIMIZERS = Names(
    "AdamW SGD ClipGradNorm AdamWOptimizer SGDOptimizer",
    instead="torch_ort.optim and torch.nn.utils.clip_grad_norm_",
)
_DYNAMO = Names(
    "register_backend aot_ort ort make_aot_ort OrtBackend",
    instead='torch.compile(model, backend="ort")',
)
_GRADIENT_GRAPH = Names(
    "export_gradient_graph export_as_ort_gradient_graph",
    instead="ORTModule with DebugOptions(save_onnx=True), whose files hold forward and backward",
)
_SYMBOLICS = Names(
    "CustomOpSymbolicRegistry custom_symbolic register_custom_op_symbolic",
    instead="no symbolic function: each operator that PyTorch knows runs as it is",
)
_EXCEPTIONS = Names(
    "ORTModuleFallbackException ORTModuleInitException ORTModuleDeviceException ORTModuleIOError "
    "ORTModuleTorchModelException ORTModuleONNXModelException",
    "torch_ort.ortmodule",
)

# Paths are relative to ROOT. A module whose names do not exist here yet cannot be imported, but a
# package can.
MODULES: dict[str, tuple[Names, ...]] = {
    "": (
        Names("ORTModule", "torch_ort.ortmodule"),
        _TRAINER,
        _TRAINER_OPTIONS,
        Names("TrainingSession TrainingParameters", instead=_LOOP),
        Names("PropagateCastOpsStrategy", "torch_ort.experimental.graph_config"),
    ),
    "amp": (_LOSS_SCALERS,),
    "amp.loss_scaler": (_LOSS_SCALERS,),
    "api": (
        Names(
            "CheckpointState Module Optimizer LRScheduler LinearLRScheduler",
            "torch_ort.onnx.training",
        ),
    ),
    "artifacts": (Names("generate_artifacts LossType OptimType", "torch_ort.onnx.artifacts"),),
    "checkpoint": (
        Names(
            "aggregate_checkpoints experimental_save_checkpoint experimental_load_checkpoint "
            "experimental_state_dict experimental_load_state_dict",
            "torch_ort.trainers.v1.checkpoint",
        ),
    ),
    "experimental": (_GRADIENT_GRAPH,),
    "experimental.exporter": (_GRADIENT_GRAPH,),
    "experimental.gradient_graph": (_GRADIENT_GRAPH,),
    "model_desc_validation": (
        Names("_ORTTrainerModelDesc=ModelDescription", f"{_HERE}.trainers.v1.model_desc"),
    ),
    "onnxblock": (_NATIVE_BLOCKS,),
    "onnxblock.blocks": (_NATIVE_BLOCKS,),
    "onnxblock.loss": (_NATIVE_LOSSES,),
    "onnxblock.optim": (_NATIVE_OPTIMIZERS,),
    "optim": (
        _FUSED_ADAM,
        _FP16_OPTIMIZER,
        _OPTIMIZER_CONFIGS,
    ),
    "optim.config": (_OPTIMIZER_CONFIGS,),
    "optim.fp16_optimizer": (_FP16_OPTIMIZER,),
    "optim.fused_adam": (_FUSED_ADAM,),
    "optim.lr_scheduler": (
        Names(
            "ConstantWarmupLRScheduler CosineWarmupLRScheduler LinearWarmupLRScheduler "
            "PolyWarmupLRScheduler _LRScheduler=LRScheduler",
            "torch_ort.optim.lr_scheduler",
        ),
    ),
    "ort_trainer": (
        Names(
            "ORTTrainer IODescription ModelDescription LossScaler save_checkpoint load_checkpoint",
            "torch_ort.trainers.v0",
        ),
    ),
    "ort_trainer_options": (_TRAINER_OPTIONS,),
    "ort_triton": (Names("register_triton_kernel", instead="torch.library.triton_op"),),
    "orttrainer": (_TRAINER,),
    "orttrainer_options": (_TRAINER_OPTIONS,),
    "ortmodule": (
        Names("ORTModule DebugOptions LogLevel register_graph_optimizer", "torch_ort.ortmodule"),
        _EXTENSIONS,
    ),
    "ortmodule._custom_autograd_function": (
        Names("enable_custom_autograd_support", "torch_ort.compat.custom_autograd"),
    ),
    "ortmodule._custom_gradient_registry": (
        Names("register_gradient", instead="torch.autograd.Function or torch.library"),
    ),
    "ortmodule._custom_op_symbolic_registry": (_SYMBOLICS,),
    "ortmodule._fallback": (
        _EXCEPTIONS,
        Names("_FallbackPolicy=FallbackPolicy", "torch_ort.ortmodule"),
    ),
    "ortmodule._fallback_exceptions": (_EXCEPTIONS,),
    "ortmodule._logger": (_LEVELS,),
    "ortmodule.debug_options": (_LEVELS,),
    "ortmodule.experimental": (),
    "ortmodule.experimental.hierarchical_ortmodule": (
        Names("HierarchicalORTModule", "torch_ort.ortmodule"),
    ),
    "ortmodule.experimental.json_config": (Names("load_from_json", "torch_ort.ortmodule"),),
    "ortmodule.experimental.pipe": (
        Names("ORTPipelineModule", instead="ORTModule around each layer of the pipeline"),
    ),
    "ortmodule.graph_optimizer_registry": (_OPTIMIZER_PASSES,),
    "ortmodule.graph_optimizers": (_OPTIMIZER_PASSES,),
    "ortmodule.graph_transformer_registry": (
        Names(
            "register_graph_transformer",
            instead="torch_ort.ortmodule.register_graph_optimizer, which gets forward and backward",
        ),
    ),
    "ortmodule.options": (_LEVELS,),
    "ortmodule.ortmodule": (Names("ORTModule", "torch_ort.ortmodule"),),
    "ortmodule.torch_cpp_extensions": (
        Names("is_installed ORTMODULE_TORCH_CPP_DIR", f"{_HERE}.compat.extensions"),
    ),
    "ortmodule.torch_cpp_extensions.install": (),
    "pytorch": (Names("trainer", "torch_ort.trainers"),),
    "torchdynamo": (_DYNAMO,),
    "torchdynamo.ort_backend": (_DYNAMO,),
    "torchdynamo.register_backend": (_DYNAMO,),
    "utils": (),
    "utils.data": (
        _SAMPLERS,
        Names("TokenBudgetPacker TokenBudgetBatchSampler", "torch_ort.utils.data"),
    ),
    "utils.data.sampler": (_SAMPLERS,),
    "utils.hooks": (
        Names(
            "GlobalSubscriberManager StatisticsSubscriber SubscriberBase inspect_activation",
            "torch_ort.convergence",
        ),
        Names(
            "ZeROOffloadSubscriber configure_ort_compatible_zero_stage3",
            instead="ORTMODULE_ENABLE_ZERO_STAGE3=1, as docs/distributed.md says",
        ),
    ),
    "utils.hooks.merge_activation_summary": (),
}

# Files beside the folder of ROOT in the package onnxruntime, with the modules that they provide.
BESIDE = {"capi/ort_trainer.py": "ort_trainer"}

# Modules that `python -m` runs, with the modules that run instead of them.
COMMANDS = {
    "ortmodule.torch_cpp_extensions.install": "torch_ort.configure",
    "utils.hooks.merge_activation_summary": "torch_ort.convergence.merge_activation_summary",
}


def open_module(namespace: dict[str, Any], path: str | None = None) -> None:
    """Fill the namespace of a placed module with what torch_ort has of it.

    `path` is that of the table for a module that stands elsewhere. Raises ImportError if it has
    names, none is built, and no module stands below it.
    """
    if path is None:
        # Run by `python -m`, a module is called __main__. Its spec has its name.
        path = namespace["__spec__"].name.removeprefix(ROOT).lstrip(".")
    rows = MODULES.get(path, ())
    built, missing = _look_up(path, rows)
    if rows and not built and not is_package(path):
        raise ImportError(_not_built(_dotted(path), rows[0].instead), name=_dotted(path))

    def __getattr__(name: str) -> Any:
        if name in missing:
            raise ImportError(missing[name], name=_dotted(path))
        below = f"{path}.{name}".lstrip(".")
        if below in MODULES:  # old scripts use modules that they have not imported
            return importlib.import_module(_dotted(below))
        raise AttributeError(f"module {_dotted(path)!r} has no attribute {name!r}")

    namespace.update(built, __all__=sorted(built), __getattr__=__getattr__)
    if namespace["__name__"] == "__main__" and path in COMMANDS:
        _run(path)


def is_package(path: str) -> bool:
    """Tell whether modules stand below this one."""
    return any(other.startswith(f"{path}.") for other in MODULES) or not path


def _look_up(path: str, rows: tuple[Names, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Give the objects that are built, and for the other names the text of the error."""
    built: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for row in rows:
        source = _import_if_there(row.source)
        for old, new in row.pairs():
            if hasattr(source, new):
                built[old] = getattr(source, new)
            else:
                missing[old] = _not_built(f"{_dotted(path)}.{old}", row.instead)
    return built, missing


def _run(path: str) -> None:
    command = COMMANDS[path]
    if not _is_there(command):
        sys.exit(_not_built(_dotted(path), ""))
    runpy.run_module(command, run_name="__main__", alter_sys=True)


def _import_if_there(name: str) -> Any:
    # An error inside of an existing module does not mean that the module is missing.
    return importlib.import_module(name) if _is_there(name) else None


def _is_there(name: str) -> bool:
    # Each level is looked up by itself, because find_spec raises if a package above is missing.
    parts = name.split(".") if name else []
    above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return bool(parts) and all(importlib.util.find_spec(it) is not None for it in above)


def _not_built(name: str, instead: str) -> str:
    use = f"use {instead}" if instead else "nothing takes its place"
    return f"{name}: not built yet in torch_ort; {use}"


def _dotted(path: str) -> str:
    return f"{ROOT}.{path}" if path else ROOT
