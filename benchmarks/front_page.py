"""Draws the picture of README.md and writes its figures, from a kept result of train_step.py.

    python benchmarks/front_page.py                # pictures and figures, of the result named there
    python benchmarks/front_page.py result.json    # of another result, which is named there then
    python benchmarks/front_page.py --measure      # measure again first, with the same arguments
    python benchmarks/front_page.py --check        # exit status 1 if README.md says something else

ort is compared with eager and inductor, on as many threads as the result has at most. Of each
model the median step, the fastest first step and the least peak count, and over all models
geometric means.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from record import FIRST, PEAK, STEADY, Record
from report import DISTURBED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PICTURES = ROOT / "docs" / "pictures"
BACKENDS = ("eager", "inductor", "ort")
# What each kind of figure is called in Record.figures().
STEP, FIRST_STEP, HELD = "median_step", "min_first_cold", "step_peak"
NAMED = re.compile(r"\[raw\s+figures\]\((\S+?)\)")
BEGIN, END = "<!-- written by benchmarks/front_page.py -->", "<!-- end of what it writes -->"


class FrontPageError(Exception):
    """A result that must not stand on the front page, or a README without a place for it."""


@dataclass(frozen=True)
class Theme:
    """The colors of one picture."""

    name: str
    background: str
    text: str
    faint: str  # grid lines and what explains
    eager: str
    inductor: str
    on_inductor: str  # what is written on bars of that color
    ort: str
    on_ort: str


LIGHT = Theme(
    name="light", background="#ffffff", text="#1f2328", faint="#59636e", eager="#424a53",
    inductor="#b6bec8", on_inductor="#1f2328", ort="#0b7fab", on_ort="#ffffff",
)  # fmt: skip
DARK = Theme(
    name="dark", background="#0d1117", text="#e6edf3", faint="#9198a1", eager="#c9d1d9",
    inductor="#565d66", on_inductor="#f0f3f6", ort="#39b8e3", on_ort="#04202b",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What a file of train_step.py says of BACKENDS, on its largest number of threads."""

    path: Path
    settings: dict[str, Any]
    records: list[Record]
    models: list[str]
    threads: int

    def figure(self, model: str, backend: str, name: str) -> float:
        """Return a figure in seconds or bytes."""
        record = next(r for r in self.records if (r.model, r.backend) == (model, backend))
        return record.figures()[name]

    def ratios(self, backend: str, other: str, name: str) -> list[float]:
        """Return a backend's figure over another one's, model by model."""
        return [
            self.figure(model, backend, name) / self.figure(model, other, name)
            for model in self.models
        ]

    def mean(self, backend: str, name: str) -> float:
        """Return the geometric mean of a figure over all models."""
        return geometric_mean(self.figure(model, backend, name) for model in self.models)


def read_result(path: Path) -> Result:
    """Read a result.

    Raises FrontPageError if a backend of BACKENDS failed or lacks a figure, or if the engine left
    anything to eager PyTorch: such figures are not those of the engine.
    """
    document = json.loads(path.read_text())
    known = {field.name for field in fields(Record)}
    every = [
        Record(**{name: value for name, value in row.items() if name in known})
        for row in document["records"]
    ]
    threads = max(record.threads for record in every)
    records = [r for r in every if r.threads == threads and r.backend in BACKENDS]
    models = list(dict.fromkeys(record.model for record in records))
    for model in models:
        found = {record.backend: record for record in records if record.model == model}
        for backend in BACKENDS:
            if backend not in found:
                raise FrontPageError(f"{path}: {model}: no record of {backend}")
            check(path, found[backend])
    return Result(path, document["settings"], records, models, threads)


def check(path: Path, record: Record) -> None:
    """Raise FrontPageError if a record cannot be shown."""
    place = f"{path}: {record.model}, {record.backend}"
    if record.error:
        raise FrontPageError(f"{place}: failed: {record.error}")
    if record.refused:
        raise FrontPageError(f"{place}: eager PyTorch ran a part: {record.refused}")
    missing = [name for name in (STEP, FIRST_STEP, HELD) if record.figures()[name] is None]
    if missing:
        raise FrontPageError(f"{place}: not measured: {', '.join(missing)}")
    if record.backend == "ort":
        for kind in (STEADY, FIRST, PEAK):
            if record.fallbacks(kind) != 0:
                raise FrontPageError(
                    f"{place}: {kind}: fallbacks: got {record.fallbacks(kind)}, want 0"
                )


def figures_text(result: Result, folder: Path) -> str:
    """Write the figures, and how they were measured, as Markdown for a page in `folder`."""
    step = {other: geometric_mean(result.ratios("ort", other, STEP)) for other in BACKENDS}
    held = {other: geometric_mean(result.ratios("ort", other, HELD)) for other in BACKENDS}
    first = {backend: result.mean(backend, FIRST_STEP) for backend in BACKENDS}
    machine, arguments = result.settings["machine"], result.settings["arguments"]
    dtype = "float32"
    if "--autocast" in arguments:
        dtype = f"autocast to {arguments[arguments.index('--autocast') + 1]}"
    name = Path(os.path.relpath(result.path, folder)).as_posix()
    entries = [
        f"**Step**: {step['eager']:.2f} of the time in eager PyTorch, {step['inductor']:.2f} of "
        "inductor's.",
        f"**Memory**: at its peak a step holds {held['eager']:.2f} of what it holds in eager "
        f"PyTorch, {held['inductor']:.2f} of inductor's; parameters and optimizer state do not "
        "count.",
        f"**First step**, with compilation and empty caches: {seconds(first['ort'])} s; "
        f"inductor {seconds(first['inductor'])} s, eager {seconds(first['eager'])} s.",
    ]
    conditions = (
        f"These are geometric means over {len(result.models)} "
        f"[models](benchmarks/README.md#models) ({', '.join(result.models)}), in {dtype}, with "
        f"PyTorch {machine['torch'].partition('+')[0]} and {result.threads} threads on a machine "
        f"of {machine['cores']} cores with {machine['cpu']}. A step is forward, backward and "
        "AdamW: `torch_ort.optim.AdamW` for `ort`, PyTorch's fused one for the others. "
        "Times of steps are medians." + disturbance(result)
    )
    again = (
        "`python benchmarks/front_page.py` makes the picture and these lines from the "
        f"[raw figures]({name}), and measures them anew with `--measure` "
        "([how they are taken](benchmarks/README.md#how-the-figures-are-taken))."
    )
    listed = [filled(f"- {entry}", indent="  ") for entry in entries]
    return "\n".join([*listed, "", filled(conditions), filled(again)])


def disturbance(result: Result) -> str:
    """Say how much of the machine other processes used, if that may have changed the figures."""
    most = max((share for record in result.records for share in record.foreign_cpu), default=0)
    if most <= DISTURBED:
        return ""
    return f" Other processes used up to {most:.0%} of the machine meanwhile."


def filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def seconds(value: float) -> str:
    """Write hundredths below a second, tenths below ten, and whole ones above."""
    digits = 2 if value < 0.995 else 1 if value < 9.95 else 0
    return f"{value:.{digits}f}"


def with_figures(page: str, text: str) -> str:
    """Return a page with the lines between its marks replaced; FrontPageError without marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise FrontPageError(f"README.md: want the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def draw(path: Path, result: Result, theme: Theme) -> None:
    """Draw three panels over the same rows, one a model and one for the geometric means."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {
        "font.size": 9.5,
        "text.color": theme.text,
        "axes.labelcolor": theme.text,
        "xtick.color": theme.faint,
        "ytick.color": theme.text,
        "figure.facecolor": theme.background,
        "axes.facecolor": theme.background,
        # The same figures make the same file.
        "svg.hashsalt": "front_page",
    }
    with pyplot.rc_context(style):
        rows = len(result.models) + 1
        above, below, row = 0.88, 0.4, 0.37  # inches
        height = above + row * rows + below
        figure, panels = pyplot.subplots(1, 3, sharey=True, figsize=(10.4, height))
        figure.subplots_adjust(
            left=0.135, right=0.985, bottom=below / height, top=1 - above / height, wspace=0.08
        )
        draw_ratios(panels[0], result, theme, STEP, "Time of a training step")
        draw_ratios(panels[1], result, theme, HELD, "Peak memory of a step")
        draw_first_steps(panels[2], result, theme)
        names = [*result.models, "geometric mean"]
        panels[0].set_yticks(range(rows), names)
        panels[0].set_ylim(rows - 0.5, -0.6)
        panels[0].get_yticklabels()[-1].set_fontweight("bold")
        for panel in panels:
            # The means stand apart.
            panel.axhline(rows - 1.5, color=theme.faint, linewidth=0.8)
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
        draw_legend(figure, theme)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
        pyplot.close(figure)


def draw_ratios(panel: Axes, result: Result, theme: Theme, name: str, title: str) -> None:
    """Draw bars of inductor's and ort's figures over eager's, which is a line at 1."""
    height = 0.37
    widest = 1.0
    for backend, shift, color, label in (
        ("inductor", -height / 2, theme.inductor, theme.on_inductor),
        ("ort", height / 2, theme.ort, theme.on_ort),
    ):
        ratios = result.ratios(backend, "eager", name)
        ratios.append(geometric_mean(ratios))
        widest = max(widest, *ratios)
        for row, ratio in enumerate(ratios):
            panel.barh(row + shift, ratio, height, color=color, zorder=2)
            panel.annotate(
                f"{ratio:.2f}",
                (ratio, row + shift),
                (-3, -0.5),
                textcoords="offset points",
                ha="right",
                va="center_baseline",
                fontsize=7.5,
                fontweight="bold" if row == len(ratios) - 1 else "normal",
                color=label,
                zorder=4,
            )
    panel.axvline(1, color=theme.eager, linewidth=1.3, zorder=1)
    panel.set_xlim(0, widest * 1.02)
    panel.set_xticks([0, 0.5, 1], ["0", "0.5", "eager"])
    put_title(panel, theme, title, "eager = 1, lower is better")


def draw_first_steps(panel: Axes, result: Result, theme: Theme) -> None:
    """Draw seconds on a logarithmic axis, which has no 0 for bars to begin at: as points."""
    for backend, color in (
        ("eager", theme.eager),
        ("inductor", theme.inductor),
        ("ort", theme.ort),
    ):
        times = [result.figure(model, backend, FIRST_STEP) for model in result.models]
        times.append(geometric_mean(times))
        panel.scatter(times, range(len(times)), s=46, color=color, zorder=3, linewidths=0,
                      marker="d" if backend == "eager" else "o")  # fmt: skip
        if backend != "eager":
            for row, value in enumerate(times):
                panel.annotate(
                    seconds(value),
                    (value, row),
                    (6, 0),
                    textcoords="offset points",
                    va="center_baseline",
                    fontsize=7.5,
                    fontweight="bold" if row == len(times) - 1 else "normal",
                    color=theme.text if backend == "ort" else theme.faint,
                )
    panel.set_xscale("log")
    panel.minorticks_off()
    ticks = [0.01, 0.1, 1, 10, 100]
    panel.set_xticks(ticks, [f"{tick:g} s" for tick in ticks])
    least = min(result.figure(model, "eager", FIRST_STEP) for model in result.models)
    most = max(result.figure(model, "inductor", FIRST_STEP) for model in result.models)
    panel.set_xlim(least / 1.8, most * 3)
    panel.grid(axis="x", color=theme.faint, alpha=0.25, linewidth=0.8)
    put_title(panel, theme, "First step, caches empty", "seconds, logarithmic, lower is better")


def put_title(panel: Axes, theme: Theme, title: str, below: str) -> None:
    panel.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=15)
    panel.text(
        0, 1.005, below, transform=panel.transAxes, fontsize=8.5, color=theme.faint, va="bottom"
    )


def draw_legend(figure: Any, theme: Theme) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure.legend(
        handles=[
            Line2D([], [], color=theme.eager, marker="d", linewidth=1.2, label="eager PyTorch"),
            Patch(color=theme.inductor, label="inductor"),
            Patch(color=theme.ort, label="ort"),
        ],
        loc="upper left",
        ncols=3,
        frameon=False,
        labelcolor=theme.text,
        borderaxespad=0.6,
        bbox_to_anchor=(0.127, 1),
    )


def named_in(readme: Path) -> Path:
    """Return the result that a README's figures come from; FrontPageError if it names none."""
    found = NAMED.search(readme.read_text())
    if found is None:
        raise FrontPageError(f"{readme}: no result is named: want one as an argument")
    return readme.parent / found[1]


def measure(result_file: Path) -> None:
    """Measure again, with the arguments that the file names; raises if a worker fails."""
    arguments = json.loads(result_file.read_text())["settings"]["arguments"]
    for name in ("--json", "--png"):
        if name in arguments:
            place = arguments.index(name)
            arguments = arguments[:place] + arguments[place + 2 :]
    script = str(Path(__file__).with_name("train_step.py"))
    subprocess.run([sys.executable, script, *arguments, "--json", str(result_file)], check=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("result", type=Path, nargs="?", help="default: the one in the README")
    parser.add_argument("--measure", action="store_true", help="take the figures anew first")
    parser.add_argument("--check", action="store_true", help="write nothing, compare README.md")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder of the pictures")
    chosen = parser.parse_args(arguments)
    try:
        file = chosen.result or named_in(chosen.readme)
        if chosen.measure:
            measure(file)
        result = read_result(file)
        page = chosen.readme.read_text()
        wanted = with_figures(page, figures_text(result, chosen.readme.parent))
    except FrontPageError as error:
        print(error, file=sys.stderr)
        return 1
    if chosen.check:
        if page != wanted:
            print(f"{chosen.readme}: figures differ from those of {file}", file=sys.stderr)
        return int(page != wanted)
    chosen.readme.write_text(wanted)
    chosen.pictures.mkdir(exist_ok=True, parents=True)
    for theme in (LIGHT, DARK):
        draw(chosen.pictures / f"training_step_{theme.name}.svg", result, theme)
    print(figures_text(result, chosen.readme.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
