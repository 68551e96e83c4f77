"""The benchmark runs, and what it writes holds together. Nothing here depends on speed."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from emulated import cuda_device
from forked_process import run_fork
from own_process import run_python

import torch_ort

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS.parent / "benchmarks" / "train_step.py"


def run_benchmark(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_python(SCRIPT, *arguments, timeout=600, env=os.environ | variables)


def test_quick_measures_everything(tmp_path: Path) -> None:
    result_file, picture = tmp_path / "result.json", tmp_path / "result.png"
    arguments = ["--quick", "--models", "lm_d64", "--backends", "eager", "--threads", "1"]
    arguments += ["--json", str(result_file), "--png", str(picture)]

    done = run_benchmark(*arguments)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Steady step, 1 thread(s), ms" in done.stdout
    assert "figures are not for quoting" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")

    result = json.loads(result_file.read_text())
    assert result["settings"]["arguments"] == arguments
    (record,) = result["records"]
    assert record["backend"] == "eager"
    rounds = result["settings"]["protocol"]["rounds"]
    steps = result["settings"]["protocol"]["steps"]
    assert [len(one) for one in record["steps"]] == [steps] * rounds
    for whole, part in zip(record["steps"], record["fwd_bwd"], strict=True):
        assert all(0 < p < w for w, p in zip(whole, part, strict=True))
    assert record["figures"]["min_first_cold"] > 0
    assert record["figures"]["first_warm"] > 0
    assert record["error"] is None
    check_memory(record["memory"][0])


def test_steps_are_compared_with_the_least_possible_time(tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    done = run_benchmark(
        *("--quick", "--steady-only", "--models", "lm_d64", "--backends", "eager", "ort"),
        *("--threads", "1", "--rounds", "1", "--json", str(result_file)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The least possible forward and backward, 1 thread(s)" in done.stdout
    eager, ort = json.loads(result_file.read_text())["records"]
    assert eager["roofline"] is None
    found = ort["roofline"]
    assert found["where"].endswith(", 1 thread")
    memory_s = found["memory_bytes"] / found["bytes_per_second"]
    products_s = found["flops"]["float32"] / found["peak_flops"]["float32"]
    assert abs(found["least_s"] - products_s - memory_s) < 1e-9
    assert found["products_of_peak"] > 0
    for record in (eager, ort):
        ratio = record["figures"]["min_fwd_bwd"] / found["least_s"]
        assert f"{ratio:.2f}×" in done.stdout


def test_inference(tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    done = run_benchmark(
        *("--inference", "--quick", "--models", "cnn", "--backends", "eager", "ort"),
        *("--threads", "1", "--rounds", "1", "--json", str(result_file)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "forward alone, under no_grad, of the model in eval()" in done.stdout
    eager, ort = json.loads(result_file.read_text())["records"]
    # Batch norms with running statistics, which no step has changed.
    assert abs(eager["loss"] - ort["loss"]) < 1e-5
    assert ort["steady_counters"][0]["ort"]["fallbacks"] == 0
    assert ort["steady_counters"][0]["ort"]["backward_runs"] == 0
    for record in (eager, ort):
        (sizes,) = record["memory"]
        assert sizes["gradient_bytes"] == sizes["optimizer_bytes"] == 0


@pytest.mark.slow
def test_forward_in_a_shorter_dtype(tmp_path: Path) -> None:
    losses = {}
    for dtype in ("none", "bfloat16"):
        result_file = tmp_path / f"{dtype}.json"
        done = run_benchmark(
            *("--quick", "--steady-only", "--models", "lm_d64", "--backends", "eager", "ort"),
            *("--threads", "1", "--rounds", "1", "--steps", "2", "--json", str(result_file)),
            *(() if dtype == "none" else ("--autocast", dtype)),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        records = json.loads(result_file.read_text())["records"]
        losses[dtype] = [record["loss"] for record in records]
        assert all(record["error"] is None for record in records)
    for exact, short in zip(losses["none"], losses["bfloat16"], strict=True):
        assert exact != short
        assert abs(exact - short) < 0.05


@pytest.mark.cuda
def test_on_a_gpu(tmp_path: Path) -> None:
    result_file, logs, variables = tmp_path / "result.json", tmp_path / "logs", {}
    if cuda_device.is_active():
        # Each process of the benchmark has to make the test device before it imports torch.
        (tmp_path / "sitecustomize.py").write_text(
            "from emulated import cuda_device\ncuda_device.activate()\ncuda_device.use_driver()\n"
        )
        paths = [str(tmp_path), str(TESTS), os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = run_benchmark(
        *("--device", "cuda", "--quick", "--models", "lm_d64", "--backends", "eager", "ortmodule"),
        *("--processes", "2", "--rounds", "1", "--steps", "2"),
        *("--json", str(result_file), "--logs", str(logs)),
        **variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Peak memory" in done.stdout
    assert "reserved / eager" in done.stdout
    result = json.loads(result_file.read_text())
    assert result["settings"]["is_complete"] is True
    for record in result["records"]:
        assert [len(one) for one in record["steps"]] == [2, 2]
        assert all(0 < step < 60 for one in record["steps"] for step in one)
        assert record["figures"]["first_warm"] > 0
        (sizes,) = record["memory"]
        check_memory(sizes)
        held = sum(sizes[f"{kind}_bytes"] for kind in ("parameter", "optimizer", "input"))
        assert sizes["reserved_peak_bytes"] >= held + sizes["step_peak_bytes"]
    threads = result["records"][0]["threads"]
    names = sorted(path.name for path in logs.iterdir())
    assert names == [f"lm_d64-{backend}-{threads}.log" for backend in ("eager", "ortmodule")]


def test_cuda_graphs_need_cuda() -> None:
    done = run_fork(SCRIPT, "--backends", "inductor_graphs")
    assert done.returncode == 2
    assert "--backends inductor_graphs: CUDA graphs need --device cuda" in done.stderr


def test_products_of_onednn_need_the_library() -> None:
    done = run_fork(SCRIPT, "--backends", "eager_onednn")
    assert done.returncode == 2
    words = "--backends eager_onednn: needs --onednn, and is for float32 on the CPU"
    assert words in done.stderr


def test_two_builds_are_measured_side_by_side(tmp_path: Path) -> None:
    """The other checkout here is this one's own copy, so that all but times are equal."""
    checkout, result_file = tmp_path / "other", tmp_path / "result.json"
    shutil.copytree(
        Path(torch_ort.__file__).parent,
        checkout / "torch_ort",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    done = run_benchmark(
        *("--quick", "--steady-only", "--models", "lm_d64", "--threads", "1"),
        *(
            "--processes", "2", "--rounds", "1", "--against", str(checkout), "--json",
            str(result_file),
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "This build / the other one" in done.stdout
    assert "step, geometric mean" in done.stdout
    this, other = json.loads(result_file.read_text())["records"]
    assert (this["backend"], other["backend"]) == ("ort", "ort")
    assert (this["is_other_build"], other["is_other_build"]) == (False, True)
    assert Path(this["package"]) == Path(torch_ort.__file__).parent
    assert Path(other["package"]) == checkout / "torch_ort"
    # The two run the same kernels under the same seed.
    assert this["loss"] == other["loss"]
    assert len(this["steady_counters"]) == len(other["steady_counters"]) == 2
    for ours, theirs in zip(this["steady_counters"], other["steady_counters"], strict=True):
        assert ours["dynamo"] == {"graphs": 1, "breaks": 0}
        assert ours["ort"]["steps_run"] == theirs["ort"]["steps_run"] > 0
        assert ours["ort"]["arena_bytes"] == theirs["ort"]["arena_bytes"]
    assert this["verdicts"]
    assert other["verdicts"] == []


def test_a_checkout_that_is_not_built_is_refused(tmp_path: Path) -> None:
    done = run_fork(SCRIPT, "--against", str(tmp_path))
    assert done.returncode == 2
    assert "want a checkout with a built torch_ort" in done.stderr


def check_memory(sizes: dict[str, int]) -> None:
    # AdamW keeps two moments of every parameter, and a scalar count of its steps.
    assert sizes["gradient_bytes"] == sizes["parameter_bytes"]
    assert sizes["optimizer_bytes"] > 2 * sizes["parameter_bytes"]
    if sizes["step_peak_bytes"] is not None:
        assert sizes["activation_bytes"] == sizes["step_peak_bytes"] - sizes["gradient_bytes"]
        # The logits, their logarithms and both gradients: 4 x 32 rows of 1000 floats each.
        assert sizes["activation_bytes"] > 2 * 4 * 32 * 1000 * 4


def test_wrong_names_and_numbers_are_refused() -> None:
    unknown = run_fork(SCRIPT, "--models", "resnet")
    assert unknown.returncode == 2
    assert "invalid choice: 'resnet'" in unknown.stderr

    threads = run_fork(SCRIPT, "--threads", "0")
    assert threads.returncode == 2
    assert "--threads: got 0, want 1 or more" in threads.stderr

    runs = run_fork(SCRIPT, "--first-runs", "0")
    assert runs.returncode == 2
    assert "--first-runs: got 0, want 1 or more" in runs.stderr


def test_a_worker_that_cannot_work_keeps_its_reason(tmp_path: Path) -> None:
    # With no time to answer, every worker is stopped at its first request.
    result_file, picture = tmp_path / "result.json", tmp_path / "result.png"
    done = run_benchmark(
        *("--quick", "--steady-only", "--models", "lm_d64", "--backends", "eager"),
        *("--threads", "1", "--timeout", "0.01", "--json", str(result_file)),
        *("--png", str(picture)),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (record,) = json.loads(result_file.read_text())["records"]
    assert record["error"] == "machine: no answer after 0 s"
    assert "failed: machine: no answer" in done.stdout
    # Nothing to draw is no reason to fail a second time.
    assert picture.exists()
