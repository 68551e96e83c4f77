"""Runs a part of the tests beside the torch that is installed, and writes down what came of it.

    python tests/versions/trial.py --record FILE [--workers N] [--without-cuda] TESTS...

`make test-torch` runs it in a copy of the checkout. The tests named run on the CPU; the benchmarks'
models then train a step on both roads; at last the tests of CUDA run, on the test device where
there is no GPU. The exit status is 1 if a test has failed. The record is a JSON object:

    torch, python, cuda     versions; `cuda` is "" for a torch without CUDA
    cpu, cuda_tests         tests that have passed, and the names of those that have failed; null
                            for tests of CUDA that were left out (--without-cuda)
    models, left_to_eager   steps of models that were tried, and what they left to eager PyTorch
    out_forms               how many `out=` overloads are proved for this torch on the CPU
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODELS = "tests/benchmarks/test_models.py"
# Who interrupts them, or an error of pytest's own.
TESTS_RAN = (0, 1)


@dataclass
class Outcome:
    """What the tests of one run of pytest came to."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    models: int = 0
    left_to_eager: int = 0


def read_outcome(path: Path) -> Outcome:
    """Read the file that pytest's --junitxml has written."""
    outcome = Outcome()
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed.append(name)
        elif case.find("skipped") is None:
            outcome.passed += 1
        for each in case.iter("property"):
            if each.get("name") == "left_to_eager":
                outcome.models += 1
                outcome.left_to_eager += int(each.get("value"))
    return outcome


def run_tests(*arguments: str) -> Outcome:
    """Run pytest in a process of its own.

    Raises RuntimeError if it ends before the tests do.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        status = subprocess.run(command, check=False).returncode
        if status not in TESTS_RAN:
            raise RuntimeError(f"pytest {' '.join(arguments)}: exit status {status}")
        return read_outcome(report)


def record(tests: list[str], workers: str, without_cuda: bool) -> dict[str, Any]:
    """Run all parts, and give what is written down of them."""
    parallel = ("-n", workers)
    on_cpu = run_tests(*parallel, *tests)
    models = run_tests(*parallel, "--run-slow", MODELS)
    on_cuda = None if without_cuda else run_tests(*parallel, "-m", "cuda")
    return {
        **versions(),
        "cpu": {"passed": on_cpu.passed + models.passed, "failed": on_cpu.failed + models.failed},
        "models": models.models,
        "left_to_eager": models.left_to_eager,
        "cuda_tests": on_cuda and {"passed": on_cuda.passed, "failed": on_cuda.failed},
    }


def versions() -> dict[str, Any]:
    """Tell what is installed, and what is proved of it."""
    import torch

    from torch_ort import _C

    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        "out_forms": len(_C.proved_out_forms("cpu")),
    }


def main() -> int:
    """Read the command line, run and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--without-cuda", action="store_true")
    parser.add_argument("tests", nargs="+")
    options = parser.parse_args()
    found = record(options.tests, options.workers, options.without_cuda)
    options.record.write_text(json.dumps(found, indent=1) + "\n")
    failed = [*found["cpu"]["failed"], *(found["cuda_tests"] or {"failed": []})["failed"]]
    print(f"torch {found['torch']}: {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed or found["left_to_eager"] else 0


if __name__ == "__main__":
    sys.exit(main())
