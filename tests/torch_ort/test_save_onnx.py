"""Files of `save_onnx`: what other programs read of a model, and what the engine reads again."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from models import MODELS
from torch import nn

from torch_ort import _C
from torch_ort.engine import onnx_files
from torch_ort.options import NEWEST_OPSET

pytestmark = pytest.mark.ort_only

PINS = (12, 14, 17, 20, NEWEST_OPSET)
# Input dims that other runs may have other sizes in, with such a size.
DYNAMIC = {
    "MLP": {0: 9},
    "CNN": {0: 3},
    "encoder block": {0: 5},
    "causal language model": {0: 4, 1: 11},
}


@pytest.fixture
def save(tmp_path: pathlib.Path) -> Callable[..., dict[str, pathlib.Path]]:
    """Return a function that compiles and calls a model, and gives the files by their kinds."""

    def run(
        model: Callable, *inputs: Any, dynamic: bool | None = None, **options: Any
    ) -> dict[str, pathlib.Path]:
        options |= {"save_onnx": True, "onnx_prefix": str(tmp_path / "m"), "strict": True}
        with torch.no_grad():
            torch.compile(model, backend="ort", options=options, dynamic=dynamic)(*inputs)
        return kinds_of(tmp_path)

    return run


def kinds_of(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Give the two files of one graph by the kind in their names."""
    paths = list(folder.glob("*.onnx"))
    assert len(paths) == 2
    return {path.stem.rpartition("_")[2]: path for path in paths}


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    factory, x = MODELS[name]
    return factory().eval(), x.clone()


def assert_standard(path: pathlib.Path, pin: int = NEWEST_OPSET) -> onnx.ModelProto:
    """Check a file of standard nodes, without loading what stands beside it."""
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert {node.domain for node in model.graph.node} == {""}
    assert [(each.domain, each.version <= pin) for each in model.opset_import] == [("", True)]
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    assert len(inferred.graph.output) == len(model.graph.output)
    return model


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def run_in_onnxruntime(path: pathlib.Path, *inputs: torch.Tensor) -> list[torch.Tensor]:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(np.asarray(result)) for result in session.run(None, given)]


def assert_agrees(path: pathlib.Path, model: Callable, *inputs: torch.Tensor) -> None:
    with torch.no_grad():
        want = model(*inputs)
    want = want if isinstance(want, tuple) else (want,)
    for result, eager in zip(run_in_onnxruntime(path, *inputs), want, strict=True):
        torch.testing.assert_close(result, torch.as_tensor(eager), rtol=1e-4, atol=1e-5)


def assert_runs_again(path: pathlib.Path, model: Callable, *inputs: torch.Tensor) -> None:
    graph = _C.Graph.from_onnx(path.read_bytes(), str(path.parent))
    results = _C.run(graph, dict(zip(graph.input_names, inputs, strict=True))).values()
    with torch.no_grad():
        want = model(*inputs)
    want = want if isinstance(want, tuple) else (want,)
    for result, eager in zip(results, want, strict=True):
        eager = torch.as_tensor(eager)
        torch.testing.assert_close(result.reshape(eager.shape), eager, rtol=1e-4, atol=1e-5)


# ---- graphs without gradients


def test_a_file_takes_what_the_user_gives(save) -> None:
    model, x = make("CNN")
    for path in save(model, x).values():
        graph = assert_standard(path).graph
        assert [each.name for each in graph.input] == ["args.0"]
        held = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
        state = model.state_dict()
        unread = {name for name in state if name.endswith("num_batches_tracked")}
        assert set(state) - unread <= set(held)
        for name in set(state) - unread:
            np.testing.assert_array_equal(held[name], state[name].numpy())


@pytest.mark.parametrize("pin", PINS)
@pytest.mark.parametrize("name", MODELS)
def test_models_are_standard_at_every_opset(name: str, pin: int, save) -> None:
    model, x = make(name)
    for path in save(model, x, opset=pin).values():
        assert_standard(path, pin)
        assert_agrees(path, model, x)


@pytest.mark.parametrize(
    "pin", [12, *(pytest.param(pin, marks=pytest.mark.slow) for pin in PINS[1:-1]), NEWEST_OPSET]
)
@pytest.mark.parametrize("name", MODELS)
def test_one_file_serves_all_sizes(name: str, pin: int, save) -> None:
    model, x = make(name)
    for axis in DYNAMIC[name]:
        torch._dynamo.mark_dynamic(x, axis)
    shape = [DYNAMIC[name].get(axis, size) for axis, size in enumerate(x.shape)]
    for path in save(model, x, opset=pin).values():
        assert_standard(path, pin)
        for sizes in (
            x.shape,
            shape,
            [1 if a in DYNAMIC[name] else s for a, s in enumerate(shape)],
        ):
            other = torch.randn(sizes) if x.is_floating_point() else torch.randint(23, sizes)
            assert_agrees(path, model, other)
            assert_runs_again(path, model, other)


@pytest.mark.parametrize("pin", [12, NEWEST_OPSET])
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_reads_its_files(name: str, pin: int, save) -> None:
    model, x = make(name)
    for path in save(model, x, opset=pin).values():
        assert_runs_again(path, model, x)


@pytest.mark.filterwarnings("ignore::Warning")  # the exporter is an old one
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_reads_files_of_the_exporter(name: str, tmp_path) -> None:
    model, x = make(name)
    path = tmp_path / "m.onnx"
    axes = {"x": {axis: f"size{axis}" for axis in DYNAMIC[name]}}
    torch.onnx.export(
        model, (x,), path, dynamo=False, opset_version=17, input_names=["x"], dynamic_axes=axes
    )
    for count in (1, 2):
        assert_runs_again(path, model, torch.cat([x] * count))


def test_large_initializers_stand_in_a_file_of_their_own(save, monkeypatch) -> None:
    model, x = make("encoder block")
    monkeypatch.setattr(onnx_files, "EXTERNAL_LIMIT", 1 << 13)
    for path in save(model, x).values():
        data = path.with_name(path.name + ".data")
        assert data.stat().st_size > 1 << 13 > path.stat().st_size
        assert_standard(path)
        assert_agrees(path, model, x)
        assert_runs_again(path, model, x)


def test_up_to_the_limit_there_is_one_file(save, monkeypatch, tmp_path) -> None:
    model = nn.Linear(8, 8)
    monkeypatch.setattr(onnx_files, "EXTERNAL_LIMIT", 4 * (64 + 8))
    save(model, torch.randn(2, 8))
    assert not list(tmp_path.glob("*.data"))


def test_buffers_that_the_graph_writes_stay_inputs(save) -> None:
    model = nn.BatchNorm1d(4)
    for path in save(model, torch.randn(3, 4)).values():
        graph = onnx.load(path).graph
        names = {each.name for each in graph.input}
        assert names == {"args.0", "running_mean", "running_var", "num_batches_tracked"}
        assert {"weight", "bias"} <= {each.name for each in graph.initializer}


def test_names_that_two_modules_share_keep_their_variables(save) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    # A value of the graph has the name of an input.
    files = save(lambda addmm: second(first(addmm)), torch.randn(3, 4))
    graph = assert_standard(files["optimized"]).graph
    assert [each.name for each in graph.input] == ["addmm"]
    held = {each.name for each in graph.initializer}
    assert held >= {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert_agrees(files["optimized"], lambda x: second(first(x)), torch.randn(3, 4))


def test_parameters_of_any_layout(save) -> None:
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6)
    path = save(model, x)["optimized"]
    assert_standard(path)
    assert_agrees(path, model, x)


def test_sizes_among_the_numbers(save) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
        n = x.shape[0]
        total = x.sum(0) / n + torch.arange(2, n, 2).sum()
        return total, 2 * n + 1, x.view(n // 2, -1)

    x = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    path = save(function, x)["optimized"]
    assert_standard(path)
    for n in (2, 6, 14):
        assert_agrees(path, function, torch.randn(n, 4))
        assert_runs_again(path, function, torch.randn(n, 4))


def test_an_integer_of_the_user_is_an_input(save) -> None:
    def function(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.expand(count, 4).reshape(-1)

    path = save(function, torch.randn(4), 3, dynamic=True)["optimized"]
    assert [each.name for each in assert_standard(path).graph.input] == ["x", "count"]
    for count in (2, 5):
        for check in (assert_agrees, assert_runs_again):
            given = torch.randn(4), torch.tensor(count)
            check(path, lambda x, n: function(x, int(n)), *given)


def test_files_that_cannot_be_written(tmp_path) -> None:
    options = {"save_onnx": True, "onnx_prefix": str(tmp_path / "nowhere" / "step")}
    words = "onnx: file '.*nowhere/step_.*captured.onnx': got No such file or directory, want a "
    for context in (torch.no_grad, torch.enable_grad):
        torch.compiler.reset()
        with context(), pytest.raises(Exception, match=words):
            torch.compile(nn.Linear(4, 4), backend="ort", options=options)(torch.randn(2, 4))


@pytest.mark.hf
@pytest.mark.parametrize(
    ("name", "pin"),
    [
        ("GPT2", 12),
        ("Llama", NEWEST_OPSET),
        pytest.param("GPT2", NEWEST_OPSET, marks=pytest.mark.slow),
        pytest.param("Llama", 12, marks=pytest.mark.slow),
    ],
)
def test_language_models_of_transformers(name: str, pin: int, save) -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    more = {"Llama": {"intermediate_size": 64, "num_key_value_heads": 2}, "GPT2": {}}[name]
    config = getattr(transformers, f"{name}Config")(
        **sizes, **more, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    kind = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel"}[name]
    model = getattr(transformers, kind)(config).eval()
    ids = torch.randint(50, (2, 7))
    torch._dynamo.mark_dynamic(ids, 0)
    torch._dynamo.mark_dynamic(ids, 1)
    path = save(model, ids, opset=pin)["optimized"]
    assert_standard(path, pin)
    for shape in ((2, 7), (3, 12)):
        ids = torch.randint(50, shape)
        assert_agrees(path, lambda x: model(x).logits, ids)
        assert_runs_again(path, lambda x: model(x).logits, ids)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_each_node_has_the_line_that_it_comes_from(grad: bool, tmp_path) -> None:
    options = {"save_onnx": True, "onnx_prefix": str(tmp_path / "m"), "strict": True}
    with torch.set_grad_enabled(grad):
        torch.compile(Gated(), backend="ort", options=options)(torch.randn(3, 8))
    line = Gated.forward.__code__.co_firstlineno + 1
    for path in kinds_of(tmp_path).values():
        onnx.checker.check_model(path, full_check=True)
        nodes = [node for node in onnx.load(path).graph.node if node.op_type != "YieldOp"]
        assert {node.doc_string for node in nodes} == {f"test_save_onnx.py:{line}"}


@pytest.mark.parametrize("emulates", [False, True])
def test_a_rewrite_that_an_option_switches_off_is_in_no_file(emulates: bool, save) -> None:
    """Two casts that cancel each other but for what they round stay where eager's are emulated."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.relu().bfloat16().float() + 1

    files = save(rounded, torch.randn(4), emulate_eager_casts=emulates)
    ops = [node.op_type for node in onnx.load(files["optimized"]).graph.node]
    assert ops.count("Cast") == (2 if emulates else 0)


# ---- training graphs


def test_gradients_have_the_names_of_what_they_are_of(tmp_path: pathlib.Path) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Linear(6, 8), nn.Linear(8, 3, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(x).tanh())

    options = {"save_onnx": True, "onnx_prefix": str(tmp_path / "m"), "strict": True}
    x = torch.randn(4, 6, requires_grad=True)
    torch.compile(Encoder(), backend="ort", options=options)(x)
    for path in kinds_of(tmp_path).values():
        onnx.checker.check_model(path, full_check=True)
        graph = onnx.load(path).graph
        shapes = {
            each.name: [dim.dim_value for dim in each.type.tensor_type.shape.dim]
            for each in (*graph.input, *graph.output)
        }
        inputs, outputs = ({each.name for each in part} for part in (graph.input, graph.output))
        assert inputs == {"x", "encoder.weight", "encoder.bias", "head.weight"}
        assert outputs == {f"{name}_grad" for name in inputs}
        for name in inputs:
            assert shapes[f"{name}_grad"] == shapes[name]


def test_a_gradient_that_the_caller_gives_keeps_its_name(tmp_path: pathlib.Path) -> None:
    options = {"save_onnx": True, "onnx_prefix": str(tmp_path / "m"), "strict": True}
    x, y = (torch.randn(4, requires_grad=True) for _ in range(2))
    torch.compile(lambda x, y: x + y, backend="ort", options=options)(x, y)
    for path in kinds_of(tmp_path).values():
        onnx.checker.check_model(path, full_check=True)
        graph = onnx.load(path).graph
        (border,) = (node for node in graph.node if node.op_type == "YieldOp")
        assert {each.name for each in graph.output} == set(border.output)


class Scaled(nn.Module):
    """Has a constant of its own, a reshape by sizes, and a composite backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.norm(self.first(x))) * torch.tensor([1.0, 2, 3, 4] * 2)
        return self.last(x.view(2 * x.shape[0], 4))


@pytest.mark.hands_over("numbers read from tensors")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_training_graph_runs_again_from_its_file(dynamic: bool, tmp_path) -> None:
    model, x = Scaled(), torch.randn(5, 6, requires_grad=True)
    options = {"save_onnx": True, "onnx_prefix": str(tmp_path / "m"), "strict": True}
    torch.compile(model, backend="ort", options=options, dynamic=dynamic)(x)
    for path in kinds_of(tmp_path).values():
        onnx.checker.check_model(path, full_check=True)
        for size in (5, 7) if dynamic else (5,):
            assert_trains_again(path, model, size)


def assert_trains_again(path: pathlib.Path, model: nn.Module, size: int) -> None:
    x = torch.randn(size, 6, requires_grad=True)
    want = model(x)
    tangent = torch.randn_like(want)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(want, [x, *parameters.values()], tangent)

    graph = _C.Graph.from_onnx(path.read_bytes())
    # With dynamic sizes floats of the program are dynamic too.
    floats = [name for name in graph.input_names if name.endswith(".eps")]
    assert set(graph.input_names) - {*floats} == {"x", *parameters}
    (border,) = (node for node in graph.nodes() if node["op"] == "YieldOp")
    given = {"x": x.detach(), **{name: p.detach() for name, p in parameters.items()}}
    given |= {name: torch.tensor(model.norm.eps, dtype=torch.float64) for name in floats}
    given[border["outputs"][0]] = tangent
    given |= {name: torch.tensor(size) for name in graph.symbol_inputs}
    results = _C.run(graph, given)
    torch.testing.assert_close(results[border["inputs"][0]], want)
    order = [graph.input_names.index(name) for name in ("x", *parameters)]
    by_input = sorted(zip(order, gradients, strict=True), key=lambda pair: pair[0])
    for name, (_, gradient) in zip(graph.output_names, by_input, strict=True):
        torch.testing.assert_close(results[name], gradient)


def test_a_training_file_computes_nothing_twice(tmp_path: pathlib.Path) -> None:
    options = {"save_onnx": True, "onnx_prefix": str(tmp_path / "m"), "strict": True}
    torch.compile(Gated(), backend="ort", options=options)(torch.randn(3, 8)).sum().backward()
    model = onnx.load(kinds_of(tmp_path)["optimized"])
    assert [node.op_type for node in model.graph.node].count("Swish") == 1
