"""A picture of the losses of a training run."""

from pathlib import Path


def check_format(path: Path) -> None:
    """Raise ValueError if no picture can be written to a file of this name."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ValueError(f"--plot: got {path.name}, want a name that ends in .png")


def moving_mean(losses: list[float], window: int) -> list[float]:
    """Return the mean of the last `window` losses at each step, of fewer at the start."""
    total, means = 0.0, []
    for step, loss in enumerate(losses):
        total += loss
        if step >= window:
            total -= losses[step - window]
        means.append(total / min(step + 1, window))
    return means


def plot(path: Path, title: str, losses: list[float], validation: list[tuple[int, float]]) -> None:
    """Draw training losses by step, and validation losses at the steps where they were taken."""
    # Figure, not pyplot: no window system is asked for, and nothing global changes.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    window = max(1, len(losses) // 50)
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(
        steps, moving_mean(losses, window), color="tab:blue", label=f"training, mean of {window}"
    )
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="tab:orange", label="validation")
    axes.set(title=title, xlabel="step", ylabel="loss per word")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
