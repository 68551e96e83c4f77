"""Reads and runs random model files until the time is up; a find is minimized and written down.

python tests/fuzz/files.py --seconds 600 --results build/fuzz/files.json
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
WORKER = HERE / "files_worker.py"
BATCH = 20_000
# Of files that are minimized; the step that leaves a node out, as files_worker.py has it.
MOST_NODES, WITHOUT_NODE = 40, -2

# What a file may end in: errors that say what is wrong with it, and at run time what PyTorch's own
# kernels raise where they check what they are given.
OF_FILES = ("UserError", "Unsupported")
OF_KERNELS = (
    "RuntimeError", "IndexError", "TypeError", "ValueError", "NotImplementedError",
    "OutOfMemoryError", "LinAlgError", "MemoryError",
)  # fmt: skip
# Text of C++ that has met what it did not expect.
INTERNALS = ("std::", "bad_variant", "bad optional", "vector::", "_M_", "unordered_map::at")


def fault(line: str) -> str | None:
    """Tell what is wrong with an outcome; nothing if a file may end so."""
    if line == "works" or line.startswith("nothing"):
        return None
    stage, _, rest = line.partition(" ")
    kind, _, message = rest.partition(":")
    is_known = kind in OF_FILES or (stage in ("run", "train") and kind in OF_KERNELS)
    if is_known and not any(word in message for word in INTERNALS):
        return None
    return f"{stage} {kind}: {_without_names(message)}"


def _without_names(message: str) -> str:
    """Cut a message so that two of one cause are the same."""
    return re.sub(r"'[^']*'|\d+", "_", message)[:80]


def environment() -> dict[str, str]:
    rooms = (HERE, HERE.parent, HERE.parent / "passes")
    paths = [*map(str, rooms), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1",
        "MALLOC_PERTURB_": "165",
    }  # fmt: skip


def work(*arguments: object, shows_errors: bool = False) -> subprocess.Popen:
    """Start the worker. What it says of files goes nowhere: their outcomes stand in its output."""
    command = [sys.executable, "-X", "faulthandler", str(WORKER), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, text=True,
        stderr=None if shows_errors else subprocess.DEVNULL,
    )  # fmt: skip


def make_corpus(path: pathlib.Path) -> None:
    """Write the models; they are the same each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with work("corpus", path, shows_errors=True) as process:
        process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"files_worker.py corpus: got exit code {process.returncode}, want 0")


class Run:
    """Outcomes of seeds, counted."""

    def __init__(self, corpus: pathlib.Path, kind: str = "seeds") -> None:
        self.corpus = corpus
        self.kind = kind  # of files_worker.py: "seeds" or "trained"
        self.counts: collections.Counter[str] = collections.Counter()
        self.finds: dict[str, int] = {}  # the first seed of each
        self.next_seed = 0

    def batch(self, first: int, count: int, until: float = float("inf")) -> None:
        """Run seeds in processes, each from where the last one died."""
        end = first + count
        self.next_seed = first
        while self.next_seed < end and time.monotonic() < until:
            with work(self.kind, self.corpus, self.next_seed, end - self.next_seed) as process:
                started = self._read(process, until)
            code = process.returncode
            if started is None:
                if code not in (0, -9) and time.monotonic() < until:
                    raise RuntimeError(f"files_worker.py: got exit code {code} before any file")
                continue
            self.note(started, f"died of signal {-code}")
            self.next_seed = started + 1

    def _read(self, process: subprocess.Popen, until: float) -> int | None:
        """Read outcomes; give the seed that ended the process, if one did."""
        for line in process.stdout:
            seed, _, what = line.rstrip("\n").partition(" ")
            if not line.endswith("\n") or not what:
                return int(seed)
            self.next_seed = int(seed) + 1
            self.counts[what.split(":")[0]] += 1
            wrong = fault(what)
            if wrong:
                self.note(int(seed), wrong)
            if time.monotonic() > until:
                process.kill()
                break
        return None

    def note(self, seed: int, what: str) -> None:
        self.counts["finds"] += 1
        if what.startswith("died"):
            self.counts[what] += 1
            what += f" at seed {seed}"  # of one signal there are many causes
        self.finds.setdefault(what, seed)


# ---- minimizing


def outcome_of(case: dict, corpus: pathlib.Path, kind: str) -> str | None:
    """Run the steps of a case; give what is wrong with the outcome."""
    with work("case", corpus, json.dumps(case), kind) as process:
        text = process.communicate()[0].rstrip("\n").partition(" ")[2]
    return f"died of signal {-process.returncode}" if process.returncode else fault(text)


def minimized(seed: int, corpus: pathlib.Path, kind: str) -> dict:
    """Leave out steps of a find, and then nodes, that the fault does not need."""
    with work("steps", corpus, seed) as process:
        case = json.loads(process.communicate()[0])
    what = outcome_of(case, corpus, kind)

    def is_enough(steps: list) -> bool:
        return bool(steps) and outcome_of(case | {"steps": steps}, corpus, kind) == what

    for step in list(case["steps"]):
        fewer = [other for other in case["steps"] if other != step]
        if is_enough(fewer):
            case["steps"] = fewer
    for number in reversed(range(MOST_NODES)):
        fewer = [*case["steps"], [WITHOUT_NODE, number]]
        if is_enough(fewer):
            case["steps"] = fewer
    return case | {"what": what, "seed": seed}


# ---- what is kept between runs


def read_results(path: pathlib.Path) -> dict:
    if path.exists():
        return json.loads(path.read_text())
    return {"next_seed": 1_000_000_000, "files": 0, "seconds": 0, "counts": {}, "finds": []}


def write_results(path: pathlib.Path, results: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rest = path.with_suffix(".new")
    rest.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    rest.replace(path)


def add_up(results: dict, run: Run, first: int, seconds: float) -> None:
    counts = collections.Counter(results["counts"]) + run.counts
    results["counts"] = dict(counts)
    results["files"] += run.next_seed - first
    results["next_seed"] = run.next_seed
    results["seconds"] += round(seconds)
    known = {each["what"] for each in results["finds"]}
    for what, seed in run.finds.items():
        if what not in known:
            results["finds"].append({"what": what, "seed": seed})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--count", type=int, default=2**62, help="stop after so many files")
    parser.add_argument("--results", type=pathlib.Path, default="build/fuzz/files.json")
    parser.add_argument("--seed", type=int, help="minimize one find, and print it")
    parser.add_argument(
        "--trained", dest="kind", action="store_const", const="trained", default="seeds",
        help="load, train and save files as modules in place of running them",
    )  # fmt: skip
    options = parser.parse_args()
    corpus = options.results.resolve().parent / "corpus.pt"
    make_corpus(corpus)
    if options.seed is not None:
        print(json.dumps(minimized(options.seed, corpus, options.kind)))
        return 0
    results = read_results(options.results)
    until, left = time.monotonic() + options.seconds, options.count
    num_finds = 0
    while left > 0 and time.monotonic() < until:
        run, start, first = Run(corpus, options.kind), time.monotonic(), results["next_seed"]
        with contextlib.suppress(KeyboardInterrupt):
            run.batch(first, min(BATCH, left), until)
        add_up(results, run, first, time.monotonic() - start)
        write_results(options.results, results)
        left -= max(1, run.next_seed - first)
        num_finds += len(run.finds)
        for what, seed in run.finds.items():
            print(f"seed {seed}: {what}", flush=True)
    print(f"{results['files']} files in all, {num_finds} new finds: {options.results}")
    return num_finds > 0


if __name__ == "__main__":
    sys.exit(main())
