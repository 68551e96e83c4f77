"""Tables, JSON and a picture of what was measured."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import targets
from backends import EAGER, MODES
from builds import Pair, mean_ratio, pairs_of
from record import FIRST, PEAK, STEADY, Record, Records
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from targets import Verdict

MISSING = "-"
# Above this share of the machine, what was timed is partly somebody else's work.
DISTURBED = 0.1
SAME_LOSS = 1e-4


def print_report(console: Console, records: Records, *, is_inference: bool = False) -> None:
    """Print one table per question, then the targets, then what to mind in reading them."""
    if is_inference:
        console.print("Inference: a step is forward alone, under no_grad, of the model in eval()")
    for threads in sorted({record.threads for record in records.all}):
        rows = [record for record in records.all if record.threads == threads]
        console.print(steady_table(records, rows, threads))
        print_means(console, records, threads)
        if any(record.roofline for record in rows):
            console.print(least_table(rows, threads))
        if any(record.first_cold or record.first_warm for record in rows):
            console.print(first_step_table(records, rows, threads))
        if any(record.memory for record in rows):
            console.print(memory_table(records, rows, threads))
    print_targets(console, records)
    print_builds(console, pairs_of(records))
    print_remarks(console, records)


def steady_table(records: Records, rows: list[Record], threads: int) -> Table:
    table = make_table(
        f"Steady step, {threads} thread(s), ms",
        [
            *("min", "median", "fwd+bwd min", "median", "/ least", "min / eager", "median / eager"),
            "others' CPU",
        ],
    )
    for record in rows:
        measured = record.figures()
        figures = [
            milliseconds(measured["min_step"]),
            milliseconds(measured["median_step"]),
            milliseconds(measured["min_fwd_bwd"]),
            milliseconds(measured["median_fwd_bwd"]),
            times(records.of_least(record)),
            times(records.ratio(record, "eager", "min_step")),
            times(records.ratio(record, "eager", "median_step")),
            percent(max(record.foreign_cpu, default=None)),
        ]
        add_row(table, records, record, figures, STEADY)
    return table


def least_table(rows: list[Record], threads: int) -> Table:
    """Give what forward and backward need at least, and what the machine was measured to do."""
    title = f"The least possible forward and backward, {threads} thread(s)"
    table = Table(title=title, title_justify="left")
    table.add_column("model", no_wrap=True)
    for head in ("GFLOP", "peak GFLOP/s", "MiB", "GB/s", "least ms", "ort's products"):
        table.add_column(head, justify="right")
    for record in rows:
        if record.roofline is None:
            continue
        found = record.roofline
        peaks = [f"{peak / 1e9:.1f} {dtype}" for dtype, peak in found["peak_flops"].items()]
        share = found["products_of_peak"]
        table.add_row(
            record.model,
            f"{sum(found['flops'].values()) / 1e9:.2f}",
            ", ".join(peaks) + f" ({found['where']})",
            mebibytes(found["memory_bytes"]),
            f"{found['bytes_per_second'] / 1e9:.1f}",
            milliseconds(found["least_s"]),
            MISSING if share is None else f"{share:.0%} of the peak",
        )
    return table


def print_means(console: Console, records: Records, threads: int) -> None:
    for other in (*EAGER, "aot_eager", "inductor", *MODES):
        least = records.mean_ratio(threads, other, "min_step")
        middle = records.mean_ratio(threads, other, "median_step")
        if least is not None:
            console.print(
                f"ort / {other}, geometric mean of the models: {times(least)} of the minimum, "
                f"{times(middle)} of the median"
            )


def first_step_table(records: Records, rows: list[Record], threads: int) -> Table:
    table = make_table(
        f"First step, {threads} thread(s), s",
        ["cold min", "median", "own caches", "/ aot_eager", "/ inductor", "graphs", "breaks"],
    )
    for record in rows:
        measured, dynamo = record.figures(), record.counters.get("dynamo", {})
        figures = [
            seconds(measured["min_first_cold"]),
            seconds(measured["median_first_cold"]),
            seconds(measured["first_warm"]),
            times(records.ratio(record, "aot_eager", "min_first_cold")),
            times(records.ratio(record, "inductor", "min_first_cold")),
            number(dynamo.get("graphs")),
            number(dynamo.get("breaks")),
        ]
        add_row(table, records, record, figures, FIRST)
    return table


def memory_table(records: Records, rows: list[Record], threads: int) -> Table:
    title = f"Peak memory, {threads} thread(s), MiB"
    heads = ["step", "activations", "step / eager", "first step, compiling"]
    on_gpu = any(record.figures()["reserved"] is not None for record in rows)
    if on_gpu:
        title += (
            "; step: allocated above parameters, optimizer state and batches; reserved: all that "
            "PyTorch's allocator has of the GPU in a step, pools of CUDA graphs among it"
        )
        heads += ["reserved", "reserved / eager"]
    table = make_table(title, heads)
    for record in rows:
        measured = record.figures()
        figures = [
            mebibytes(measured["step_peak"]),
            mebibytes(measured["activations"]),
            times(records.ratio(record, "eager", "step_peak")),
            mebibytes(measured["first_peak"]),
        ]
        if on_gpu:
            figures.append(mebibytes(measured["reserved"]))
            figures.append(times(records.ratio(record, "eager", "reserved")))
        add_row(table, records, record, figures, PEAK)
    return table


def make_table(title: str, figures: list[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("model", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right")
    table.add_column("counters")
    table.add_column("targets")
    return table


def add_row(table: Table, records: Records, record: Record, figures: list[str], kind: str) -> None:
    if record.error:
        table.add_row(
            record.model,
            record.label,
            *[MISSING] * len(figures),
            "",
            f"[red]failed: {escape(record.error)}[/red]",
        )
        return
    judged = [v for v in records.verdicts(record) if v.kind == kind]
    table.add_row(
        record.model,
        record.label,
        *figures,
        counters_text(record, kind),
        "\n".join(f"{verdict.name}: {colored(verdict)}" for verdict in judged),
        end_section=record is last_of_model(records, record),
    )


def last_of_model(records: Records, record: Record) -> Record:
    key = (record.model, record.threads)
    return [other for other in records.all if (other.model, other.threads) == key][-1]


def counters_text(record: Record, kind: str) -> str:
    """Say what the engine counted; a counter that it does not have shows as missing, not as 0."""
    processes = record.counters_of(kind)
    ort = processes[-1].get("ort", {}) if processes else {}
    if not ort:
        return ""
    words = [
        f"fallbacks {number(record.fallbacks(kind))}",
        f"ATen {number(ort.get('nodes_aten'))} of {number(ort.get('nodes'))} nodes",
        f"arena {mebibytes(ort.get('arena_bytes'))} MiB",
    ]
    if kind == STEADY:
        runs, calls = record.counted_in_runs, record.kernel_calls()
        kernels = MISSING if calls is None else f"{calls:g}"
        words += [
            f"grew {number(runs.get('arena_growth'))}",
            f"allocations {number(runs.get('arena_allocations'))}",
            f"kernel calls/step {kernels}",
        ]
    return ", ".join(words)


def colored(verdict: Verdict) -> str:
    color = "green" if verdict.met else "red"
    return f"[{color}]{escape(str(verdict))}[/{color}]"


def print_targets(console: Console, records: Records) -> None:
    judged = [(r, verdict) for r in records.all for verdict in records.verdicts(r)]
    if not judged:
        return
    table = Table(title="Targets", title_justify="left")
    for column in ("model", "threads", "target", "state"):
        table.add_column(column, no_wrap=True)
    for record, verdict in judged:
        table.add_row(
            record.model, str(record.threads), f"{verdict.kind}, {verdict.name}", colored(verdict)
        )
    console.print(table)
    met = sum(verdict.met for _, verdict in judged)
    console.print(f"{met} of {len(judged)} targets met")


def print_builds(console: Console, pairs: list[Pair]) -> None:
    if not pairs:
        return
    table = Table(title="This build / the other one", title_justify="left")
    for column in ("model", "backend", "threads"):
        table.add_column(column, no_wrap=True)
    for column in (*targets.AGAINST_OTHER_BUILD, "kernel calls", "arena MiB"):
        table.add_column(column, justify="right")
    table.add_column("not as before")
    for pair in pairs:
        table.add_row(
            pair.this.model,
            pair.this.backend,
            str(pair.this.threads),
            *[ratio_text(pair, figure) for figure in targets.AGAINST_OTHER_BUILD],
            " / ".join(MISSING if value is None else f"{value:g}" for value in pair.kernel_calls()),
            " / ".join(mebibytes(value) for value in pair.arena_bytes()),
            "\n".join(pair.differences()),
        )
    console.print(table)
    mean, limit = mean_ratio(pairs, "step"), targets.AGAINST_OTHER_BUILD_MEAN
    if mean is not None:
        state = "met" if mean <= limit else "missed"
        console.print(f"step, geometric mean: {mean:.3f} ({state}, want ≤ {limit:g})")


def ratio_text(pair: Pair, figure: str) -> str:
    """Write a ratio, with the quartiles of the pairs of times that it is the median of."""
    quartiles = pair.quartiles(figure)
    spread = f" ({quartiles[0]:.2f}–{quartiles[1]:.2f})" if quartiles else ""
    return thousandths(pair.ratio(figure)) + spread


def print_remarks(console: Console, records: Records) -> None:
    disturbed = [r for r in records.all if max(r.foreign_cpu, default=0) > DISTURBED]
    if disturbed:
        console.print(
            f"[yellow]Others used more than {DISTURBED:.0%} of the machine during {len(disturbed)}"
            " rows: measure again on idle cores.[/yellow]"
        )
    for record in records.all:
        if record.refused:
            words = f"{record.model}, {record.label}: eager PyTorch ran a part: {record.refused}"
            console.print(f"[red]{escape(words)}[/red]")
        for reason in dict.fromkeys(m["reason"] for m in record.memory if m.get("reason")):
            words = f"{record.model}, {record.label}: no peak of a step: {reason}"
            console.print(f"[yellow]{escape(words)}[/yellow]")
        if record.roofline_error:
            words = f"{record.model}: no least possible time: {record.roofline_error}"
            console.print(f"[yellow]{escape(words)}[/yellow]")
    for record in records.all:
        eager = records.peer(record, "eager")
        if record.loss is None or not eager or eager.loss is None:
            continue
        # inductor and the engine draw dropout masks of their own.
        if eager.is_random and record.backend not in (*EAGER, "aot_eager"):
            continue
        if abs(record.loss - eager.loss) > SAME_LOSS * abs(eager.loss):
            console.print(
                f"[red]{record.model}: first loss of {record.backend}: got {record.loss:.6f}, "
                f"want eager's {eager.loss:.6f}[/red]"
            )


def write_json(path: Path, settings: dict[str, Any], records: Records) -> None:
    """Write settings, raw measurements, figures and verdicts; the file is whole at any time."""
    rows = []
    for record in records.all:
        verdicts = [asdict(v) | {"met": v.met} for v in records.verdicts(record)]
        rows.append(asdict(record) | {"figures": record.figures(), "verdicts": verdicts})
    written = path.with_name(path.name + ".part")
    written.write_text(json.dumps({"settings": settings, "records": rows}, indent=1) + "\n")
    written.replace(path)


def write_png(path: Path, records: Records) -> None:
    """Draw steady steps, first steps and peaks as grouped bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    threads = max(record.threads for record in records.all)
    rows = [record for record in records.all if record.threads == threads]
    steady = [(r, records.ratio(r, "eager", "median_step")) for r in rows]
    first = [(r, r.figures()["min_first_cold"]) for r in rows]
    peak = [(r, records.ratio(r, "eager", "step_peak")) for r in rows]
    figure, axes = pyplot.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    draw_bars(axes[0], "steady step / eager (median)", steady)
    draw_bars(axes[1], "first step, empty caches, s", first)
    draw_bars(axes[2], "peak memory of a step / eager", peak)
    # A run of steady steps alone has no first steps, and nothing has no logarithm.
    if any(value is not None for _, value in first):
        axes[1].set_yscale("log")
    for relative in (axes[0], axes[2]):
        relative.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(len(labels), 1))
    figure.suptitle(f"Training step, {threads} thread(s)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_bars(axes: Any, title: str, values: list[tuple[Record, float | None]]) -> None:
    models = list(dict.fromkeys(record.model for record, _ in values))
    backends = list(dict.fromkeys(record.backend for record, _ in values))
    width = 0.8 / len(backends)
    for slot, backend in enumerate(backends):
        bars = {r.model: value for r, value in values if r.backend == backend and value is not None}
        places = [models.index(model) + (slot - (len(backends) - 1) / 2) * width for model in bars]
        # Colors go by the backend's place, so a backend that failed keeps its color.
        axes.bar(places, list(bars.values()), width, label=backend, color=f"C{slot}")
    axes.set_xticks(range(len(models)), models)
    axes.set_title(title)


def milliseconds(value: float | None) -> str:
    return MISSING if value is None else f"{value * 1e3:.2f}"


def seconds(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def mebibytes(value: int | None) -> str:
    return MISSING if value is None else f"{value / 2**20:.1f}"


def times(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}×"


def thousandths(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0%}"


def number(value: int | None) -> str:
    return MISSING if value is None else str(value)
