"""Files of StatisticsSubscriber."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch
from torch import nn

from torch_ort.convergence import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation
from torch_ort.onnxruntime_training.convergence.merge_activation_summary import (
    read_record,
    read_run,
)
from torch_ort.onnxruntime_training.convergence.statistics import file_name, statistics_of

pytestmark = pytest.mark.ort_only

BUCKETS = (1, 3, 7, 1 << 29)
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def write(tensor, folder, **settings):
    """Write one tensor as an activation; give what its file says."""
    subscriber = StatisticsSubscriber(folder, **settings)
    subscriber.forward_activation("x", tensor, 0, 2)
    return read_record(folder / "step_0" / "x_forward")


@pytest.mark.parametrize("bucket_size", BUCKETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_all_types(dtype, bucket_size):
    torch.manual_seed(0)
    tensor = (torch.randn(5, 4) * 3).clamp(min=0 if dtype == torch.uint8 else -9).to(dtype)
    got = statistics_of(tensor, bucket_size)
    wide = tensor.double()
    want = [wide.min(), wide.max(), wide.mean(), wide.std(correction=0)]
    torch.testing.assert_close(list(astuple(got))[:4], [number.item() for number in want])
    assert (got.nan, got.inf) == (0, 0)
    assert got.zero == (wide == 0).sum()
    assert got.negative == (wide < 0).sum()
    assert got.positive == (wide > 0).sum()


@pytest.mark.parametrize("bucket_size", BUCKETS)
def test_nan_and_infinity_are_counted(bucket_size):
    nan, inf = math.nan, math.inf
    got = statistics_of(torch.tensor([1.0, nan, inf, -inf, inf, 0.0, -0.0, -2.0]), bucket_size)
    assert (got.nan, got.inf, got.zero, got.negative, got.positive) == (1, 3, 2, 2, 3)
    assert all(map(math.isnan, (got.min, got.max, got.mean, got.std)))


@pytest.mark.parametrize("bucket_size", BUCKETS)
def test_infinity_alone_leaves_the_extremes(bucket_size):
    got = statistics_of(torch.tensor([1.0, math.inf, -2.0]), bucket_size)
    assert (got.min, got.max, got.mean) == (-2.0, math.inf, math.inf)
    assert math.isnan(got.std)


@pytest.mark.parametrize("bucket_size", BUCKETS)
def test_a_large_mean_leaves_the_deviation(bucket_size):
    got = statistics_of(torch.tensor([1e9 + 1, 1e9 + 3], dtype=torch.float64), bucket_size)
    assert (got.mean, got.std) == (1e9 + 2, 1.0)


def test_one_number_deviates_by_nothing():
    assert statistics_of(torch.tensor(3.0), 8).std == 0.0


def test_parts_of_complex_numbers_are_taken_together():
    got = statistics_of(torch.tensor([3 - 4j, 1j]).conj(), 3)
    assert (got.min, got.max, got.zero, got.negative, got.positive) == (-1, 4, 1, 1, 2)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 2)])
def test_empty_tensors(shape, tmp_path):
    record = write(torch.empty(shape), tmp_path / "run")
    assert record.values == []
    assert record.fields["shape"] == str(list(shape))
    assert [record.fields[key] for key in ("min", "max", "mean", "std")] == ["nan"] * 4
    assert [record.fields[key] for key in ("nan", "inf", "zero")] == ["0"] * 3


def test_all_lines_of_a_file(tmp_path):
    record = write(torch.tensor([[1.5, -2.5], [0.0, 3.0]]).t(), tmp_path / "run")
    assert record.fields == {
        "activation": "x", "direction": "forward", "order": "0", "depth": "2",
        "shape": "[2, 2]", "dtype": "torch.float32", "min": "-2.5", "max": "3.0", "mean": "0.5",
        "std": str(math.sqrt(4.125)), "nan": "0", "inf": "0", "zero": "1", "negative": "1",
        "positive": "2",
    }  # fmt: skip
    assert record.values == ["1.5", "0.0", "-2.5", "3.0"]


def test_the_first_128_values_are_written(tmp_path):
    record = write(torch.arange(300), tmp_path / "run")
    assert record.values == [str(i) for i in range(128)]
    assert record.fields["max"] == "299.0"


def test_values_are_those_of_the_type(tmp_path):
    assert write(torch.tensor([True, False]), tmp_path / "a").values == ["True", "False"]
    assert write(torch.tensor([1 + 2j]), tmp_path / "b").values == ["(1+2j)"]


def order_of(step):
    return (step / "order.txt").read_text(encoding="utf-8").splitlines()


def test_a_step_lists_its_files_in_their_order(tmp_path):
    folder = tmp_path / "run"
    subscriber = StatisticsSubscriber(folder)
    subscriber.forward_activation("a/b", torch.ones(2), 0, 1)
    subscriber.forward_activation("c\nd", torch.ones(2), 0, 1)
    subscriber.backward_gradient("c\nd", torch.ones(2), 0, 1)
    subscriber.forward_activation("a/b", torch.ones(2), 1, 1)
    subscriber.backward_gradient("a/b", torch.ones(2), 0, 1)
    assert order_of(folder / "step_0") == [
        "a%2Fb_forward\ta/b", "c%0Ad_forward\tc d", "c%0Ad_backward\tc d", "a%2Fb_backward\ta/b",
    ]  # fmt: skip
    assert order_of(folder / "step_1") == ["a%2Fb_forward\ta/b"]
    replaced = StatisticsSubscriber(folder, override_output_dir=True)
    replaced.forward_activation("x", torch.ones(2), 0, 1)
    assert order_of(folder / "step_0") == ["x_forward\tx"]


@pytest.mark.parametrize("run_on_cpu", [False, True])
def test_run_on_cpu_writes_the_same(run_on_cpu, tmp_path):
    record = write(torch.ones(3), tmp_path / "run", run_on_cpu=run_on_cpu)
    assert record.fields["mean"] == "1.0"


@pytest.mark.cuda
@pytest.mark.parametrize("run_on_cpu", [False, True])
def test_tensors_on_a_device(run_on_cpu, tmp_path):
    tensor = torch.arange(7.0, device="cuda")
    record = write(tensor, tmp_path / "run", run_on_cpu=run_on_cpu, bucket_size=2)
    assert (record.fields["mean"], record.fields["std"]) == ("3.0", "2.0")


def test_an_existing_folder_is_refused(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(FileExistsError, match="exists; pass override_output_dir=True"):
        StatisticsSubscriber(tmp_path)


def test_overriding_removes_old_steps_and_nothing_else(tmp_path):
    write(torch.ones(2), tmp_path / "run")
    (tmp_path / "run" / "mine").touch()
    StatisticsSubscriber(tmp_path / "run", override_output_dir=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_missing_folders_are_made(tmp_path):
    StatisticsSubscriber(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()


def test_a_bucket_holds_something(tmp_path):
    with pytest.raises(ValueError, match="bucket_size: got 0, want at least 1"):
        StatisticsSubscriber(tmp_path / "run", bucket_size=0)
    assert not (tmp_path / "run").exists()


def test_names_become_file_names():
    names = ["a/b", "a_b", "a b", "..", "ä", "Net.0@1", "x" * 300, "x" * 301, "a\nb"]
    files = [file_name(name) for name in names]
    assert len(set(files)) == len(names)
    assert not any("/" in file for file in files)
    assert max(map(len, files)) < 240
    assert file_name("Net.layers.0-logits@1") == "Net.layers.0-logits@1"


class Model(nn.Module):
    """Calls one layer twice, shows a tensor of its own, and returns several."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        x = self.layer(self.drop(self.layer(x)))
        x = inspect_activation("a/b", x)
        return {"loss": x.square().mean(), "best": x.argmax(-1)}


# The names of ONNX Runtime Training, and the paths that stand in the files.
FILES = {
    "Linear_1_0th_output": "Model.layer", "Dropout_2_0th_output": "Model.drop",
    "Linear_1_0th_output@1": "Model.layer@1", "a%2Fb": "a/b",
    "Model_0_0th_output": "Model-loss", "Model_0_1th_output": "Model-best",
}  # fmt: skip
FILES = {f"{file}_forward": path for file, path in FILES.items()} | {
    f"{file}_backward": path for file, path in FILES.items() if path != "Model-best"
}


def train(way, folder, **settings):
    torch.manual_seed(0)
    model = Model()
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(folder, **settings)])
    wrapped, optimizer = way(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        wrapped(torch.randn(3, 4))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    wrapped(torch.randn(3, 4))
    GlobalSubscriberManager.unsubscribe()
    return read_run(folder)


def test_files_of_a_run(way, ways, tmp_path):
    want = train(ways["eager"], tmp_path / "eager")
    got = train(way, tmp_path / "run", bucket_size=5, run_on_cpu=True)
    assert sorted(got) == [0, 1, 2]
    for step, records in got.items():
        assert {file: record.fields["activation"] for file, record in records.items()} == FILES
        assert sorted(record.order for record in records.values()) == list(range(len(FILES)))
        by_order = sorted(records, key=lambda file, of=records: of[file].order)
        lines = [f"{file}\t{FILES[file]}" for file in by_order]
        assert order_of(tmp_path / "run" / f"step_{step}") == lines
        for file, record in records.items():
            assert_close(record, want[step][file])


def assert_close(got, want):
    assert got.fields.keys() == want.fields.keys()
    numbers = ("min", "max", "mean", "std")
    for key in got.fields.keys() - {*numbers, "order"}:
        assert got.fields[key] == want.fields[key], key
    for key in numbers:
        torch.testing.assert_close(
            float(got.fields[key]), float(want.fields[key]), rtol=1e-4, atol=1e-5
        )
    torch.testing.assert_close(
        [float(value) for value in got.values], [float(value) for value in want.values],
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


class Shared(nn.Module):
    """Has one layer in two places, and parts that are not called in their order."""

    def __init__(self):
        super().__init__()
        self.last = nn.Tanh()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Identity()])
        self.again = self.blocks[0][0]
        self.first = Halves()

    def forward(self, x):
        a, _, rest = self.first(x)
        return self.last(self.again(self.blocks[0](a)) + rest["b"])


class Halves(nn.Module):
    """Returns two tensors, and what is none."""

    def forward(self, x):
        return x * 2, None, {"b": x.sin(), "number": 3}


def paths_by_file(folder):
    return {file: record.fields["activation"] for file, record in read_run(folder)[0].items()}


def test_modules_are_numbered_as_in_onnx_runtime(way, tmp_path):
    model = Shared()
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / "run")])
    way(model)(torch.randn(2, 4, requires_grad=True)).sum().backward()
    names = paths_by_file(tmp_path / "run")
    want = {
        "Shared_0_0th_output": "Shared", "Tanh_1_0th_output": "Shared.last",
        "Sequential_3_0th_output": "Shared.blocks.0", "Linear_4_0th_output": "Shared.blocks.0.0",
        "Linear_4_0th_output@1": "Shared.blocks.0.0@1", "ReLU_5_0th_output": "Shared.blocks.0.1",
        "Halves_7_0th_output": "Shared.first-0", "Halves_7_1th_output": "Shared.first-2-b",
    }  # fmt: skip
    for direction in ("forward", "backward"):
        ending = f"_{direction}"
        assert want == {
            file.removesuffix(ending): path for file, path in names.items() if file.endswith(ending)
        }


def test_two_models_of_one_subscriber_have_files_of_their_own(way, tmp_path):
    subscriber = StatisticsSubscriber(tmp_path / "run")
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        GlobalSubscriberManager.subscribe(model, [subscriber])
        way(model)(torch.randn(2, 4))
    names = paths_by_file(tmp_path / "run")
    assert names == {
        "Sequential_0_0th_output_forward": "Sequential",
        "Linear_1_0th_output_forward": "Sequential.0",
        "Tanh_2_0th_output_forward": "Sequential.1",
        "Sequential_3_0th_output_forward": "Sequential_1",
        "Linear_4_0th_output_forward": "Sequential_1.0",
        "Tanh_5_0th_output_forward": "Sequential_1.1",
    }


def test_only_chosen_steps_are_written(way, tmp_path):
    train(way, tmp_path / "run", start_step=1, end_step=2)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_1"]
