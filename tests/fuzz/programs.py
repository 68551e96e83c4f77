"""Random programs through the engine's roads, against eager PyTorch.

    python tests/fuzz/programs.py --seconds 60 --road both --results programs.jsonl

tries new seeds for some time, in processes of their own, for a program may end its process. FILE
has a line for each road of each run, which later runs go on from: they take the next seeds.
Programs that fail are made small and written beside FILE as scripts that run alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from programs_exceptions import reason_for, unknown_of
from programs_run import ROADS, check, run_eager
from programs_shrink import failure, kind_of, script, shrink
from programs_write import Program, Writer

import torch_ort

SECONDS_OF_A_LINE = 30
SCRIPTS_OF_A_KIND = 2
CALLS_OF_A_PROCESS = 300  # its caches of compiled code grow
DIED = "the process died"


def write(seed: int) -> Program | None:
    """Write the program of a seed; None where eager PyTorch does not run it."""
    program = Writer(seed).write()
    if program is None:
        return None
    try:
        run_eager(program)
    except Exception:  # in some of its calls, like backward of what was written over
        return None
    return program


class Aside:
    """Calls functions in another process, one at a time; a dead one is replaced."""

    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None
        self._calls = 0

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Give a function's result. Raises BrokenProcessPool where the process dies of it."""
        if self._calls % CALLS_OF_A_PROCESS == 0:
            self._end()
        self._calls += 1
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(
                1, context, initializer=torch.set_num_threads, initargs=(1,)
            )
        try:
            return self._executor.submit(function, *arguments).result()
        except BrokenProcessPool:
            self._end()
            raise

    def _end(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
        self._executor = None


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
    with Aside() as aside:
        for left, road in zip(range(len(roads), 0, -1), roads, strict=True):
            _try_for((until - time.monotonic()) / left, road, chosen.results, aside)
    print(_summary(chosen.results))


def _try_for(seconds: float, road: str, results: Path, aside: Aside) -> None:
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
            try:
                outcome, words = aside.call(try_seed, seed, road)
            except BrokenProcessPool:
                outcome, words = "failed", DIED
            counts[outcome] += 1
            if words:
                failures.append({"seed": seed, "words": words[:500]})
                print(f"{road}, seed {seed}: {words[:300]}", flush=True)
                seen[kind_of(words)] += 1
                if words != DIED and seen[kind_of(words)] <= SCRIPTS_OF_A_KIND:
                    with contextlib.suppress(BrokenProcessPool):  # of a smaller program
                        aside.call(_write_script, seed, road, words, results)
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
        unknown = unknown_of(check(program, road))
        if unknown:
            return "failed", f"left to AOTAutograd, nobody has read why: {unknown[0]}"
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        is_traced = bool(torch_ort.counters()["recordings_handed_over"])
        reason = reason_for(words, road, program.lines)
        if not reason and is_traced and re.search(r"strides of result|got torch\.\w+ ", words):
            reason = "PyTorch's fake tensors have other strides and dtypes than its kernels give"
        if not reason and (is_traced or road == "compile") and failure(program, "aot_eager"):
            reason = "aot_eager goes wrong there as well"
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
