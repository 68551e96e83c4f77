"""Golden cases of passes: every `# AFTER` in the .onnxtxt files beside this file.

A file is `# PASS: name` and cases, each headed by `# ----- title`: a model, `# AFTER`, and the
graph that the pass leaves. `pytest --accept tests/passes` writes the graphs anew; the reviewer
reads the difference. Both graphs of a case are run on the same inputs and must agree, to the bit
but for the passes that compute in another way: these within 1e-5, or within what the head of their
file says, as `# WITHIN: 1e-4`. `# CUT DIGITS WITHIN: 1e-2` is for graphs that cast to short
floats, or say `# CUT DIGITS`, if the pass keeps digits that these cut off.
A line `# TAGGED must_recompute in 0: a b` tags the nodes that give `a` and `b`, for the text form
has no word for it. `# AFTER PASS: channels_last` runs that pass before. `# REGISTERS: few` in the
head of a file lets the pass choose as on a processor with AVX2, in place of AVX-512.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import onnx
import onnx.parser
import onnx.printer
import pytest
import torch
import torch.distributed as dist
from case_files import AFTER, FOLDER, Case, all_cases, read_cases

from torch_ort import _C

TAGGED = re.compile(r"^# TAGGED (\w+) in (\d+): (.*)$", re.MULTILINE)
EARLIER = re.compile(r"^# AFTER PASS: (\w+)$", re.MULTILINE)
FEW_REGISTERS = "\n# REGISTERS: few\n"
SIZES = {"N": 3, "M": 5}
SHORT_FLOATS = re.compile(r"Cast <to = 1[06]>|^# CUT DIGITS$", re.MULTILINE)
PASSES = {each.name: each for each in _C.passes()}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Let cases communicate, in a group of this process alone, whose name is "0"."""
    if not dist.is_available():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def choices(request: pytest.FixtureRequest) -> None:
    """Make no test depend on the processor."""
    case = request.node.callspec.params.get("case") if hasattr(request.node, "callspec") else None
    head = read_cases(case.path)[0] if isinstance(case, Case) else ""
    request.getfixturevalue("few_registers" if FEW_REGISTERS in head else "many_registers")


@functools.cache
def tolerances(pass_name: str) -> tuple[float, float]:
    """Give how far a pass may change results, and those of graphs that round to short floats."""
    if not PASSES[pass_name].rounds_elsewhere:
        return 0, 0
    path = FOLDER / f"{pass_name}.onnxtxt"
    head = read_cases(path)[0] if path.exists() else ""
    said = dict(re.findall(r"^# (WITHIN|CUT DIGITS WITHIN): (\S+)$", head, re.MULTILINE))
    within = float(said.get("WITHIN", 1e-5))
    return within, float(said.get("CUT DIGITS WITHIN", within))


def read_graph(text: str) -> _C.Graph:
    """Read a graph from ONNX text, with the types of all values."""
    model = onnx.parser.parse_model(text)
    for tag, checkpoint, names in TAGGED.findall(text):
        for node in model.graph.node:
            if node.output[0] in names.split():
                node.metadata_props.add(key="recompute", value=tag)
                node.metadata_props.add(key="checkpoint", value=checkpoint)
    graph = _C.Graph.from_onnx(model.SerializeToString(), allow=["_c10d_functional"])
    _C.infer_types(graph)
    graph.size_hints = SIZES
    for name in EARLIER.findall(text):
        assert _C.run_pass(name, graph) > 0
    return graph


def graph_text(graph: _C.Graph) -> str:
    """Print the graph without the head of its model and without the names of its nodes."""
    model = onnx.load_model_from_string(graph.to_onnx())
    del model.metadata_props[:]
    for node in model.graph.node:
        node.ClearField("name")
    text = onnx.printer.to_text(model)
    lines = text[text.index(">\n") + 2 :].strip().split("\n")
    return "\n".join(line.rstrip() if line[:4] != "   <" else wrapped(line) for line in lines)


def wrapped(types: str, width: int = 100) -> str:
    """Break a list of types into lines, none wider than `width` if a type fits into one."""
    lines = [""]
    for item in types.rstrip().split(", "):
        line = f"{lines[-1]}, {item}".removeprefix(", ")
        if lines[-1] and len(line) >= width:
            lines[-1] += ","
            line = f"    {item}"
            lines.append("")
        lines[-1] = line
    return "\n".join(lines)


def random_tensor(dtype: str, shape: list[int | str]) -> torch.Tensor:
    sizes = [SIZES[size] if isinstance(size, str) else size for size in shape]
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        return torch.randn(sizes, dtype=kind)
    return torch.randint(0, 4, sizes, dtype=kind)


def run(graph: _C.Graph) -> list[torch.Tensor]:
    """Run a graph on inputs that its names and types alone determine; written inputs come last."""
    torch.manual_seed(7)
    graph = graph.clone()
    if any(node["op"] == "PhiloxMask" for node in graph.nodes()):
        _C.run_pass("fuse_regions", graph)  # nothing else runs it
    types = graph.types()
    names = list(graph.input_names)
    names += [name for node in graph.nodes() if node["op"] == "YieldOp" for name in node["outputs"]]
    inputs = {name: random_tensor(*types[name][:2]) for name in names}
    results = list(_C.run(graph, inputs).values())
    return results + [inputs[name] for name in graph.input_names]


def run_pass(name: str, graph: _C.Graph) -> int:
    """Run one pass, with the checks that the pipeline makes; give the number of rewrites."""
    strides = _C.testing.CountedStrides(graph)
    rewrites = _C.run_pass(name, graph)
    graph.verify(name)
    if not PASSES[name].tells_strides:
        strides.verify(graph, name)
    return rewrites


def assert_same(
    got: list[torch.Tensor], want: list[torch.Tensor], pass_name: str, text: str
) -> None:
    within = tolerances(pass_name)[bool(SHORT_FLOATS.search(text))]
    for after, before in zip(got, want, strict=True):
        if PASSES[pass_name].not_with == "exact_random":
            assert after.shape == before.shape
            continue
        # Sums of large numbers may cancel, and their order differs between processors.
        finite = before[before.isfinite()]
        size = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        torch.testing.assert_close(after, before, rtol=within, atol=within * size, equal_nan=True)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, request: pytest.FixtureRequest) -> None:
    graph = read_graph(case.before)
    want = run(graph)
    rewrites = run_pass(case.pass_name, graph)
    text = graph_text(graph)

    assert_same(run(graph), want, case.pass_name, case.before)

    assert (rewrites > 0) == (text != graph_text(read_graph(case.before)))
    assert _C.run_pass(case.pass_name, graph) == 0, "a second run makes more rewrites"
    assert graph_text(graph) == text
    if not request.config.getoption("--accept"):
        assert text == case.after
        return
    whole = case.path.read_text()
    old = f"{case.before}\n{AFTER}{case.after}".rstrip()
    assert whole.count(old) == 1 or not case.after
    case.path.write_text(whole.replace(old, f"{case.before}\n{AFTER}{text}", 1))


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_every_pass_is_idempotent_and_right_on_every_case(case: Case) -> None:
    graph = read_graph(case.before)
    want = run(graph)
    # Most passes leave most cases as they are, or as another pass does: each graph is run once.
    results = {graph.to_onnx(): want}
    for name in _C.pass_names():
        graph = read_graph(case.before)
        run_pass(name, graph)
        assert _C.run_pass(name, graph) == 0, name
        file = graph.to_onnx()
        if file not in results:
            results[file] = run(graph)
        if results[file] is not want:
            assert_same(results[file], want, name, case.before)


def test_every_pass_has_cases() -> None:
    # What somebody has to ask for stands in test_random_budgets.py, and in
    # torch_ort/test_memory_levels.py and test_lazy_logits.py: else nothing happens. What is for
    # GPUs alone stands in cuda_kernels/test_casts.py, test_dropout.py, test_wide_products.py
    # and test_wide_sums.py.
    want = {name for name, each in PASSES.items() if not (each.is_on_request or each.is_for_gpus)}
    assert {case.pass_name for case in all_cases()} == want
