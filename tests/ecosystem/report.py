"""Writes docs/integrations.md: which integration is tested with which version, and what came of it.

    python -m tests.ecosystem.report [--run-slow] [--write]

It runs the tests of this folder. A row is a test, with the cases that it was run on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "integrations.md"

# What stands behind each file of tests: a title, and the packages whose versions matter.
INTEGRATIONS = {
    "test_trainer": ("Hugging Face Trainer", ("transformers", "accelerate")),
    "test_sharded_trainer": ("Trainer with FSDP2", ("transformers", "accelerate")),
    "test_ort_trainer": ("ORTTrainer of optimum", ("transformers", "accelerate")),
    "test_names": ("Names in Accelerate and Transformers", ("transformers", "accelerate")),
    "test_accelerate": ("Accelerate", ("accelerate",)),
    "test_rows": ("Skipped rows in models of Hugging Face", ("transformers",)),
    "test_lazy_logits": ("Logits computed when they are read", ("transformers", "accelerate")),
    "test_peft": ("PEFT", ("peft", "transformers")),
    "test_generate": ("Tokens that `generate` makes", ("transformers",)),
    "test_lightning": ("Lightning", ("lightning",)),
    "test_deepspeed": ("DeepSpeed", ("deepspeed",)),
    "test_data_parallel": ("DistributedDataParallel and FSDP2", ("torch",)),
    "test_tensor_parallel": ("Tensor parallelism", ("torch",)),
    "test_graph_parallel": ("Data parallelism in the graph", ("torch",)),
    "test_parallel_libraries": ("Libraries that split models", ("torch", "transformers")),
    "test_rank_faults": ("Ranks that fail", ("torch",)),
    "test_optimizers": ("Optimizers over several processes", ("torch",)),
}
# Cases of a test, by what came of them.
Cases = dict[str, list[str]]
WORDS = {"passed": "passed", "skipped": "not run", "failed": "**failed**"}


def run_tests(arguments: list[str]) -> Path:
    """Run the tests of this folder; returns pytest's report, in a folder of its own."""
    report = Path(tempfile.mkdtemp()) / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", str(FOLDER), f"--junitxml={report}"]
    subprocess.run([*command, *arguments], check=False)
    if not report.exists():
        raise SystemExit("no report: pytest itself has failed")
    return report


def read_report(path: Path) -> dict[str, dict[str, Cases]]:
    """Give cases by file and test, in the order in which they ran."""
    rows: dict[str, dict[str, Cases]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name, _, rest = case.get("name", "").partition("[")
        file = case.get("classname", "").split(".")[2]
        outcome = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        elif case.find("skipped") is not None:
            outcome = "skipped"
        rows[file][name][outcome].append(rest.rstrip("]"))
    return rows


def versions(packages: tuple[str, ...]) -> str:
    """Give the installed versions of packages, local parts left out."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package).partition('+')[0]}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} (not installed)")
    return ", ".join(found)


def page(rows: dict[str, dict[str, Cases]]) -> str:
    """Give the page as Markdown."""
    python = ".".join(map(str, sys.version_info[:2]))
    lines = [
        "# Integrations",
        "",
        "The libraries with which torch_ort is tested, their versions, and the outcome of each",
        "test. Look here to see whether a combination that you plan to use is covered. How to use",
        "the libraries is described in [transformers.md](transformers.md) and",
        "[distributed.md](distributed.md). Installing torch_ort installs none of them.",
        "",
        "This page is written by `python -m tests.ecosystem.report --write`, which runs the tests",
        f"on the CPU; the last time with {versions(('torch',))} and Python {python}. A row is",
        "one test with the cases that it was run on. A case that was not run is slow (`--run-slow`",
        "runs it), or its library is missing.",
        "",
    ]
    for file, (title, packages) in INTEGRATIONS.items():
        lines += [f"## {title}", "", f"With {versions(packages)}.", ""]
        lines += ["| tested | result | cases |", "| --- | --- | --- |"]
        for test, by_outcome in rows.get(file, {}).items():
            words = test.removeprefix("test_").replace("_", " ")
            for outcome, cases in by_outcome.items():
                names = ", ".join(case for case in cases if case)
                count = f"{len(cases)} " if len(cases) > 1 else ""
                lines.append(f"| {words} | {count}{WORDS[outcome]} | {names} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Run the program; returns its exit status: 1 where a test has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-slow", action="store_true", help="run slow tests as well")
    parser.add_argument("--write", action="store_true", help="write the page; else print it")
    options = parser.parse_args()
    rows = read_report(run_tests(["--run-slow"] if options.run_slow else []))
    text = page(rows)
    if options.write:
        PAGE.write_text(text)
    else:
        print(text)
    return int(any("failed" in cases for tests in rows.values() for cases in tests.values()))


if __name__ == "__main__":
    sys.exit(main())
