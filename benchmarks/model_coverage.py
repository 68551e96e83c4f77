"""Which architectures the engine takes whole, and what it leaves to eager PyTorch.

    python benchmarks/model_coverage.py                      # all; a quarter of an hour
    python benchmarks/model_coverage.py --models bert dcgan  # some
    python benchmarks/model_coverage.py \
        --json benchmarks/results/coverage.json --page docs/coverage.md  # keep the result

docs/coverage.md explains the columns.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES
from coverage_page import render, write_page
from coverage_rows import EAGER, Coverage, Row, load, lost
from coverage_worker import ROADS, Job

WORKER = Path(__file__).with_name("coverage_worker.py")


def run(job: Job, timeout_s: float) -> Row:
    """Run a job in a process of its own; whatever goes wrong stands in its row."""
    row = Row(job.architecture, ARCHITECTURES[job.architecture].kind, job.road)
    command = [sys.executable, str(WORKER), job.to_json()]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s,
            env=environment(job), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        row.error = f"no answer after {timeout_s:g} s"
        return row
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-1:]
        row.error = ": ".join([f"process ended with status {done.returncode}", *words])
        return row
    answer = json.loads(done.stdout)
    row.error = answer.pop("error", None)
    row.measured = answer
    return row


def environment(job: Job) -> dict[str, str]:
    """Return the caller's environment without what it says of the engine, and without strictness.

    What the engine cannot do is a row here, and no error.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCH_ORT_", "ORTMODULE_", "MALLOC_"))
    }
    threads = {"OMP_NUM_THREADS": str(job.threads), "MKL_NUM_THREADS": str(job.threads)}
    return kept | threads | {"TORCH_ORT_STRICT": "0", "HF_HUB_OFFLINE": "1"}


def settings(threads: int) -> dict[str, Any]:
    """Say what a run stands on."""
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
    }


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one process")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="say what was lost since a kept result"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the result")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table into a page")
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error(f"--threads: got {options.threads}, want 1 or more")
    if importlib.util.find_spec("transformers") is None:
        parser.error("needs transformers: pip install 'torch-ort-engine[transformers]'")
    return options


def main(arguments: list[str]) -> int:
    """Run the jobs; return 1 if one failed, or lost what the kept result has, 0 otherwise."""
    options = parse_arguments(arguments)
    # Read before it may be written anew.
    kept = load(options.against) if options.against else None
    rows = []
    for name in dict.fromkeys(options.models):
        for road in (EAGER, *ROADS):
            rows.append(run(Job(name, road, options.threads), options.timeout))
            print(progress(rows[-1]), file=sys.stderr, flush=True)
    coverage = Coverage(settings(options.threads), rows)
    print(render(coverage))
    if options.json:
        coverage.save(options.json)
    if options.page:
        write_page(options.page, coverage)
    words = []
    for row in coverage.of_roads(*ROADS):
        before = kept.row(row.architecture, row.road) if kept else None
        words += lost(before, row, kept.tolerance(row.architecture)) if before else []
    for each in words:
        print(f"lost: {each}")
    return 1 if words or any(row.error for row in rows) else 0


def progress(row: Row) -> str:
    state = row.error or "done"
    if row.measured and row.road in ROADS:
        state = "whole" if row.is_whole else "not whole"
        state += f", loss off by {row.measured['loss_difference']:.0e}"
    return f"{row.architecture}, {row.road}: {state}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
