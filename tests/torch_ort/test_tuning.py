"""Kernels chosen by measuring: who multiplies, what is kept in files, and what is believed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_process import run_forks
from torch import nn

import torch_ort
from torch_ort import _C, DebugOptions, ORTModule, UserError
from torch_ort.engine import tuning
from torch_ort.engine.tuning import TuningWarning

pytestmark = pytest.mark.ort_only

TRAINING, INFERENCE = "tuning_results_training.json", "tuning_results_inference.json"


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a process that has measured and read nothing."""
    for name in ("ENABLE_TUNING", "MAX_TUNING_DURATION_MS", "TUNING_RESULTS_PATH"):
        monkeypatch.delenv(f"ORTMODULE_{name}", raising=False)
    tuning.forget()
    yield
    tuning.forget()


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, backend="ort", options={"strict": True, **options})


def tuned(function, **options):
    return compiled(function, enable_tuning=True, max_tuning_duration_ms=1, **options)


def count(name: str) -> int:
    return torch_ort.counters()[name]


def kinds() -> list[str]:
    """Give the words for the products that were measured, without threads."""
    return [words.rpartition(", ")[0] for words in _C.kernel_choices()]


def operands(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(sizes).to(dtype) for sizes in ((40, 24), (24, 56))]


def plant(folder: Path, kernel: str, name: str = INFERENCE) -> dict:
    """Let all choices of the process be for one kernel in a file; forget them, and give those."""
    choices = {
        words: {"kernel": kernel, "torch_us": 2, "torch_ort_us": 1.5}
        for words in _C.kernel_choices()
    }
    results = [{"ep": "torch_ort", "validators": tuning.machine(), "results": {"Product": choices}}]
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(results))
    tuning.forget()
    torch_ort.reset_counters()
    return choices


def in_file(folder: Path, name: str) -> dict:
    (result,) = json.loads((folder / name).read_text())
    assert result["ep"] == "torch_ort"
    assert result["validators"] == tuning.machine()
    return result["results"]["Product"]


class Clock:
    """A clock that functions move, in microseconds."""

    def __init__(self) -> None:
        self.time = 5.0
        self.runs = ""

    def now(self) -> float:
        return self.time

    def taking(self, name: str, *times: float):
        """Give a function that takes these times, and then the last one again and again."""
        left = list(times)

        def run() -> None:
            self.runs += name
            self.time += left.pop(0) if len(left) > 1 else left[0]

        return run


class TestTimes:
    @pytest.mark.parametrize(
        ("times", "most_ms", "rounds"),
        [
            ((1, 1), 0, 200),
            ((50, 50), 0, 200),  # of 100 microseconds: 20 ms
            ((500, 500), 0, 30),  # 30 ms
            ((9000, 9000), 0, 6),
            ((1e6, 1e6), 0, 6),
            ((1, 1), 1, 200),
            ((10, 10), 1, 50),  # 1 ms
            ((200, 400), 1, 1),  # a second round would end after 1.2 ms
            ((200, 300), 1, 2),
            ((1e6, 1e6), 1, 1),
            ((1e6, 1e6), 1e9, 6),
        ],
    )
    def test_rounds(self, times, most_ms, rounds):
        clock = Clock()
        own, torchs = clock.taking("o", times[0]), clock.taking("t", times[1])
        got = _C.testing.time_in_turns(own, torchs, most_ms, clock.now)
        assert got == (*times, rounds)
        assert clock.runs == "ot" * rounds

    def test_the_fastest_run_counts(self):
        clock = Clock()
        own, torchs = clock.taking("o", 9e3, 7e3, 8e3), clock.taking("t", 5e3, 6e3, 4e3, 5e3)
        # Five rounds have not been faster than the third.
        assert _C.testing.time_in_turns(own, torchs, 0, clock.now) == (7e3, 4e3, 8)

    def test_disturbed_by_other_processes(self):
        clock = Clock()
        own = clock.taking("o", 2e4, 2e4, 2e4, 100, 2e4)
        torchs = clock.taking("t", 1e4, 1e4, 1e4, 1e4, 1e4, 1e4, 300, 2e4)
        assert _C.testing.time_in_turns(own, torchs, 0, clock.now) == (100, 300, 12)
        # By less than a twentieth is no faster.
        clock = Clock()
        own, torchs = clock.taking("o", 2e4, 1.95e4), clock.taking("t", 2e4)
        assert _C.testing.time_in_turns(own, torchs, 0, clock.now) == (1.95e4, 2e4, 6)

    def test_a_first_run_is_no_measure_of_the_next_ones(self):
        clock = Clock()
        own, torchs = clock.taking("o", 700, 10), clock.taking("t", 250, 10)
        # The second round is expected to take as long as the first.
        assert _C.testing.time_in_turns(own, torchs, 1.9, clock.now)[:2] == (10, 10)
        clock = Clock()
        own, torchs = clock.taking("o", 700, 10), clock.taking("t", 250, 10)
        assert _C.testing.time_in_turns(own, torchs, 1.8, clock.now) == (700, 250, 1)

    @pytest.mark.parametrize(
        ("own_us", "torch_us", "prefers_own", "is_own"),
        [
            (100, 100, True, True), (100, 100, False, False), (100, 98, True, True),
            (100, 96, True, False), (98, 100, False, False), (96, 100, False, True),
        ],
    )  # fmt: skip
    def test_choice(self, own_us, torch_us, prefers_own, is_own):
        assert _C.testing.choose_own(own_us, torch_us, prefers_own) is is_own


class TestMeasuring:
    def test_nothing_is_measured_unless_asked_for(self, tmp_path):
        compiled(torch.mm, tuning_results_path=str(tmp_path))(*operands())
        assert _C.kernel_choices() == {}
        assert count("products_tuned") == count("products_loaded") == 0
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
    )
    def test_each_kind_once(self, dtype):
        a, b = operands(dtype)
        call = tuned(lambda a, b: (a @ b, (a + 1) @ b, b.t() @ a.t()))
        got = call(a, b)
        assert count("products_tuned") == 2
        want = a.double() @ b.double()
        tolerance = 2e-6 * 24 if dtype == torch.float32 else 30 * torch.finfo(dtype).eps
        torch.testing.assert_close(got[0].double(), want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got[2].double(), want.t(), rtol=tolerance, atol=tolerance)
        for choice in _C.kernel_choices().values():
            assert choice.own_us > 0
            assert choice.torch_us > 0
        call(a, b)
        tuned(torch.mm)(a, b)  # another graph
        assert count("products_tuned") == 2

    def test_the_choice_runs(self):
        call = tuned(torch.mm)
        call(*operands())
        (choice,) = _C.kernel_choices().values()
        assert count("steps_product") == int(choice.is_own)

    @pytest.mark.parametrize("isa", _C.isa_names())
    def test_words(self, isa):
        threads = torch.get_num_threads()
        a, b = operands()
        call = tuned(torch.mm, isa=isa)
        call(a, b)
        (words,) = _C.kernel_choices()
        number = "1 thread" if threads == 1 else f"{threads} threads"
        assert words == f"float32 40x24x56 NN, {isa}, {number}"
        torch.set_num_threads(threads + 1)
        try:
            tuned(torch.mm, isa=isa)(a, b)
        finally:
            torch.set_num_threads(threads)
        assert f"float32 40x24x56 NN, {isa}, {threads + 1} threads" in _C.kernel_choices()

    @pytest.mark.parametrize(
        ("function", "arguments", "words"),
        [
            (torch.mm, (torch.randn(4, 5).double(), torch.randn(5, 6).double()),
             "float64 4x5x6 NN"),
            (torch.mm, (torch.randn(4, 5), torch.randn(6, 5).t()), "float32 4x5x6 NT"),
            (torch.mm, (torch.randn(5, 4).t(), torch.randn(5, 6)), "float32 4x5x6 TN"),
            (torch.mm, (torch.randn(5, 4).t(), torch.randn(6, 5).t()), "float32 4x5x6 TT"),
            (torch.mm, (torch.randn(4, 9)[:, :5], torch.randn(5, 12)[:, ::2]),
             "float32 4x5x6 (9,1)(12,2)"),
            (torch.mm, (torch.randn(4, 1), torch.randn(1, 6)), "float32 4x1x6 NN"),
            (torch.mm, (torch.randn(1, 5), torch.randn(5, 6)), "float32 1x5x6 NN"),
            (torch.addmm, (torch.randn(6), torch.randn(4, 5), torch.randn(5, 6)),
             "float32 4x5x6 NN + (0,1)"),
            (torch.addmm, (torch.randn(4, 1), torch.randn(4, 5), torch.randn(5, 6)),
             "float32 4x5x6 NN + (1,0)"),
            (torch.addmm, (torch.randn(6, 4).t(), torch.randn(4, 5), torch.randn(5, 6)),
             "float32 4x5x6 NN + T"),
            (torch.bmm, (torch.randn(2, 4, 5), torch.randn(2, 6, 5).mT),
             "float32 2*4x5x6 NT"),
            (torch.bmm, (torch.randn(2, 4, 5), torch.randn(5, 6).expand(2, 5, 6)),
             "float32 2*4x5x6 N(0,6,1)"),
            (torch.baddbmm, (torch.randn(()), torch.randn(2, 4, 5), torch.randn(2, 5, 6)),
             "float32 2*4x5x6 NN + (0,0,0)"),
        ],
    )  # fmt: skip
    def test_words_for_layouts(self, function, arguments, words):
        got = tuned(function, isa="portable")(*arguments)
        assert kinds() == [f"{words}, portable"]
        want = function(*(each.double() for each in arguments))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("sizes", [(0, 24, 8), (8, 24, 0), (8, 0, 8)])
    def test_nothing_to_multiply(self, sizes):
        m, k, n = sizes
        got = tuned(torch.mm)(torch.randn(m, k), torch.randn(k, n))
        assert torch.equal(got, torch.zeros(m, n))
        assert count("products_tuned") == 0

    def test_what_has_one_kernel(self):
        a, b = (each.long() for each in operands())
        assert torch.equal(tuned(torch.mm)(a, b), a @ b)
        assert count("products_tuned") == 0

    def test_dynamic_sizes(self):
        a, b = operands()
        torch._dynamo.mark_dynamic(a, 0)
        call = tuned(torch.mm)
        for rows in (40, 7, 12, 7, 40):
            x = a[:rows]
            torch.testing.assert_close(call(x if rows < 40 else a, b), x @ b)
        assert sorted(each.split()[1] for each in kinds()) == ["12x24x56", "40x24x56", "7x24x56"]
        assert count("products_tuned") == 3

    def test_the_users_random_stream_goes_on(self):
        torch.manual_seed(3)
        want = torch.rand(5)
        a, b = operands()
        torch.manual_seed(3)
        tuned(torch.mm)(a, b)
        assert count("products_tuned") == 1
        assert torch.equal(torch.rand(5), want)

    def test_training_as_a_module(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 9))
        ours = ORTModule(model, DebugOptions(config={"enable_tuning": True, "strict": True}))
        x = torch.randn(33, 24)
        ours(x).square().mean().backward()
        got = [p.grad for p in model.parameters()]
        model.zero_grad()
        model(x).square().mean().backward()
        for a, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad)
        assert count("products_tuned") == len(_C.kernel_choices()) == 5

    def test_products_switched_off(self, tmp_path):
        (tmp_path / INFERENCE).write_text("no results")
        a, b = operands()
        call = tuned(torch.mm, disable="products", tuning_results_path=str(tmp_path))
        assert torch.equal(call(a, b), a @ b)
        assert count("products_tuned") == count("steps_product") == 0

    def test_threads_that_meet_at_one_product(self):
        a, b = operands()
        calls = [tuned(torch.mm, opset=17 + i) for i in range(4)]  # sessions of their own
        results, together = [], threading.Barrier(4)

        def run(call) -> None:
            together.wait()
            results.append(call(a, b))

        threads = [threading.Thread(target=run, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert count("products_tuned") == 1
        assert len(results) == 4
        assert all(torch.equal(each, results[0]) for each in results)

    def test_explain(self):
        model = nn.Linear(24, 56)
        options = {"enable_tuning": True, "strict": True}
        text = str(torch_ort.explain(model, torch.randn(40, 24), options=options))
        assert "kernels of matrix products: 2 kinds of product were timed, for 0 a file" in text
        assert "kernels of matrix products" not in str(
            torch_ort.explain(model, torch.randn(40, 24))
        )


class TestFiles:
    @pytest.mark.parametrize("name", [TRAINING, INFERENCE])
    @pytest.mark.parametrize("enable_tuning", [False, True])
    @pytest.mark.parametrize(("kernel", "steps"), [("torch", 0), ("torch_ort", 2)])
    def test_what_a_file_says_is_done(self, kernel, steps, enable_tuning, name, tmp_path):
        # One row is PyTorch's else.
        one, (a, b) = torch.randn(1, 40), operands()

        def two(a, b, one):
            return a @ b, one @ a

        tuned(two)(a, b, one)
        plant(tmp_path, kernel, name)
        settings = {"tuning_results_path": str(tmp_path), "enable_tuning": enable_tuning}
        got = compiled(two, **settings)(a, b, one)
        assert count("products_loaded") == 2
        assert count("products_tuned") == 0
        assert count("steps_product") == steps
        for each, want in zip(got, two(a, b, one), strict=True):
            if kernel == "torch":
                assert torch.equal(each, want)
            torch.testing.assert_close(each, want)
        # All sessions of the process make the same choice.
        compiled(two)(a, b, one)
        assert count("steps_product") == 2 * steps

    def test_gradients(self, tmp_path):
        x, layer = torch.randn(40, 24), nn.Linear(24, 56)

        def gradients(call) -> list[torch.Tensor]:
            layer.zero_grad()
            call(x).square().sum().backward()
            return [p.grad.clone() for p in layer.parameters()]

        gradients(tuned(layer))
        plant(tmp_path, "torch", TRAINING)
        got = gradients(compiled(layer, tuning_results_path=str(tmp_path)))
        assert count("steps_product") == 0
        assert count("products_loaded") == 2
        for each, want in zip(got, gradients(compiled(layer, disable="products")), strict=True):
            assert torch.equal(each, want)

    def test_of_two_files_that_of_training_counts(self, tmp_path):
        tuned(torch.mm)(*operands())
        choices = _C.kernel_choices()
        plant(tmp_path, "torch", TRAINING)
        _C.load_kernel_choices(choices)
        plant(tmp_path, "torch_ort", INFERENCE)
        compiled(torch.mm, tuning_results_path=str(tmp_path))(*operands())
        assert count("products_loaded") == 1
        assert count("steps_product") == 0

    @pytest.mark.parametrize(("grad", "name"), [(True, TRAINING), (False, INFERENCE)])
    def test_written_after_the_first_run(self, grad, name, tmp_path):
        folder = tmp_path / "not" / "there"
        layer = nn.Linear(24, 56)
        call = tuned(layer, tuning_results_path=str(folder))
        with torch.set_grad_enabled(grad):
            call(torch.randn(40, 24))
        choices = in_file(folder, name)
        assert choices.keys() == _C.kernel_choices().keys()
        for words, choice in _C.kernel_choices().items():
            assert choices[words] == {
                "kernel": "torch_ort" if choice.is_own else "torch",
                "torch_us": round(choice.torch_us, 3),
                "torch_ort_us": round(choice.own_us, 3),
            }
        assert {path.name for path in folder.iterdir()} <= {name, f"{name}.lock"}
        torch_ort.reset_counters()
        tuning.forget()
        with torch.set_grad_enabled(grad):
            tuned(layer, tuning_results_path=str(folder))(torch.randn(40, 24))
        assert count("products_tuned") == 0
        assert count("products_loaded") == len(choices)

    def test_by_the_environment(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ORTMODULE_ENABLE_TUNING", "1")
        monkeypatch.setenv("ORTMODULE_MAX_TUNING_DURATION_MS", "1")
        monkeypatch.setenv("ORTMODULE_TUNING_RESULTS_PATH", str(tmp_path))
        ORTModule(nn.Linear(24, 56))(torch.randn(40, 24))
        assert len(in_file(tmp_path, TRAINING)) == count("products_tuned") == 2
        compiled(torch.mm)(*operands())
        assert len(in_file(tmp_path, INFERENCE)) == count("products_tuned") == 3

    def test_other_choices_stay(self, tmp_path):
        tuned(torch.mm)(*operands())
        before = plant(tmp_path, "torch_ort")
        a, b = operands()
        tuned(torch.mm, tuning_results_path=str(tmp_path))(a[:9], b)
        after = in_file(tmp_path, INFERENCE)
        assert len(after) == 2
        assert before.items() <= after.items()

    @pytest.mark.parametrize(
        ("name", "value"),
        [("processor", "model name Another"), ("torch", "1.0"), ("torch_ort", "0.0.1"),
         ("instruction sets", "portable, sse9"), ("sockets", "2")],
    )  # fmt: skip
    def test_of_another_machine(self, name, value, tmp_path):
        tuned(torch.mm)(*operands())
        plant(tmp_path, "torch")
        results = json.loads((tmp_path / INFERENCE).read_text())
        results[0]["validators"][name] = value
        (tmp_path / INFERENCE).write_text(json.dumps(results))
        words = f"{INFERENCE}: results are not used: {name}: got '{value}', want "
        with pytest.warns(TuningWarning, match=words):
            tuned(torch.mm, tuning_results_path=str(tmp_path))(*operands())
        assert count("products_loaded") == 0
        assert count("products_tuned") == 1
        both = json.loads((tmp_path / INFERENCE).read_text())
        assert both[:1] == results
        assert both[1]["validators"] == tuning.machine()

    def test_of_onnx_runtime(self, tmp_path):
        results = [{"ep": "ROCMExecutionProvider", "results": {"Gemm": {"NN_1": 3}},
                    "validators": {"ORT_VERSION": "1.17"}}]  # fmt: skip
        (tmp_path / TRAINING).write_text(json.dumps(results))
        with pytest.warns(TuningWarning, match="ep: got 'ROCMExecutionProvider', want 'torch_ort'"):
            ORTModule(nn.Linear(24, 56), DebugOptions(
                config={"enable_tuning": True, "tuning_results_path": str(tmp_path)}
            ))(torch.randn(40, 24))  # fmt: skip
        both = json.loads((tmp_path / TRAINING).read_text())
        assert both[:1] == results
        assert len(both[1]["results"]["Product"]) == 2


def choice_of(kernel: object = "torch", torch_us: object = 1, torch_ort_us: object = 1) -> str:
    return ours({"x": {"kernel": kernel, "torch_us": torch_us, "torch_ort_us": torch_ort_us}})


NO_RESULTS = "results: want an object 'Product', perhaps one 'Attention', and nothing else"


def ours(product: object, **others: object) -> str:
    results = {"Product": product, **others}
    return json.dumps([{"ep": "torch_ort", "validators": tuning.machine(), "results": results}])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON: Expecting value"),
        ("[1, 2", "no JSON"),
        (b"\xff\xfe", "no JSON: 'utf-8' codec"),
        ("[" * 100_000, "no JSON: .*recursion"),
        ("{}", "want a list of objects with ep, validators and results"),
        ("[3]", "want a list of objects"),
        ('[{"ep": "torch_ort"}]', "want a list of objects"),
        (lambda: ours([]), NO_RESULTS),
        (lambda: ours({}, Conv={}), NO_RESULTS),
        (lambda: ours({"x": 3}), "'x': got 3, want kernel, torch_us, torch_ort_us"),
        (lambda: ours({"x": {"kernel": "torch"}}), "'x': got .*, want kernel, torch_us"),
        (lambda: choice_of("mkl"), "'x': kernel: got 'mkl', want torch or torch_ort"),
        (lambda: choice_of([]), r"'x': kernel: got \[\], want torch or torch_ort"),
        (lambda: choice_of(torch_us="1"), "'x': got '1', want microseconds"),
        (lambda: choice_of(torch_ort_us=True), "'x': got True, want microseconds"),
        (lambda: choice_of(torch_ort_us=-1), "'x': got -1, want microseconds"),
        (lambda: choice_of(torch_us=float("nan")), "'x': got nan, want microseconds"),
        (lambda: json.dumps(2 * json.loads(ours({}))), "two results of this machine"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strict", [True, False])
def test_a_wrong_file(text, words, strict, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", str(int(strict)))
    text = text() if callable(text) else text
    (tmp_path / TRAINING).write_bytes(text if isinstance(text, bytes) else text.encode())
    settings = {"tuning_results_path": str(tmp_path), "strict": strict}
    call = tuned(torch.mm, **settings)
    whole = f"tuning_results_path: .*{TRAINING}: {words}.*; delete the file, or name another folder"
    for _ in range(2):
        with pytest.raises(Exception, match=whole):
            call(*operands())
    with pytest.raises(UserError, match=whole):
        ORTModule(nn.Linear(24, 56), DebugOptions(config=settings))(torch.randn(40, 24))
    assert _C.kernel_choices() == {}
    assert (tmp_path / TRAINING).exists()


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    call = tuned(torch.mm, tuning_results_path=str(tmp_path / "file"))
    with pytest.raises(Exception, match="Not a directory"):
        call(*operands())


PROCESS = """
import sys
import torch
import torch_ort

torch.set_num_threads(2)
rows = [int(each) for each in sys.argv[1].split(",")]
b = torch.randn(24, 56)
call = torch.compile(torch.mm, backend="ort", dynamic=True)
for each in rows:
    call(torch.randn(each, 24), b)
counters = torch_ort.counters()
print(*(counters[name] for name in ("products_tuned", "products_loaded", "steps_product")))
"""


def counts_of(folder: Path, *rows: str, enable_tuning: bool) -> list[list[int]]:
    """Run a process for each list of rows, all at once.

    Gives products tuned, products loaded, and steps of the engine's kernels of each.
    """
    environment = {
        **os.environ,
        "ORTMODULE_ENABLE_TUNING": str(int(enable_tuning)),
        "ORTMODULE_MAX_TUNING_DURATION_MS": "1",
        "ORTMODULE_TUNING_RESULTS_PATH": str(folder / "results"),
    }
    script = folder / "script.py"
    script.write_text(PROCESS)
    done = run_forks(script, [[each] for each in rows], env=environment)
    assert not any(each.returncode for each in done), [each.stderr[-4000:] for each in done]
    return [[int(number) for number in each.stdout.split()] for each in done]


def test_processes(tmp_path):
    """Several write into one file, later runs included; a fresh one follows it."""
    folder = tmp_path / "results"
    for measured, _, _ in counts_of(tmp_path, "40,7", "40,9", enable_tuning=True):
        assert 1 <= measured <= 2  # one may have read what the other wrote
    choices = in_file(folder, INFERENCE)
    assert sorted(words.split()[1] for words in choices) == ["40x24x56", "7x24x56", "9x24x56"]
    steps = sum(choice["kernel"] == "torch_ort" for choice in choices.values())
    assert counts_of(tmp_path, "40,7,9", enable_tuning=False) == [[0, 3, steps]]
    for choice in choices.values():
        choice["kernel"] = "torch"
    (folder / INFERENCE).write_text(ours(choices))
    assert counts_of(tmp_path, "40,7,9", enable_tuning=False) == [[0, 3, 0]]
