"""Reads and runs mutated files; a program of its own, because one of them may end it.

python files_worker.py corpus PATH             writes the models that files are mutated from
python files_worker.py numbers PATH            compares with outputs that ONNX has computed
python files_worker.py seeds PATH FIRST COUNT  runs seeds, and prints each before it runs
python files_worker.py trained PATH FIRST COUNT  loads, trains and saves seeds, as above
python files_worker.py steps PATH SEED         prints what a seed stands for, as a case
python files_worker.py case PATH CASE [trained]  runs the steps of a case, which is JSON, once
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import resource
import signal
import sys
import tempfile

import files_corpus
import onnx
import torch
from files_mutations import ON_GRAPHS, change_bytes
from google.protobuf.message import DecodeError

from torch_ort import _C
from torch_ort.onnx.load import load_onnx
from torch_ort.onnx.save import export_onnx

# What one file may take: memory beside that of the process, and seconds.
MOST_MEMORY = 2**30
MOST_SECONDS = 30

# A step is a mutation of the graph by its number, or -1 for one of the bytes, and a seed for it; or
# -2 and the number of a node that is left out, which minimizing adds.
BYTES, WITHOUT_NODE = -1, -2
Step = tuple[int, int]
Corpus = dict[str, files_corpus.Model]


def steps_of(seed: int, corpus: Corpus) -> tuple[str, list[Step]]:
    """Tell what a seed stands for: a model, and what is changed of it."""
    rng = random.Random(seed)
    name = rng.choice(list(corpus))
    steps = [(rng.randrange(len(ON_GRAPHS)), rng.getrandbits(32)) for _ in range(rng.choice(_MANY))]
    if rng.random() < 0.25:
        steps = [*steps[:-1], (BYTES, rng.getrandbits(32))]
    return name, steps


_MANY = (1, 1, 1, 2, 2, 4)


def changed(copy: onnx.ModelProto, steps: list[Step]) -> bytes:
    """Take the steps. Those of the graph come first, for changed bytes may be no model."""
    for number, seed in steps:
        if number == WITHOUT_NODE:
            copy.graph.node.remove(copy.graph.node[seed])
        elif number != BYTES:
            ON_GRAPHS[number](copy, random.Random(seed))
    data = copy.SerializeToString()
    for number, seed in steps:
        if number == BYTES:
            data = change_bytes(data, random.Random(seed))
    return data


def outcome(data: bytes, inputs: dict[str, torch.Tensor], seed: int) -> str:
    """Read and run a file; tell what came of it, where, and in one line."""
    stage = "read"
    with tempfile.TemporaryDirectory() as folder:
        outside = pathlib.Path(folder, "data")
        outside.write_bytes(bytes(16384))
        try:
            graph = _C.Graph.from_onnx(data, folder)
            stage = "write"
            graph.to_onnx(28)
            stage = "run"
            if seed % 2:
                outside.write_bytes(b"")  # what has been read stays read
            for result in _C.run(graph, given(graph, inputs)).values():
                if result is not None:  # a gradient that an output_mask leaves out
                    result.sum() if result.is_floating_point() else result.clone()
        except Exception as error:  # which one is for the caller to judge
            return one_line(f"{stage} {type(error).__name__}: {error}")
    return "works"


def outcome_of_training(data: bytes, inputs: dict[str, torch.Tensor], seed: int) -> str:
    """Load a file as a module, compute gradients, and write it again; tell what came of it."""
    stage = "load"
    try:
        loaded = load_onnx(data)
        stage = "train"
        names = [node.target for node in loaded.graph.nodes if node.op == "placeholder"]
        # Names are those of the file, or like them; others get what fits nothing.
        given = [inputs.get(name, torch.tensor(3)) for name in names]
        results = loaded.train(bool(seed % 2))(*given)
        for result in results if isinstance(results, tuple) else (results,):
            # A gradient that an output_mask leaves out is None.
            if result is not None and result.requires_grad:
                result.sum().backward(retain_graph=True)
        stage = "save"
        with tempfile.TemporaryDirectory() as folder:
            export_onnx(loaded, pathlib.Path(folder, "net.onnx"))
            if set(os.listdir(folder)) - {"net.onnx", "net.onnx.data"}:
                return "save Unexpected: other files"
    except Exception as error:  # which one is for the caller to judge
        return one_line(f"{stage} {type(error).__name__}: {error}")
    return "works"


def one_line(text: str) -> str:
    """Messages quote names of files, which may hold anything."""
    return " ".join(text.split()).encode("ascii", "backslashreplace").decode()


def given(graph: _C.Graph, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give the inputs of the unchanged file, and something for others that a file may have."""
    names = [*graph.input_names, *graph.symbol_inputs]
    names += [name for node in graph.nodes() if node["op"] == "YieldOp" for name in node["outputs"]]
    return {name: torch.tensor(3) for name in names} | inputs


def limit_memory() -> None:
    """Let sizes that are large but possible fail at once."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(name: str, steps: list[Step], corpus: Corpus, trained: bool = False) -> str:
    model = corpus[name]
    try:
        data = changed(model.proto(), steps)
    except (DecodeError, UnicodeError, ValueError, TypeError, OverflowError, IndexError):
        return "nothing: the steps do not fit each other"
    inputs = {key: tensor.clone() for key, tensor in model.inputs.items()}
    signal.alarm(MOST_SECONDS)
    try:
        return (outcome_of_training if trained else outcome)(data, inputs, steps[0][1])
    finally:
        signal.alarm(0)


def compare(model: files_corpus.Model) -> str:
    """Tell whether the engine's numbers are those that the file came with."""
    try:
        results = _C.run(_C.Graph.from_onnx(model.data), model.inputs)
    except Exception as error:  # which one is for the caller to judge
        return one_line(f"run {type(error).__name__}: {error}")
    for name, want in model.outputs.items():
        exact = not (want.is_floating_point() or want.is_complex())
        tolerance = {torch.float16: 1e-2, torch.bfloat16: 2e-2}.get(want.dtype, 1e-4)
        try:
            torch.testing.assert_close(
                results[name], want, rtol=0 if exact else tolerance,
                atol=0 if exact else tolerance, equal_nan=True,
            )  # fmt: skip
        except AssertionError as error:
            return one_line(f"wrong {name}: {error}")
    return "works"


def main(what: str, path: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    if what == "corpus":
        files_corpus.build(pathlib.Path(path))
        return
    corpus = files_corpus.load(pathlib.Path(path))
    for name in ("text_views_1", "text_branches_1"):  # what is loaded late is loaded now
        for trained in (False, True):
            run(name, [(len(ON_GRAPHS) - 1, 0)], corpus, trained)
    limit_memory()
    if what == "numbers":
        for name, model in corpus.items():
            if model.outputs is not None:
                print(name, end=" ", flush=True)
                print(compare(model), flush=True)
    elif what == "steps":
        print(
            json.dumps(
                dict(zip(("model", "steps"), steps_of(int(arguments[0]), corpus), strict=True))
            )
        )
    elif what == "case":
        case = json.loads(arguments[0])
        steps = [tuple(step) for step in case["steps"]]
        print("0", run(case["model"], steps, corpus, "trained" in arguments), flush=True)
    else:
        first, count = map(int, arguments)
        for seed in range(first, first + count):
            print(seed, end=" ", flush=True)
            print(run(*steps_of(seed, corpus), corpus, what == "trained"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
