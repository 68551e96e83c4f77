# Runs changed texts of kernels in place of the engine's, each in a process of its own: it may end
# by a fault, or never. Those processes are forked from one that has the test device and has used no
# memory of it yet.
from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from emulated import build

FOUND, NO_TEXT, SURVIVED = "found", "does not compile", "survived"
_SECONDS = 30


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a changed text: one of the words above, and how it was found."""

    word: str
    how: str = ""


class Runner:
    """Gives the texts of cases, and runs changed ones."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        # A pipe and not a queue: no thread is there when the process forks.
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()

    def texts(self, case: str) -> dict[str, str]:
        """Give the texts that the engine writes for a case, by the names of their programs."""
        self._pipe.send((case, None))
        return self._pipe.recv()

    def run(self, case: str, texts: Mapping[str, str]) -> Outcome:
        """Run a case with these texts, in several orders of threads."""
        self._pipe.send((case, dict(texts)))
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


@functools.cache
def machine_code(text: str) -> str | None:
    """Give a text as assembler, or None if it does not compile. Equal ones do the same."""
    flags = ["-std=c++20", "-O2", "-w", "-ffp-contract=off", "-I", build.HERE / "driver"]
    place = ["-include", "cuda_on_cpu.h", "-x", "c++", "-S", "-", "-o", "-"]
    done = subprocess.run(
        [*build.compiler(), *flags, *place], input=text, capture_output=True, text=True
    )
    return done.stdout if done.returncode == 0 else None


@contextlib.contextmanager
def runner() -> Iterator[Runner]:
    """Give a runner for a while."""
    each = Runner()
    try:
        yield each
    finally:
        each.close()


def _serve(pipe) -> None:
    from emulated import cuda_device

    os.environ["TORCH_ORT_KERNEL_CACHE_BYTES"] = "0"
    cuda_device.activate()
    cuda_device.use_driver()
    import torch

    torch.set_num_threads(1)
    import embedding_cases
    import kernel_cases
    import take_cases

    of_sums = embedding_cases.CASES | take_cases.CASES
    makers = kernel_cases.CASES | {name: functools.partial(of_sums.get, name) for name in of_sums}
    cases = {}
    while (asked := pipe.recv()) is not None:
        name, texts = asked
        if name not in cases:
            case = makers[name]()
            cases[name] = case, case.given(), case.wanted()
        with tempfile.TemporaryDirectory() as folder:
            if texts is None:
                pipe.send(_read_texts(Path(folder), cases[name]))
            else:
                pipe.send(_run(Path(folder), cases[name], texts))


def _read_texts(folder: Path, case: tuple) -> dict[str, str]:
    word = _in_child(lambda: _check(case, ["forward"], folder))
    assert word.word == SURVIVED, f"as the engine writes it: {word}"
    return {path.name: path.read_text() for path in folder.glob("*.cu")}


def _run(folder: Path, case: tuple, texts: Mapping[str, str]) -> Outcome:
    from emulated.cuda_driver import ORDERS

    kernels = folder / "kernels"
    for name, text in texts.items():
        (folder / name).write_text(text)
    names = {"EMULATED_CUDA_TEXTS": str(folder), "EMULATED_CUDA_CACHE": str(kernels)}
    return _in_child(lambda: _check(case, ORDERS), **names)


def _check(case: tuple, orders, dump_dir: Path | None = None) -> None:
    """Run a case, and compare. Raises what tells of a mistake."""
    import regions
    from emulated import cuda_device

    of, given, wanted = case
    # Passes may ask for the driver, which no process has that was forked after it.
    compiled = regions.Compiled(of.graph(), regions.CUDA, kernel_dump_dir=str(dump_dir or ""))
    for order in orders:
        os.environ["EMULATED_CUDA_ORDER"] = order
        results = compiled.run(given)
        cuda_device.check_guards()
        try:
            of.compare(results, wanted)
        except AssertionError as error:
            raise AssertionError(f"{order}: wrong numbers") from error
        if of.tells_fault:
            try:
                compiled.run(given)
            except IndexError:
                continue
            raise AssertionError(f"{order}: a fault is not told of")


def _in_child(work: Callable[[], None], **variables: str) -> Outcome:
    """Do some work in a process of its own, and tell how it ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _work_and_leave(work, write, variables)
    os.close(write)
    with os.fdopen(read) as file:
        words = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return Outcome(SURVIVED)
    if status < 0:
        return Outcome(FOUND, words.strip() or signal.Signals(-status).name)
    if "does not compile" in words:
        return Outcome(NO_TEXT, words)
    return Outcome(FOUND, words)


def _work_and_leave(work: Callable[[], None], write: int, variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    os.dup2(write, 2)
    signal.alarm(_SECONDS)
    try:
        work()
    except BaseException as error:
        sys.stderr.write(str(error).split("\n")[0])
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
