"""Random programs through the engine's roads, against eager PyTorch.

    python tests/fuzz/programs.py --seconds 60 --road both --results programs.jsonl

tries new seeds for some time. FILE has a line for each road of each run, which later runs go on
from: they take the next seeds. Programs that fail are made small and written beside FILE as scripts
that run alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch
from programs_exceptions import reason_for
from programs_run import ROADS, check, run_eager
from programs_shrink import kind_of, script, shrink
from programs_write import Program, Writer

SECONDS_OF_A_LINE = 30
SCRIPTS_OF_A_KIND = 2


def write(seed: int) -> Program | None:
    """Write the program of a seed; None where eager PyTorch does not run it."""
    program = Writer(seed).write()
    if program is None:
        return None
    try:
        run_eager(program)
    except RuntimeError:  # backward of what was written over, in some of its modes
        return None
    return program


def main() -> None:
    """Try programs until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--road", choices=("both", *ROADS), default="both")
    parser.add_argument("--results", type=Path, default=Path("programs.jsonl"))
    parser.add_argument("--seed", type=int, help="try the program of this seed alone")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    roads = list(ROADS) if chosen.road == "both" else [chosen.road]
    if chosen.seed is not None:
        for road in roads:
            outcome, words = try_seed(chosen.seed, road)
            print(f"{road}: {outcome} {words}")
            if words:
                _write_script(chosen.seed, road, words, chosen.results)
        return
    until = time.monotonic() + chosen.seconds
    for left, road in zip(range(len(roads), 0, -1), roads, strict=True):
        _try_for((until - time.monotonic()) / left, road, chosen.results)
    print(_summary(chosen.results))


def _try_for(seconds: float, road: str, results: Path) -> None:
    """Try the next seeds of a road; note every now and then what came of them."""
    until = time.monotonic() + seconds
    lines = [line for line in _lines(results) if line["road"] == road]
    seed = max((line["seeds"][1] for line in lines), default=0)
    seen = Counter(kind_of(failure["words"]) for line in lines for failure in line["failures"])
    while time.monotonic() < until:
        counts: Counter[str] = Counter()
        first, failures = seed, []
        pause = min(time.monotonic() + SECONDS_OF_A_LINE, until)
        while time.monotonic() < pause:
            outcome, words = try_seed(seed, road)
            counts[outcome] += 1
            if words:
                failures.append({"seed": seed, "words": words[:500]})
                print(f"{road}, seed {seed}: {words[:300]}", flush=True)
                seen[kind_of(words)] += 1
                if seen[kind_of(words)] <= SCRIPTS_OF_A_KIND:
                    _write_script(seed, road, words, results)
            seed += 1
        line = {"road": road, "seeds": [first, seed], "counts": counts, "failures": failures}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def try_seed(seed: int, road: str) -> tuple[str, str]:
    """Try the program of a seed; give what came of it, and the words of a failure."""
    program = write(seed)
    if program is None:
        return "refused by eager", ""
    try:
        check(program, road)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        reason = reason_for(words)
        return (f"known: {reason}", "") if reason else ("failed", words)
    return "right", ""


def _write_script(seed: int, road: str, words: str, results: Path) -> None:
    """Write the program of a seed, made small, as a script beside the results."""
    small = shrink(write(seed), road, words)
    path = results.with_name(f"{results.stem}_{road}_{seed}.py")
    path.write_text(script(small, road, words), encoding="utf-8")


def _lines(results: Path) -> list[dict]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def _summary(results: Path) -> str:
    said = []
    for road in ROADS:
        total: Counter[str] = Counter()
        for line in _lines(results):
            total.update(line["counts"] if line["road"] == road else {})
        said.append(f"{road}: {sum(total.values())} programs, {dict(total)}")
    return "\n".join(said)


if __name__ == "__main__":
    main()
