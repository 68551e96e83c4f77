"""Makes a failing program small, and writes it as a script that runs alone."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import programs_parts
from programs_run import OPTIONS, check, dynamic, run_eager
from programs_write import Program, inputs_text


def failure(program: Program, road: str) -> str | None:
    """Say how a program fails on a road; None where it does not, or eager cannot run it."""
    try:
        run_eager(program)
    except Exception:
        return None
    try:
        check(program, road)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def kind_of(words: str) -> str:
    """Give what is the same in the words of a failure while its program gets smaller."""
    words = re.sub(r"call \d+, |(result|input|buffer|gradient of) \S+", r"\1", words)
    return re.sub(r"[\d.e+-]+|\[.*?\]|v\d+|x\d+|nan|inf", "", words)[:40]


def shrink(program: Program, road: str, words: str, seconds: float = 60) -> Program:
    """Take away what the failure does not need, as far as the time allows."""
    kind, until = kind_of(words), time.monotonic() + seconds

    def still_fails(smaller: Program) -> bool:
        found = failure(smaller, road)
        return found is not None and kind_of(found) == kind

    went_on = True
    while went_on:
        went_on = False
        for smaller in _smaller(program):
            if time.monotonic() > until:
                return program
            if still_fails(smaller):
                program, went_on = smaller, True
                break
    return program


_PLAIN_CALL = {
    "autocast": "", "backward_in_autocast": False, "default_dtype": "float32",
    "deterministic": False, "in_thread": False, "numbers": (), "unread": (),
}  # fmt: skip


def _smaller(program: Program) -> Iterator[Program]:
    for i in range(len(program.calls)):
        if len(program.calls) > 1:
            yield replace(program, calls=program.calls[:i] + program.calls[i + 1 :])
    names = program.names_in_results()
    for name in dict.fromkeys(names):
        if len(set(names)) > 1:
            others = [other for other in dict.fromkeys(names) if other != name]
            yield replace(program, results=f"({', '.join(others)},)")
    for i in reversed(range(len(program.lines))):
        yield from _without_line(program, i)
    yield from _without_state(program)
    for simpler in (replace(program, packed=""), replace(program, at_once=False)):
        if simpler != program:
            yield simpler
    for i, one in enumerate(program.inputs):
        plain = replace(one, layout="dense", special=False)
        for other in (plain, replace(plain, requires_grad=False)):
            if other != one:
                inputs = (*program.inputs[:i], other, *program.inputs[i + 1 :])
                yield replace(program, inputs=inputs)
    for i, call in enumerate(program.calls):
        simpler = [replace(call, mode="grad"), replace(call, training=True)]
        simpler += [replace(call, **{name: value}) for name, value in _PLAIN_CALL.items()]
        if call.backward != "never":
            simpler += [replace(call, backward="never"), replace(call, backward="now")]
        for other in simpler:
            if other != call:
                yield replace(program, calls=(*program.calls[:i], other, *program.calls[i + 1 :]))


def _without_line(program: Program, i: int) -> Iterator[Program]:
    """Leave a line out; what reads its values reads others instead."""
    rest = program.lines[:i] + program.lines[i + 1 :]
    made = re.match(r"((?:v\d+,? ?)+) = ", program.lines[i])
    names = re.findall(r"v\d+", made.group(1)) if made else []
    later = "\n".join((*program.lines[i + 1 :], program.results))
    if not any(re.search(rf"\b{name}\b", later) for name in names):
        yield replace(program, lines=rest)
        return
    read = re.findall(r"\b[vx]\d+\b", program.lines[i][made.end() :])
    for other in dict.fromkeys(read) or [program.inputs[0].name]:

        def renamed(text: str, other: str = other) -> str:
            return re.sub(rf"\b({'|'.join(names)})\b", other, text)

        lines = program.lines[:i] + tuple(map(renamed, program.lines[i + 1 :]))
        yield replace(program, lines=lines, results=renamed(program.results))


def _without_state(program: Program) -> Iterator[Program]:
    """Leave out what nothing reads."""
    text = "\n".join((*program.lines, program.results))

    def is_read(name: str) -> bool:
        return re.search(rf"\b{name}\b", text) is not None

    parameters = tuple(one for one in program.parameters if is_read(one[0]))
    buffers = tuple(one for one in program.buffers if is_read(one[0]))
    inputs = tuple(one for one in program.inputs if is_read(one.name)) or program.inputs[:1]
    names = [one.name for one in inputs]
    if any(one.same_as and one.same_as not in names for one in inputs):
        inputs = program.inputs
    smaller = replace(program, parameters=parameters, buffers=buffers, inputs=inputs)
    if smaller != program:
        yield smaller


_HEAD = """\
import contextlib
import threading
{imports}
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import torch_ort

OPTIONS = {options}

{parts}
{text}

def inputs(number):
{inputs}


CALLS = [
{calls}
]
MODES = {{
    "grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode
}}


def real(x):
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def weights_of(x):
    count = torch.arange(x.numel())
    weights = (count % 7 - 2.5) / 4
    if x.is_complex():
        weights = weights + 1j * (count % 5 - 1.5) / 4
    return weights.to(x.dtype).view(x.shape)


def backward(results, given, module, call):
    trained = [x for x in results if x.requires_grad]
    trained = [x for i, x in enumerate(trained) if i not in call["unread"]] or trained
    for again in (True, False) if call["backward"] == "twice" else (False,):
        if trained:
            with (
                torch.autocast("cpu", getattr(torch, call["autocast"]))
                if call["backward_in_autocast"] else contextlib.nullcontext()
            ):
                torch.autograd.backward(trained, list(map(weights_of, trained)), retain_graph=again)
    found = [*results, *(x.grad for x in given), *(p.grad for p in module.parameters())]
    module.zero_grad()
    return [None if x is None else real(x.detach()).clone() for x in found]


def called(run_call, jobs, in_threads):
    made = [None] * len(jobs)

    def work(i):
        call, given = jobs[i]
        torch.set_default_dtype(getattr(torch, call["default_dtype"]))
        torch.use_deterministic_algorithms(call["deterministic"])
        with (
            MODES[call["mode"]](),
            torch.autocast("cpu", getattr(torch, call["autocast"]))
            if call["autocast"] else contextlib.nullcontext(),
        ):
            made[i] = run_call(*packed({packed!r}, given))
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)

    if not in_threads:
        work(0)
        return made
    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return made


def run(wrap):
    torch.manual_seed({seed})
    module = Program()
    run_call = wrap(module)
    torch.manual_seed({seed})
    found, later = [], []
    jobs = [(number, call, call["in_thread"]) for number, call in enumerate(CALLS)]
    for number, call, in_thread in jobs:
        given = inputs(number)
        module.train(call["training"])
        for name, value in call["numbers"]:
            setattr(module, name, value)
        (made,) = called(run_call, [(call, given)], in_thread)
        results = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        kept = (results, given, module, call)
        state = (*module.buffers(), module.last)
        found += [real(x.detach()).clone() for x in (*results, *given, *state)]
        if call["backward"] == "later":
            later.append(kept)
        elif call["backward"] != "never":
            found += backward(*kept)
    for kept in reversed(later):
        found += backward(*kept)
    if {at_once}:
        ends = [(call, inputs(number)) for number, call in ((0, CALLS[0]), (-1, CALLS[-1]))]
        for (call, given), made in zip(ends, called(run_call, ends, True), strict=True):
            found += backward(tree_leaves(made), given, module, call)
    return found


want = run(lambda module: module)
got = run(lambda module: {wrap})
print(torch_ort.counters())
for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
    assert (ours is None) == (theirs is None), (i, ours, theirs)
    if theirs is not None:
        torch.testing.assert_close(
            ours, theirs, equal_nan=True, msg=lambda text: f"{{i}}: {{text}}"
        )
"""

_WRAPS = {
    "ortmodule": "torch_ort.ORTModule(module, torch_ort.DebugOptions(config=OPTIONS))",
    "compile": 'torch.compile(module, backend="ort", options=OPTIONS, dynamic={dynamic})',
}


def script(program: Program, road: str, words: str) -> str:
    """Write a program as a script that runs alone and raises where the engine is wrong."""
    made = []
    for number, call in enumerate(program.calls):
        last = " or number == -1" if call is program.calls[-1] else ""
        made += [f"    if number == {number}{last}:"]
        made += [f"        {line}" for line in inputs_text(program, call, number)]
        made += [f"        return [{', '.join(one.name for one in program.inputs)}]"]
    calls = [f"    {asdict(call)!r}," for call in program.calls]
    said = "".join(f"# {line}\n" for line in words.splitlines()[:8])
    parts = inspect.getsource(programs_parts)
    _, imports, parts = re.split(
        r"from __future__ import annotations\n|(?<=import torch)\n", parts, maxsplit=2
    )
    return said + _HEAD.format(
        options=OPTIONS, text=program.text(), inputs="\n".join(made), calls="\n".join(calls),
        seed=program.seed, wrap=_WRAPS[road].format(dynamic=dynamic(program)), imports=imports,
        parts=parts, packed=program.packed, at_once=program.at_once,
    )  # fmt: skip
