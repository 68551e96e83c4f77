"""Checkpoints of the second ORTTrainer: those of all ranks as one, and folders of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_ort.onnxruntime_training.trainers import checkpoint_files

PathLike = checkpoint_files.PathLike


def aggregate_checkpoints(paths: Sequence[PathLike], pytorch_format: bool = True) -> dict[str, Any]:
    """Put the checkpoints of all ranks together.

    Args:
        paths: The files of `ORTTrainer.save_checkpoint`.
        pytorch_format: Whether to give the weights and buffers alone, by the model's own names.

    Raises FileNotFoundError, and ValueError for files of another kind or of different runs.
    """
    state = aggregated(paths)
    return state["model"]["full_precision"] if pytorch_format else state


def aggregated(paths: Sequence[PathLike]) -> dict[str, Any]:
    """Give one state of what several ranks have saved; all of it is the first one's but moments."""
    if not paths:
        raise ValueError("load_checkpoint: got no path, want one, or those of all ranks")
    states = [checkpoint_files.read(path) for path in paths]
    for path, state in zip(paths, states, strict=True):
        if "train_step_info" not in state:
            raise ValueError(f"{path}: got no state of training, want a checkpoint of ORTTrainer")
        if state["train_step_info"] != states[0]["train_step_info"]:
            raise ValueError(f"{path}: got another step than {paths[0]}, want files of one moment")
    moments = {name: kept for state in states for name, kept in state["optimizer"].items()}
    return {**states[0], "optimizer": moments}


# The functions that the trainer had before its methods, with a folder and a prefix instead of a
# path.


def experimental_state_dict(
    ort_trainer: Any, include_optimizer_state: bool = True
) -> dict[str, Any]:
    """Give the state of a trainer, or the weights of its model alone."""
    return ort_trainer.state_dict(pytorch_format=not include_optimizer_state)


def experimental_load_state_dict(
    ort_trainer: Any, state_dict: Mapping[str, Any], strict: bool = False
) -> None:
    """Go on from what `experimental_state_dict` gave."""
    ort_trainer.load_state_dict(state_dict, strict)


def experimental_save_checkpoint(
    ort_trainer: Any,
    checkpoint_dir: PathLike,
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Write a trainer's state, and data of the caller beside it, as `<prefix>.ort.pt`.

    In ZeRO stage 1 with several ranks each one writes its part, as
    `<prefix>.ZeRO.<rank>.<world size - 1>.ort.pt`; else rank 0 writes alone.

    Raises ValueError for data that cannot be read back as plain data.
    """
    given = dict(checkpoint_state_dict or {})
    checkpoint_files.check_plain("checkpoint_state_dict", given)
    rank, world_size = _ranks(ort_trainer)
    if rank is not None or ort_trainer.options.distributed.world_rank == 0:
        name = checkpoint_files.file_name(checkpoint_prefix, rank, world_size)
        state = ort_trainer.state_dict()
        if not include_optimizer_state:
            state |= {"optimizer": {}, "gradients": {}}
        checkpoint_files.write(
            checkpoint_files.in_folder(checkpoint_dir, name), {**state, "user_dict": given}
        )


def experimental_load_checkpoint(
    ort_trainer: Any,
    checkpoint_dir: PathLike,
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
) -> dict[str, Any]:
    """Let a trainer go on from a checkpoint; gives the data of the caller that is in it.

    Raises AssertionError where there is no such file, ValueError for a file of another kind.
    """
    found = checkpoint_files.find(checkpoint_dir, checkpoint_prefix, *_ranks(ort_trainer))
    state = aggregated(found)
    ort_trainer.load_state_dict(state, strict)
    return state["user_dict"]


def _ranks(ort_trainer: Any) -> tuple[int | None, int]:
    distributed = ort_trainer.options.distributed
    rank = distributed.world_rank if ort_trainer.is_partitioned else None
    return rank, distributed.world_size
