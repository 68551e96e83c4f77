"""Where the time of a training step goes, by torch.profiler, for any backend.

    python benchmarks/profile_step.py --device cuda --model gpt2_small --backend ort
    python benchmarks/profile_step.py --device cuda --model gpt2_small --backend inductor

Prints a table of kernels; `torch_ort.profile` tells more of the engine, and only of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from backends import EAGER
from models import MODELS
from torch.profiler import ProfilerActivity, profile, supported_activities
from worker import Job, Trainer


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="gpt2_small")
    parser.add_argument("--backend", choices=[*EAGER, "inductor", "ort"], default="ort")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--autocast", choices=["bfloat16", "float16"])
    parser.add_argument("--warm", type=int, default=5, help="steps before those of the table")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=90)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Run it."""
    options = parse(arguments)
    job = Job(
        options.model, options.backend, options.device, torch.get_num_threads(), options.autocast
    )
    trainer = Trainer(job)
    trainer.first()
    for _ in range(options.warm):
        trainer.step()
    trainer.synchronize()
    activities = {ProfilerActivity.CPU}
    if options.device == "cuda":
        activities |= {ProfilerActivity.CUDA} & supported_activities()
    with profile(activities=activities) as profiled:
        for _ in range(options.steps):
            trainer.step()
        trainer.synchronize()
    has_device = ProfilerActivity.CUDA in activities
    key = "self_device_time_total" if has_device else "self_cpu_time_total"
    table = profiled.key_averages().table(
        sort_by=key, row_limit=options.rows, max_name_column_width=99
    )
    print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
