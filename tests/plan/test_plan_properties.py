# Plans of random programs, run against a model of memory that knows nothing of lifetimes.
#
# The model writes a stamp into every byte of what a step writes, and looks at every byte of what a
# step reads. Run in the given order with memory of its own for each root, it says what each read
# should find; run as planned, over two byte arrays, it says what each read does find.
from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from torch_ort import _C

SIZES = (0, 1, 16, 64, 65, 128, 200, 256, 1024)
POISON = -7

# --- random programs ------------------------------------------------------------------------------


@dataclass
class Builder:
    """A program that grows step by step and makes sense all along."""

    choose: random.Random
    tensors: list[dict] = field(default_factory=list)
    steps: list[dict] = field(default_factory=list)
    readable: list[int] = field(default_factory=list)

    def root(self, tensor: int) -> int:
        root = self.tensors[tensor].get("root", -1)
        return tensor if root < 0 else root

    def kind(self, tensor: int) -> str:
        return self.tensors[self.root(tensor)]["kind"]

    def add(self, kind: str, size: int) -> int:
        delivered = kind == "planned" and self.choose.random() < 0.1
        self.tensors.append({"kind": kind, "bytes": size, "delivered": delivered})
        return len(self.tensors) - 1

    def add_alias(self, tensor: int) -> int:
        self.tensors.append({"root": self.root(tensor)})
        return len(self.tensors) - 1

    def pick(self) -> int:
        # Mostly something recent, so that memory dies.
        recent = self.readable[-6:] if self.choose.random() < 0.8 else self.readable
        return self.choose.choice(recent)

    def add_step(self) -> None:
        reads = [self.pick() for _ in range(self.choose.randint(0, 3))] if self.readable else []
        step = {"reads": reads, "writes": [], "effect": self.choose.random() < 0.15}
        step["workspace"] = self.choose.random() < 0.2
        step["in_place"] = [read for read in reads if self.choose.random() < 0.6]
        action = self.choose.random()
        if reads and action < 0.15:
            step["writes"] = [self.add_alias(reads[0])]
        elif reads and action < 0.25:
            self.write_again(step)
        else:
            self.write_new(step)
        if reads and self.choose.random() < 0.1:  # a view that no step makes
            self.readable.append(self.add_alias(reads[-1]))
        self.steps.append(step)
        self.readable += step["writes"]

    def write_again(self, step: dict) -> None:
        target = step["reads"][0]
        if self.kind(target) == "constant":
            return
        if self.kind(target) == "input":
            step["effect"] = True
        step["writes"] = [target if self.choose.random() < 0.5 else self.root(target)]

    def write_new(self, step: dict) -> None:
        for _ in range(self.choose.choice((0, 1, 1, 1, 1, 2))):
            size = self.choose.choice(SIZES)
            if step["reads"] and self.choose.random() < 0.6:
                size = self.tensors[self.root(step["reads"][0])]["bytes"]
            kind = self.choose.choice(("planned",) * 6 + ("adopted", "output"))
            step["writes"].append(self.add(kind, size))

    def leaving(self, steps: list[dict], *, may_deliver: bool) -> list[int]:
        written = {tensor for step in steps for tensor in step["writes"]}
        able = [
            tensor
            for tensor in sorted(written)
            if self.kind(tensor) in ("output", "adopted")
            or (may_deliver and self.tensors[self.root(tensor)]["delivered"])
        ]
        return [tensor for tensor in able if self.choose.random() < 0.5]


def build_program(choose: random.Random, num_forward: int, num_backward: int) -> dict:
    build = Builder(choose)
    for kind in ("input", "input", "constant"):
        build.readable.append(build.add(kind, 64))
    for _ in range(num_forward + num_backward):
        build.add_step()
    return {
        "tensors": build.tensors,
        "steps": build.steps,
        "num_forward": num_forward,
        "outputs": build.leaving(build.steps[:num_forward], may_deliver=False),
        "gradients": build.leaving(build.steps, may_deliver=True),
    }


SEEDS = st.integers(0, 1 << 32)


@st.composite
def programs(draw: Any) -> dict:
    # A seed shrinks badly but reaches far more programs than choices drawn one by one.
    sizes = st.integers(0, 14)
    return build_program(random.Random(draw(SEEDS)), draw(sizes), draw(sizes))


OPTIONS = st.fixed_dictionaries(
    {
        "reorder": st.booleans(),
        "in_place": st.booleans(),
        "alignment": st.sampled_from((1, 16, 64, 100)),
        "discard_bytes": st.sampled_from((1, 100, 1 << 18)),
        "discard_gain": st.sampled_from((0, 100, 1 << 25)),
        "workspace_bytes": st.sampled_from((1, 100, 1 << 18)),
        "chunk_bytes": st.sampled_from((0, 1, 128, 300)),
    }
)


# --- the model of memory --------------------------------------------------------------------------


def root_of(program: dict, tensor: int) -> int:
    root = program["tensors"][tensor].get("root", -1)
    return tensor if root < 0 else root


def root_tensor(program: dict, tensor: int) -> dict:
    return program["tensors"][root_of(program, tensor)]


class OwnMemory:
    """Every root has memory of its own."""

    def __init__(self, program: dict):
        self.program = program
        self.memory = {}

    def fill(self, tensor: int, stamp: int) -> None:
        self.memory[root_of(self.program, tensor)] = stamp

    def content(self, tensor: int) -> set[int]:
        root = root_of(self.program, tensor)
        if not root_tensor(self.program, tensor)["bytes"]:
            return set()
        return {self.memory.get(root, -1)}

    def pass_border(self) -> None:
        pass

    def use_workspaces(self, position: int) -> None:
        pass

    def end_step(self, position: int) -> None:
        pass


class PlannedMemory(OwnMemory):
    """Planned tensors lie where the plan says, and released ones are gone."""

    def __init__(self, program: dict, plan: dict):
        super().__init__(program)
        self.plan = plan
        self.context = [POISON] * plan["context_bytes"]
        self.scratch = [POISON] * plan["forward_scratch_bytes"]
        self.gone = set()

    def place(self, tensor: int) -> tuple[list[int] | None, slice]:
        placement = self.plan["placements"][tensor]
        size = root_tensor(self.program, tensor)["bytes"]
        area = {"context": self.context, "scratch": self.scratch, "none": None}[placement["area"]]
        where = slice(placement["offset"], placement["offset"] + size)
        if area is not None:
            assert 0 <= where.start <= where.stop <= len(area)
        if area is self.context and size:
            begins = [begin for begin, _, _ in self.plan["chunks"]]
            assert bisect_right(begins, where.start) == bisect_right(begins, where.stop - 1)
        return area, where

    def fill(self, tensor: int, stamp: int) -> None:
        area, where = self.place(tensor)
        if area is None:
            assert root_tensor(self.program, tensor)["kind"] != "planned"
            super().fill(tensor, stamp)
        else:
            area[where] = [stamp] * (where.stop - where.start)

    def content(self, tensor: int) -> set[int]:
        assert tensor not in self.gone, f"tensor {tensor} is read after its release"
        area, where = self.place(tensor)
        return super().content(tensor) if area is None else set(area[where])

    def pass_border(self) -> None:
        self.scratch = [POISON] * self.plan["backward_scratch_bytes"]
        for tensor in self.program["outputs"]:
            assert tensor not in self.gone

    def use_workspaces(self, position: int) -> None:
        for at, area, offset, size in self.plan["workspaces"]:
            if at == position:
                memory = self.context if area == "context" else self.scratch
                memory[offset : offset + size] = [POISON] * size

    def end_step(self, position: int) -> None:
        self.gone.update(self.plan["release"][position])
        for after, offset, size in self.plan["discards"]:
            if after == position:
                self.context[offset : offset + size] = [POISON] * size
        for offset, size, after in self.plan["chunks"]:
            if after == position:
                self.context[offset : offset + size] = [POISON] * size


def run_steps(program: dict, order: list[int], memory: OwnMemory) -> dict[Any, Any]:
    """Return what each read finds, and what is left of inputs and of what leaves at the end."""
    found = {}
    changed = changes(program)
    for position, index in enumerate([*order, None]):
        if position == program["num_forward"]:
            memory.pass_border()
        if index is None:
            break
        step = program["steps"][index]
        for slot, tensor in enumerate(step["reads"]):
            found[index, slot] = memory.content(tensor)
        memory.use_workspaces(position)
        for tensor in changed[index]:
            memory.fill(tensor, index)
        memory.end_step(position)
    for tensor, it in enumerate(program["tensors"]):
        if it.get("kind") == "input":
            found["end", tensor] = memory.content(tensor)
    for tensor in program["outputs"] + program["gradients"] + delivered(program):
        found["end", tensor] = memory.content(tensor)
    return found


def delivered(program: dict) -> list[int]:
    """Return what stays in engine memory after the last step."""
    written = {root_of(program, write) for step in program["steps"] for write in step["writes"]}
    tensors = program["tensors"]
    return [tensor for tensor in sorted(written) if tensors[tensor].get("delivered")]


def changes(program: dict) -> list[list[int]]:
    """Return by step the tensors whose memory it changes: not those it only makes a view of."""
    result = []
    known: set[int] = set()
    for step in program["steps"]:
        read_roots = {root_of(program, tensor) for tensor in step["reads"]}
        known.update(step["reads"])
        views = {
            tensor
            for tensor in step["writes"]
            if root_of(program, tensor) != tensor
            and root_of(program, tensor) in read_roots
            and tensor not in known
            and not step["effect"]
        }
        inputs = [t for t in step["reads"] if root_tensor(program, t)["kind"] == "input"]
        written = [tensor for tensor in step["writes"] if tensor not in views]
        result.append(written + (inputs if step["effect"] else []))
        known.update(step["writes"])
    return result


def expected(program: dict) -> dict[Any, Any]:
    return run_steps(program, list(range(len(program["steps"]))), OwnMemory(program))


def check_by_model(program: dict, plan: dict) -> None:
    assert run_steps(program, plan["order"], PlannedMemory(program, plan)) == expected(program)


# --- bounds ---------------------------------------------------------------------------------------


def lives(program: dict, order: list[int]) -> dict[int, list[float]]:
    """Return the first and last time of each root."""
    found: dict[int, list[float]] = {}
    for position, index in enumerate(order):
        step = program["steps"][index]
        for tensor in step["reads"] + step["writes"]:
            found.setdefault(root_of(program, tensor), [position, position])[1] = position
    for tensor in delivered(program):
        found[tensor][1] = len(order)
    return found


def align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def bounds(program: dict, plan: dict, alignment: int) -> tuple[int, int]:
    """Return the bytes that must cross and the largest sum of bytes alive at one time."""
    border = program["num_forward"] - 0.5
    events: dict[float, int] = {}
    crossing = 0
    for root, (first, last) in lives(program, plan["order"]).items():
        if program["tensors"][root]["kind"] != "planned":
            continue
        size = align(program["tensors"][root]["bytes"], alignment)
        crossing += size if first < border <= last else 0
        # What takes over a read's memory adds nothing while both are alive.
        start = first + 0.25 if plan["placements"][root]["in_place_of"] >= 0 else first
        events[start] = events.get(start, 0) + size
        events[last + 0.25] = events.get(last + 0.25, 0) - size
    live = highest = 0
    for time in sorted(events):
        live += events[time]
        highest = max(highest, live)
    return crossing, highest


def live_peaks(program: dict, order: list[int]) -> list[int]:
    """Return the peak of planned, adopted and output bytes in each half of an order."""
    border = program["num_forward"] - 0.5
    leaving = program["outputs"] + program["gradients"] + delivered(program)
    forever = {root_of(program, tensor) for tensor in leaving}
    peaks = [0, 0]
    found = lives(program, order)
    for position in range(len(order)):
        half = position > border
        live = 0
        for root, (first, last) in found.items():
            it = program["tensors"][root]
            if it["kind"] in ("input", "constant") or first > position:
                continue
            stays = root in forever or it["kind"] == "output"
            # What stays from forward on counts the same all through backward: not at all here.
            counts = (first > border) == half if stays else last >= position
            live += it["bytes"] if counts else 0
        peaks[half] = max(peaks[half], live)
    return peaks


# --- properties -----------------------------------------------------------------------------------

many = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@many
@given(program=programs(), options=OPTIONS)
def test_a_plan_holds(program: dict, options: dict) -> None:
    plan = _C.plan(program, options)
    _C.verify_plan(program, plan, options)
    check_by_model(program, plan)
    crossing, live = bounds(program, plan, options["alignment"])
    assert plan["crossing_bytes"] == crossing
    assert plan["context_bytes"] >= crossing
    if not delivered(program):
        assert plan["context_bytes"] == crossing
    for tensor in delivered(program):
        assert plan["placements"][tensor]["area"] == "context"
    assert plan["peak_bytes"] >= max(crossing, live)
    check_chunks(plan, options["chunk_bytes"], program["num_forward"])
    assert plan == _C.plan(program, options)


def check_chunks(plan: dict, smallest: int, border: int) -> None:
    end = 0
    for offset, size, position in plan["chunks"]:
        assert offset == end
        end += size
        assert size >= smallest or len(plan["chunks"]) == 1
        assert border <= position <= len(plan["order"])
    assert end == plan["context_bytes"]
    assert len(plan["chunks"]) <= (33 if smallest else 1)
    if len(plan["chunks"]) > 1:
        assert plan["discards"] == plan["workspaces"] == []


@many
@given(program=programs())
def test_order_never_raises_the_peak_of_a_half(program: dict) -> None:
    given_order = list(range(len(program["steps"])))
    order = _C.choose_order(program)
    if order != given_order:
        before, after = live_peaks(program, given_order), live_peaks(program, order)
        assert after[0] <= before[0]
        assert after[1] <= before[1]
        assert after != before
    assert order == _C.choose_order(program)


def tamper(plan: dict, choose: random.Random) -> None:
    """Change one thing of a plan."""
    placed = [i for i, it in enumerate(plan["placements"]) if it["area"] != "none"]
    kinds = ("move", "move", "move", "swap", "release", "in_place", "discard", "use", "chunk")
    what = choose.choice(kinds)
    if what == "move" and placed:
        one, other = (plan["placements"][choose.choice(placed)] for _ in range(2))
        one["area"], one["offset"] = other["area"], other["offset"]
    elif what == "discard" and plan["context_bytes"]:
        at = choose.randrange(max(len(plan["order"]), 1))
        plan["discards"].append((at, choose.randrange(plan["context_bytes"]), 16))
    elif what == "use" and plan["context_bytes"]:
        at = choose.randrange(max(len(plan["order"]), 1))
        plan["workspaces"].append((at, "context", choose.randrange(plan["context_bytes"]), 16))
    elif what == "chunk" and plan["chunks"]:
        at = choose.randrange(len(plan["chunks"]))
        offset, size, position = plan["chunks"][at]
        cut = choose.randrange(1, size + 1)
        parts = [(offset, cut, position), (offset + cut, size - cut, position)]
        if choose.random() < 0.5:
            parts = [(offset, size, position - choose.randrange(4))]
        plan["chunks"][at : at + 1] = [part for part in parts if part[1]]
    elif what == "in_place" and placed:
        one, read = choose.choice(placed), choose.choice(placed)
        plan["placements"][one] = plan["placements"][read] | {"in_place_of": read}
    elif what == "swap" and plan["order"]:
        one, other = (choose.randrange(len(plan["order"])) for _ in range(2))
        order = plan["order"]
        order[one], order[other] = order[other], order[one]
    elif what == "release" and any(plan["release"]):
        lists = [tensors for tensors in plan["release"] if tensors]
        tensor = choose.choice(lists).pop()
        choose.choice(plan["release"]).append(tensor)


@settings(many, max_examples=250)
@given(program=programs(), options=OPTIONS, seed=SEEDS)
def test_what_spoils_a_value_is_found(program: dict, options: dict, seed: int) -> None:
    plan = _C.plan(program, options)
    tamper(plan, random.Random(seed))
    try:
        check_by_model(program, plan)
    except AssertionError:
        pass
    else:
        assume(False)
    try:
        _C.verify_plan(program, plan, options)
    except _C.InternalError:
        return
    raise AssertionError("verify_plan accepts a plan that spoils a value")


# --- how good a plan is ---------------------------------------------------------------------------


def training_program(num_layers: int, width: int) -> dict:
    """Return layers of norm, product, bias and activation, with a backward half in reverse."""
    tensors: list[dict] = []
    steps: list[dict] = []

    def add(kind: str, size: int) -> int:
        tensors.append({"kind": kind, "bytes": size})
        return len(tensors) - 1

    def call(reads: list[int], size: int, in_place: bool = False, kind: str = "planned") -> int:
        result = add(kind, size)
        candidates = reads if in_place else []
        steps.append({"reads": reads, "writes": [result], "in_place": candidates, "effect": False})
        return result

    weights = [add("input", width) for _ in range(num_layers)]
    value = call([], width)
    saved = []
    for weight in weights:
        normed = call([value], width)
        product = call([normed, weight], 4 * width)
        biased = call([product], 4 * width, in_place=True)
        active = call([biased], 4 * width)
        saved.append((value, normed, biased, active))
        value = call([value, call([active], width)], width, in_place=True)
    loss = call([value], 4, kind="output")
    num_forward = len(steps)
    gradients = []
    gradient = call([value], width, in_place=True)
    for weight, (before, normed, biased, active) in zip(weights[::-1], saved[::-1], strict=True):
        gradients.append(call([gradient, active], width, kind="output"))
        inner = call([gradient, weight], 4 * width)
        inner = call([inner, biased], 4 * width, in_place=True)
        gradients.append(call([inner, normed], width, kind="output"))
        outer = call([call([inner, weight], width), before], width, in_place=True)
        gradient = call([gradient, outer], width, in_place=True)
    return {
        "tensors": tensors,
        "steps": steps,
        "num_forward": num_forward,
        "outputs": [loss],
        "gradients": gradients,
    }


def test_a_training_step_needs_no_more_than_what_is_alive() -> None:
    program = training_program(num_layers=12, width=1 << 16)
    for reorder in (False, True):
        plan = _C.plan(program, {"reorder": reorder})
        _C.verify_plan(program, plan, {"reorder": reorder})
        assert plan["peak_bytes"] == max(bounds(program, plan, 64))


def test_random_programs_come_near_to_what_is_alive() -> None:
    ratios = []
    for seed in range(200):
        program = build_program(random.Random(seed), 40, 60)
        plan = _C.plan(program, {"alignment": 16})
        ratios.append(plan["peak_bytes"] / max(bounds(program, plan, 16)))
    assert sum(ratios) / len(ratios) < 1.12
    assert max(ratios) < 1.9
