"""Options of ONNX Runtime Training that have no effect here, or that are refused."""

from __future__ import annotations

import logging
from typing import Any

from torch_ort.options import NEWEST_OPSET, OLDEST_OPSET

_logger = logging.getLogger("torch_ort.trainers")
_warned: set[str] = set()

# By the last part of an option's name. The first ones do not change the numbers of a run.
_NOT_NEEDED = {
    "use_invertible_layernorm_grad": "the planner keeps what backward reads, and nothing else",
    "use_memory_efficient_gradient": "gradients take over the memory of dead activations anyway",
    "memory_efficient_gradient": "gradients take over the memory of dead activations anyway",
    "run_symbolic_shape_infer": "sizes of all tensors are symbols from the capture on",
    "_enable_internal_postprocess=False": "the captured graph needs no repair",
    "enable_internal_postprocess": "the captured graph needs no repair",
    "enable_onnx_contrib_ops": "files have the nodes that their opset allows",
    "check_model_export": "python -m torch_ort.debug compares the engine with eager PyTorch",
    "mem_limit": "PyTorch's allocator holds the memory: torch.cuda.set_per_process_memory_fraction",
    "attn_dropout_recompute": "torch.utils.checkpoint inside of the model recomputes",
    "gelu_recompute": "torch.utils.checkpoint inside of the model recomputes",
    "transformer_layer_recompute": "torch.utils.checkpoint around the layers recomputes",
    "number_recompute_layers": "torch.utils.checkpoint around the layers recomputes",
    "propagate_cast_ops_config": "casts stay where autocast puts them",
    "provider_options": "PyTorch's build and the model's device choose where kernels run",
    "session_options": "options of the engine stand in docs/options.md",
    "local_rank": "torch.cuda.set_device chooses a GPU",
    "data_parallel_size": "all ranks hold the same model and other data",
}
_REFUSED = {
    "enable_adasum": "gradients of ranks are averaged; leave it out",
    "_extra_postprocess": "torch_ort.ortmodule.register_graph_optimizer changes the graph",
    "extra_postprocess": "torch_ort.ortmodule.register_graph_optimizer changes the graph",
    "optimized_model_filepath": "give ORTModule(model, DebugOptions(save_onnx=True, "
    'onnx_prefix="name")) as the model, which writes graphs at each stage',
    "graph_save_paths": "give ORTModule(model, DebugOptions(save_onnx=True, "
    'onnx_prefix="name")) as the model, which writes graphs at each stage',
    "horizontal_parallel_size": "torch.distributed.tensor.parallel splits layers among ranks",
    "pipeline_parallel": "torch.distributed.pipelining splits a model among ranks",
}


def tell_once(option: str, is_set: Any) -> None:
    """Say once in a process that an option changes nothing, if it is set, and why."""
    if is_set and option not in _warned:
        _warned.add(option)
        reason = _NOT_NEEDED[option.rpartition(".")[2]]
        _logger.warning("ORTTrainer: %s changes nothing here: %s", option, reason)


def refuse(option: str, value: Any) -> None:
    """Raise ValueError for an option that is set and cannot be obeyed."""
    if value:
        advice = _REFUSED[option.rpartition(".")[2]]
        raise ValueError(f"{option}: got {value!r}, which torch_ort does not have; {advice}")


def checked_stage(stage: int) -> int:
    """Give a stage of ZeRO; raises ValueError unless it is 0 or 1."""
    if stage not in (0, 1):
        raise ValueError(
            f"deepspeed_zero_stage: got {stage!r}, want 0 or 1; for other stages of ZeRO use "
            "deepspeed.initialize(model=ORTModule(model), ...), or fully_shard of PyTorch"
        )
    return stage


def checked_opset(option: str, opset: int) -> int:
    """Give an opset; raises ValueError for one that files cannot have."""
    if not isinstance(opset, int) or not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise ValueError(f"{option}: got {opset!r}, want from {OLDEST_OPSET} to {NEWEST_OPSET}")
    return opset
