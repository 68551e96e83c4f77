"""Python in processes of its own that need not import PyTorch and torch_ort, which takes seconds.

Each is a fork of one process that has imported both and has run nothing, and is as new as one that
begins with these imports. What imports do, and what the environment changes in them, is tested in
processes that begin anew: own_process.py.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# With more than one thread in it, a process cannot be forked.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

OURS = ("torch", "torch_ort")


def run_fork(script: Path, *arguments: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a script in one process, as `run_forks` does."""
    return run_forks(script, [arguments], **settings)[0]


def run_forks(
    script: Path,
    arguments: Sequence[Sequence[object]],
    imports: Sequence[str] = OURS,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script in a process for each list of arguments, all at once.

    The modules of `imports` are there already. Gives return codes, output and errors as text; after
    one process that fails, the others are killed.

    Raises subprocess.TimeoutExpired.
    """
    calls = [[str(script), *map(str, each)] for each in arguments]
    with tempfile.TemporaryDirectory() as folder:
        files = [[f"{folder}/{kind}_{i}" for kind in ("out", "err")] for i in range(len(calls))]
        server = _server(tuple(imports))
        assert server.stdin is not None
        assert server.stdout is not None
        request = {
            "calls": calls, "files": files, "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env), "timeout": timeout,
        }  # fmt: skip
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            codes = json.loads(server.stdout.readline())
        except BaseException:
            # Whoever asks next must not read the answer to this.
            _server.cache_clear()
            server.kill()
            raise
        texts = [[Path(file).read_text() for file in pair] for pair in files]
    done = [
        subprocess.CompletedProcess(call, code, *both)
        for call, code, both in zip(calls, codes, texts, strict=True)
    ]
    if None in codes:
        late = done[codes.index(None)]
        raise subprocess.TimeoutExpired(late.args, timeout, late.stdout, late.stderr)
    return done


@functools.cache
def _server(imports: tuple[str, ...]) -> subprocess.Popen[str]:
    """Start the process that others are forks of; it ends with this one."""
    return subprocess.Popen(
        [sys.executable, __file__, *imports], env=os.environ | ONE_THREAD, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def serve() -> tuple[dict[str, Any], int] | None:
    """Answer requests until there are no more. In each fork, gives the request and its place."""
    # A child that ends before it is waited for is not missed: its signal is kept.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    # Children must find nothing of it in a buffer, or at its end.
    requests, answers = os.dup(0), os.dup(1)
    with open(requests) as lines:
        for line in iter(lines.readline, ""):
            request = json.loads(line)
            pids = []
            for place in range(len(request["calls"])):
                pid = os.fork()
                if pid == 0:
                    os.close(answers)
                    return request, place
                pids.append(pid)
            os.write(answers, (json.dumps(codes_of(pids, request["timeout"])) + "\n").encode())
    return None


def codes_of(pids: list[int], timeout: float) -> list[int | None]:
    """Wait for children and give their return codes; None for those that take too long."""
    codes: dict[int, int | None] = {}
    end = time.monotonic() + timeout
    while len(codes) < len(pids):
        for pid in [pid for pid in pids if pid not in codes]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        is_late = time.monotonic() > end
        if is_late or any(codes.values()):
            for pid in [pid for pid in pids if pid not in codes]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None if is_late else -signal.SIGKILL
        elif len(codes) < len(pids):
            signal.sigtimedwait([signal.SIGCHLD], max(0.0, end - time.monotonic()))
    return [codes[pid] for pid in pids]


def become(request: dict[str, Any], place: int) -> tuple[Any, dict[str, Any]]:
    """Make this process the one that was asked for; gives the code it runs, and where."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, file in enumerate(request["files"][place], start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = request["calls"][place]
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [os.path.dirname(os.path.abspath(sys.argv[0])), *filter(None, folders)]
    main = types.ModuleType("__main__")
    main.__file__ = sys.argv[0]
    sys.modules["__main__"] = main
    return compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec"), main.__dict__


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if found := serve():
        exec(*become(*found))
    else:
        os._exit(0)  # to take all modules apart takes seconds
