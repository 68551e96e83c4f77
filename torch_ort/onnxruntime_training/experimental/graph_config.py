"""Options to move casts through the graph: accepted for old scripts and ignored with a message."""

from __future__ import annotations

from enum import Enum

from torch_ort.capture import logs
from torch_ort.onnxruntime_training.experimental.arguments import check_kind, check_model
from torch_ort.ortmodule import ORTModule


class PropagateCastOpsStrategy(Enum):
    """How ONNX Runtime Training moved casts."""

    NONE = -1
    INSERT_AND_REDUCE = 0
    FLOOD_FILL = 1
    REMOVE_INPUT_OUTPUT_UP_DOWN_CASTS = 2


class PropagateCastLevel(Enum):
    """Through which nodes it moved them. The third name is spelled as it was there."""

    NOT_USED = -1
    FASTER_KEEP_PRECISION = 1
    AGGRRESSIVE_MIXED_PRECISION = 2


def set_propagate_cast_ops_optimization(
    model: ORTModule,
    strategy: PropagateCastOpsStrategy = PropagateCastOpsStrategy.FLOOD_FILL,
    level: PropagateCastLevel = PropagateCastLevel.NOT_USED,
) -> None:
    """Check the arguments, and warn once that casts are not moved if that is asked for.

    The engine leaves casts where autocast has put them. Inside of fused regions, which compute in
    float32, they cost nothing. Raises TypeError for arguments of other classes.
    """
    check_model(model)
    check_kind("strategy", strategy, PropagateCastOpsStrategy)
    check_kind("level", level, PropagateCastLevel)
    is_asked = (
        strategy is not PropagateCastOpsStrategy.NONE and level is not PropagateCastLevel.NOT_USED
    )
    if is_asked:
        logger = logs.make_logger(model._debug_options.log_level)
        logs.say_once(
            logger,
            f"set_propagate_cast_ops_optimization: {strategy.name}, {level.name}: "
            "never needed, ignored: casts are parts of fused kernels, which read and write each "
            "dtype",
        )
