"""How recorded graphs run: a node of autograd around the engine's forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_ort.capture.aot_compat import never_compiled
from torch_ort.capture.recorder import Recording
from torch_ort.capture.shape_rules import Spec, dense_order, is_contiguous

if TYPE_CHECKING:
    from torch_ort.capture.joint import ForwardRunner, InferenceRunner, JointLayout


class RecordedRun:
    """Runs a recorded graph without gradients."""

    def __init__(self, recording: Recording, runner: InferenceRunner) -> None:
        self._positions = recording.positions
        self._runner = runner

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run with flat inputs; give the function's results."""
        with torch.no_grad():
            outputs = self._runner(list(inputs))
        return [outputs[i] for i in self._positions]


class RecordedStep:
    """Runs a recorded training graph: forward now, backward when autograd comes to its node."""

    def __init__(self, recording: Recording, layout: JointLayout, forward: ForwardRunner) -> None:
        self._positions = recording.positions
        self.forward = forward
        self.num_outputs = recording.num_outputs
        self._unreached = recording.unreached
        self.without_gradient = [
            i for i in range(recording.num_outputs) if i not in recording.tangents
        ]
        self.tangents = [
            _Tangent(i, node.meta["val"].spec)
            for i, node in zip(recording.tangents, layout.tangents, strict=True)
        ]

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run forward with flat inputs; give the function's results."""
        if self._unreached:  # autograd would walk on from them
            given = list(inputs)
            for i in self._unreached:
                given[i] = given[i].detach()
            inputs = tuple(given)
        outputs = _Step.apply(self, *inputs)
        return [outputs[i] for i in self._positions]

    @never_compiled
    def run_backward(
        self, saved: Sequence[torch.Tensor], sizes: Sequence[torch.Size], gradients: Sequence[Any]
    ) -> Sequence[Any]:
        """Run backward; give the gradients of the flat inputs."""
        tangents = [
            tangent.resolve(gradients[tangent.output], size)
            for tangent, size in zip(self.tangents, sizes, strict=True)
        ]
        given = [*saved, *tangents]
        if torch.is_grad_enabled():  # create_graph=True
            return _Once.apply(self, *given)
        return self.forward.backward(given)


class _Tangent:
    """A gradient that comes back, in the layout that the graph was recorded for."""

    def __init__(self, output: int, spec: Spec) -> None:
        self.output = output  # of which output of the graph it is
        self._dtype = spec.dtype
        self._device = spec.device
        # By strides, outermost first; None for row-major.
        self._order = None if is_contiguous(spec) else dense_order(spec)

    def resolve(self, gradient: torch.Tensor | None, sizes: torch.Size) -> torch.Tensor:
        """Give zeros where autograd brings nothing, a copy of what has another layout."""
        if gradient is None:
            gradient = torch.zeros(sizes, dtype=self._dtype, device=self._device)
        if self._order is None:
            return gradient.contiguous()
        ordered = gradient.permute(self._order)
        if ordered.is_contiguous():
            return gradient
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        return ordered.contiguous().permute(inverse)


class _Step(torch.autograd.Function):
    """The node: what backward reads is saved as autograd saves, so that edits are noticed."""

    @staticmethod
    def forward(ctx: Any, step: RecordedStep, *inputs: Any) -> tuple:
        """Run the forward half."""
        results = step.forward(list(inputs))
        outputs = results[: step.num_outputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(outputs[i] for i in step.without_gradient if isinstance(outputs[i], torch.Tensor))
        )
        ctx.step = step
        ctx.is_deterministic = torch.are_deterministic_algorithms_enabled()
        ctx.sizes = [outputs[tangent.output].shape for tangent in step.tangents]
        # The token as well: what the engine keeps for backward is let go with it.
        ctx.save_for_backward(*results[step.num_outputs :])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple:
        """Run the backward half."""
        # A checkpoint around the step computes forward again in here, perhaps in compiled code.
        saved = ctx.saved_tensors
        if torch.are_deterministic_algorithms_enabled() and not ctx.is_deterministic:
            raise RuntimeError(
                "torch_ort: torch.use_deterministic_algorithms was switched on after forward has "
                "run: the backward of that forward may not be deterministic"
            )
        return (None, *ctx.step.run_backward(saved, ctx.sizes, gradients))


# Autograd calls it from wherever, also where Dynamo compiles what it meets.
never_compiled(_Step.backward, nor_what_it_calls=False)


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated again, and say so."""

    @staticmethod
    def forward(ctx: Any, step: RecordedStep, *given: Any) -> tuple:
        """Run the backward half."""
        return tuple(step.forward.backward(list(given)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple:
        """Refuse."""
        raise RuntimeError(
            "torch_ort does not currently support double backward: a graph holds one backward "
            "(create_graph=True works as long as nothing differentiates the gradients)"
        )
