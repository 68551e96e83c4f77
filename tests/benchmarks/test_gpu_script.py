""".ci/gpu with commands that only say how they were called: what fails does not end the rest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from own_process import run_python

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "gpu"
STEPS = ["float32", "bfloat16"]

COMMAND = r"""#!/bin/sh
case "$*" in *sys.executable*) echo "$0"; exit;; esac
echo "${0##*/} $* caching=${PYTORCH_NO_CUDA_MEMORY_CACHING:-}" | tr '\n' ' ' >> "$CALLS"
echo >> "$CALLS"
matches() { [ -n "$1" ] && printf %s "$all" | grep -qE -- "$1"; }
all="${0##*/} $*"
if matches "$HANGS"; then sleep 60; fi
if matches "$FAILS"; then exit 3; fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with the script and nothing that it calls."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    (tmp_path / "torch_ort").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("python3", "cmake", "ninja", "compute-sanitizer"):
        command = tmp_path / "bin" / name
        command.write_text(COMMAND)
        command.chmod(0o755)
    return tmp_path


def run(
    checkout: Path, *steps: str, fails: str = "", hangs: str = "", **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script, and give what it called as well, a line each."""
    calls = checkout / "calls"
    calls.write_text("")
    done = subprocess.run(
        ["bash", str(checkout / ".ci" / "gpu"), *steps],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={
            "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "FAILS": fails,
            "HANGS": hangs,
            **variables,
        },
    )
    return done, calls.read_text().splitlines()


def ends(text: str) -> list[str]:
    """Give the last lines: which steps took how long, and which failed."""
    return re.sub(r"\d+ s", "N s", text[text.index("== took") :]).splitlines()


ALL = [
    *(
        "build", "smoke", "smoke, checked", "tests", "memcheck", "racecheck", "synccheck",
        "optimizers",
    ),
    *(f"training steps in {dtype}" for dtype in STEPS),
]  # fmt: skip


def test_all_steps(checkout):
    done, calls = run(checkout)
    assert done.returncode == 0, done.stderr
    assert ends(done.stdout) == ["== took", *(f"{name}: N s" for name in ALL)]
    assert [call.split()[0] for call in calls] == [
        *("cmake", "ninja", "python3", "python3"),
        *["python3"] * 4,
        *["compute-sanitizer"] * 3,
        *["python3"] * 3,
    ]
    assert "benchmarks/smoke.py --device cuda " in calls[4]
    assert "benchmarks/smoke.py --device cuda --check 2 " in calls[5]
    assert "import pytest_timeout" in calls[6]
    assert "-m pytest -m cuda --continue-on-collection-errors --timeout 60 -n 8 " in calls[7]
    for call, tool in zip(calls[8:11], ("memcheck", "racecheck", "synccheck"), strict=True):
        assert f"--tool {tool} --report-api-errors no --error-exitcode 1" in call
        assert call.rstrip().endswith("caching=1" if tool == "memcheck" else "caching=")
    results = checkout / "build" / "gpu" / "results"
    for call, dtype in zip(calls[12:], STEPS, strict=True):
        assert f"--json {results}/train_step_{dtype}.json --logs {results}/logs_{dtype}" in call
        assert ("--autocast bfloat16" in call) == (dtype == "bfloat16")


def test_what_fails_does_not_end_the_rest(checkout):
    done, calls = run(checkout, fails=".")
    assert done.returncode == 1
    failed = [f"{name} (status 3)" for name in ALL]
    assert ends(done.stdout)[len(ALL) + 1 :] == ["== failed", *failed]
    # Within the build the first failure is the last.
    assert [call.split()[0] for call in calls if "cmake" in call or "ninja" in call] == ["cmake"]
    assert len(calls) == len(ALL) + 1  # one asks for pytest-timeout, which is not there
    assert all("--timeout" not in call for call in calls)


@pytest.mark.parametrize(
    ("fails", "named"),
    [
        ("--tool racecheck", "racecheck (status 3)"),
        ("^ninja", "build (status 3)"),
        ("^python3 benchmarks/optimizers", "optimizers (status 3)"),
        ("train_step_float32", "training steps in float32 (status 3)"),
    ],
    # The name of the folder, which is in what is called, has those of the parameters.
    ids=["one tool", "build", "one benchmark", "one dtype"],
)
def test_one_failure(checkout, fails, named):
    done, _ = run(checkout, fails=fails)
    assert done.returncode == 1
    assert ends(done.stdout)[len(ALL) + 1 :] == ["== failed", named]


def test_some_steps(checkout):
    done, calls = run(checkout, "tests", "sanitizer", PYTEST_ARGS="-k one", GPU_TEST_LIMIT="7")
    assert done.returncode == 0
    assert len(calls) == 5
    words = "-m pytest -m cuda --continue-on-collection-errors --timeout 7 -k one"
    assert words in calls[1]
    done, calls = run(checkout, "tests", "nothing")
    assert (done.returncode, calls) == (2, [])
    assert "got 'nothing', want build, smoke, tests" in done.stderr


def test_quick(checkout, tmp_path):
    results = tmp_path / "results"
    done, calls = run(checkout, "quick", GPU_RESULTS=str(results), BENCH_ARGS="--models llama_1b")
    assert done.returncode == 0
    smoke, checked, steps, graphs, ours, _, tests, theirs = calls[4:]
    assert "benchmarks/smoke.py" in smoke
    assert "--check 2" in checked
    assert "--backend ort " in ours
    assert "--backend inductor " in theirs
    assert "--timeout 60 tests/cuda_kernels --tb=short -q -n 8" in tests
    assert {file.name for file in results.iterdir()} >= {"profile_ort.txt", "profile_inductor.txt"}
    assert "--autocast bfloat16" in steps
    assert f"--json {results}/train_step_bfloat16.json" in steps
    assert "--models gpt2_small --backends eager ort inductor" in steps
    assert "--models gpt2_small_1 --backends ort ort_graphs inductor_graphs" in graphs
    assert f"--json {results}/graphs_bfloat16.json" in graphs.split("--backends")[1]
    # The last one counts.
    assert steps.index("--models llama_1b") > steps.index("--models gpt2_small")


def test_what_hangs_is_interrupted_and_says_what_it_has(checkout):
    python = checkout / "bin" / "python3"
    python.write_text(
        COMMAND.replace('if matches "$HANGS"', "trap 'echo failed so far: 3; kill $!; exit 2' INT\n"
                        'if matches "$HANGS"').replace("sleep 60", "sleep 60 & wait")
    )  # fmt: skip
    done, _ = run(checkout, "tests", hangs="-m pytest", GPU_LIMIT="1")
    assert done.returncode == 1
    assert "failed so far: 3" in done.stdout
    assert "tests (ended after 1 s)" in done.stdout


def test_what_hangs_is_ended(checkout):
    done, calls = run(checkout, "benchmarks", hangs="train_step_float32", GPU_LIMIT="1")
    assert done.returncode == 1
    assert len(calls) == 3
    assert "training steps in float32 (ended after 1 s)" in done.stdout


def test_a_carried_build_is_taken(checkout):
    built, package = checkout / ".gpu" / "built", checkout / "torch_ort"
    built.mkdir(parents=True)
    names = ["_C.cpython-312-x86_64-linux-gnu.so", "_build_info.py"]
    own = checkout / "own"
    own.write_text("own")
    os.link(own, package / names[0])  # as a build leaves it
    for name in names:
        (built / name).write_text("carried")
    done, calls = run(checkout, "build")
    assert done.returncode == 0, done.stderr
    assert [(package / name).read_text() for name in names] == ["carried"] * 2
    assert own.read_text() == "own"
    assert {call.split()[0] for call in calls} == {"python3"}
    assert "import torch_ort" in calls[-1]


PREBUILD = {
    "python3.12": 'mkdir -p "$3/bin"; for name in python python3 pip; do '
    'cp "$(dirname "$0")/env-python3" "$3/bin/$name"; done',
    "env-python3": 'case "$*" in *sys.executable*) echo "$0"; exit;; esac\n'
    'echo "${0##*/} $* in $PWD" | tr "\\n" " " >> "$CALLS"; echo >> "$CALLS"; '
    'if [ -n "$FAILS" ] && echo "${0##*/} $*" | grep -qE -- "$FAILS"; then exit 3; fi',
    "ninja": 'mkdir -p "$2/generated"; touch "$2/_C.cpython-312-x86_64-linux-gnu.so" '
    '"$2/generated/_build_info.py"; echo "${0##*/} $*" >> "$CALLS"',
    "apt-get": "touch libprotobuf.deb",
    "dpkg": 'lib="$3/usr/lib/x86_64-linux-gnu"; mkdir -p "$lib" "$3/usr/bin"; '
    'touch "$lib/libprotobuf-lite.so.32" "$lib/libprotobuf.a"; '
    'touch "$3/usr/bin/protoc"; chmod +x "$3/usr/bin/protoc"',
}


@pytest.fixture
def without_network(checkout: Path) -> Path:
    """Stand in for the environment, the packages of protobuf and the build."""
    for name, words in PREBUILD.items():
        command = checkout / "bin" / name
        command.write_text(f"#!/bin/sh\n{words}\n")
        command.chmod(0o755)
    (checkout / "torch_ort" / "_build_info.py").write_text("own")
    (checkout / "torch_ort" / "__init__.py").write_text("")
    (checkout / "cmake").mkdir()
    shutil.copy(ROOT / "cmake" / "checkout.py", checkout / "cmake")
    copies = f'case "$1" in cmake/checkout.py) exec {sys.executable} "$@";; esac\n'
    python = COMMAND.replace("#!/bin/sh\n", f"#!/bin/sh\n{copies}")
    (checkout / "bin" / "python3").write_text(python)
    return checkout


def files_in(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_prebuild_leaves_what_build_takes(without_network):
    checkout = without_network
    for _ in range(2):  # the second time, most of it is there
        done, calls = run(checkout, "prebuild")
        assert done.returncode == 0, done.stdout + done.stderr
        assert ends(done.stdout)[-4:] == [
            "== took",
            "environment: N s",
            "module: N s",
            "trial: N s",
        ]
        assert files_in(checkout / ".gpu") == [
            "built/_C.cpython-312-x86_64-linux-gnu.so",
            "built/_build_info.py",
            "protobuf/usr/lib/x86_64-linux-gnu/libprotobuf-lite.so.32",
        ]
        assert "pip install -q torch==2.11.0 " in calls[0]
        assert calls[1].startswith("cmake -S . ")
        assert calls[2] == f"ninja -C {checkout}/build/gpu _C"
        # What comes after it finds what travels, and builds nothing.
        trial = checkout / "build" / "gpu-trial"
        assert all(call.endswith(f" in {trial} ") for call in calls[3:])
        assert "import torch_ort" in calls[-2]
        assert "-m pytest " in calls[-1]
        assert (trial / "torch_ort" / "_C.cpython-312-x86_64-linux-gnu.so").exists()
        # The checkout has the build that it had.
        assert files_in(checkout / "torch_ort") == ["__init__.py", "_build_info.py"]
        assert (checkout / "torch_ort" / "_build_info.py").read_text() == "own"


@pytest.mark.parametrize(
    ("fails", "named", "last"),
    [
        ("^pip install", "environment (status 3)", "pip"),
        ("-m pytest", "trial (status 3)", "python"),
        ("import torch_ort", "trial (status 1)", "python3"),
    ],
    ids=["packages", "tests", "import"],
)
def test_a_part_of_prebuild_that_fails_is_the_last(without_network, fails, named, last):
    done, calls = run(without_network, "prebuild", fails=fails)
    assert done.returncode == 1
    assert ends(done.stdout)[-2:] == ["== failed", named]
    assert calls[-1].split()[0] == last


@pytest.mark.slow
def test_what_prebuild_has_left_runs_the_short_tests():
    """With the PyTorch for which it was built, in the environment that was made for that."""
    if not list((ROOT / ".gpu" / "built").glob("_C.*.so")):
        pytest.skip("nothing is built for a GPU: run `.ci/gpu prebuild`")
    done = subprocess.run(
        ["bash", str(SCRIPT), "trial"], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def listed(name: str) -> list[str]:
    """Give the tests in a list of the script."""
    found = re.search(rf"^{name}=\(\n(.*?)\n\)", SCRIPT.read_text(), re.DOTALL | re.MULTILINE)
    return [line.strip().strip("'") for line in found[1].splitlines()]


def test_listed_tests_exist():
    tests = listed("sanitized_tests") + listed("short_tests")
    done = run_python("-m", "pytest", "--collect-only", "-q", *tests, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


HANGS = """
import threading
import pytest

pytestmark = pytest.mark.cuda

def test_right():
    pass

def test_wrong():
    left, right = 17, 18
    assert left == right

def test_hangs():
    threading.Event().wait()
"""


@pytest.mark.parametrize("each", ["2", "50"], ids=["by a limit of its own", "by that of all"])
def test_what_fails_and_what_hangs_is_told_with_details(checkout, each):
    """Here pytest is the real one: two processes, a limit for each test and one for all."""
    python = checkout / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    tests = checkout / "tests"
    tests.mkdir()
    (tests / "pytest.ini").write_text("[pytest]\nmarkers = cuda: on a GPU\n")
    (tests / "test_some.py").write_text(HANGS)
    done, _ = run(
        checkout, "tests", PYTEST_ARGS="-n 2 -p no:cacheprovider tests", GPU_LIMIT="15",
        GPU_TEST_LIMIT=each, HOME=str(checkout),
    )  # fmt: skip
    assert done.returncode == 1
    assert "assert 17 == 18" in done.stdout
    assert "test_some.py::test_wrong" in done.stdout
    if each == "2":
        assert "Failed: Timeout (>2.0s) from pytest-timeout" in done.stdout
        assert "threading.Event().wait()" in done.stdout
        assert "2 failed, 1 passed" in done.stdout
        assert ends(done.stdout)[-1] == "tests (status 1)"
    else:
        assert ends(done.stdout)[-1] == "tests (ended after N s)"
