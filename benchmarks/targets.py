"""The figures that backend `ort` has to reach, and whether a row reaches them."""

from dataclasses import dataclass

FIRST_STEP_VS_AOT_EAGER = 0.95
FIRST_STEP_VS_INDUCTOR = 1 / 6
STEADY_VS_EAGER = 1.03
# Overhead dominates this model's step, so an engine has more to win there.
STEADY_VS_EAGER_BY_MODEL = {"lm_d64": 0.6}
STEADY_VS_INDUCTOR = 1 / 0.97
PEAK_VS_EAGER = 1.0
# What wrapping a module costs over torch.compile's guards.
ORTMODULE_VS_ORT = 1.02
ORTMODULE_FIRST_VS_ORT = 1.0
STEP_OVERHEAD_US = 1.0
# A step of FusedAdam: its time over PyTorch's fused one, its speed over that of a copy of as many
# bytes.
FUSED_ADAM_VS_TORCH = 1.0
FUSED_ADAM_OF_COPY = 0.9
# Samples a second of Hugging Face's Trainer over those of the same loop without it.
TRAINER_VS_LOOP = 0.97
# This build's figure over that of another checkout (--against).
AGAINST_OTHER_BUILD = {"step": 1.03, "first step": 1.05, "peak": 1.01}
AGAINST_OTHER_BUILD_MEAN = 1.01


@dataclass(frozen=True)
class Verdict:
    """One target and what was measured; nothing is met while a step ran outside the engine."""

    kind: str
    name: str
    measured: float
    limit: float
    fallbacks: int | None

    @property
    def met(self) -> bool:
        """Whether the measured value is within its limit and no graph was left to eager."""
        return self.measured <= self.limit and self.fallbacks == 0

    def __str__(self) -> str:
        state = "met" if self.met else "missed"
        # Without its counters a figure may be eager's own.
        if self.fallbacks != 0:
            state += ", not counted" if self.fallbacks is None else ", fell back"
        return f"{state} ({self.measured:.4g}, want ≤ {self.limit:.4g})"


def steady_limit(model: str) -> float:
    return STEADY_VS_EAGER_BY_MODEL.get(model, STEADY_VS_EAGER)
