"""Writes random programs: the text of a module, what it is called with, and how.

A line is kept where eager PyTorch runs it for two choices of sizes at once, so that what is written
is a program for all sizes, and never one that eager refuses.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import programs_parts
import torch
from programs_words import (
    COMPANIONS,
    EXTRA_KINDS,
    KINDS,
    NUMBERS,
    RANDOM,
    STATEMENTS,
    STATES,
    WRITES,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SIZES = ({"B": 3, "T": 5}, {"B": 2, "T": 7}, {"B": 5, "T": 4}, {"B": 4, "T": 6}, {"B": 2, "T": 3})
MAX_ELEMENTS = 4000
MAX_DIMS = 5
LARGEST = 1e4
TRIES = 40  # for one line


@dataclass(frozen=True)
class Input:
    """An argument of every call; sizes are numbers, or letters that each call gives a number."""

    name: str
    sizes: tuple[str | int, ...]
    dtype: str = "float32"
    requires_grad: bool = False
    layout: str = "dense"  # or transposed, sliced, expanded
    special: bool = False  # holds NaN and infinities
    same_as: str = ""  # another input, which is given twice


@dataclass(frozen=True)
class Call:
    """One call, and what becomes of its results."""

    sizes: dict[str, int]
    training: bool = True
    mode: str = "grad"  # or no_grad, inference_mode
    backward: str = "now"  # or later, twice, never
    unread: tuple[int, ...] = ()  # trained results that backward does not start from
    autocast: str = ""  # its dtype
    backward_in_autocast: bool = False
    default_dtype: str = "float32"
    deterministic: bool = False
    in_thread: bool = False
    numbers: tuple[tuple[str, float | int], ...] = ()  # attributes that change before it


@dataclass(frozen=True)
class Program:
    """A module as text, and calls of it."""

    seed: int
    inputs: tuple[Input, ...]
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    buffers: tuple[tuple[str, tuple[int, ...]], ...]
    lines: tuple[str, ...]
    results: str  # an expression
    calls: tuple[Call, ...]
    packed: str = ""  # the kind of object that holds the inputs, as in programs_parts.OBJECTS
    at_once: bool = False  # two threads call it at the end

    def text(self) -> str:
        """Give the module's class, `Program`, as Python."""
        made = [
            f"self.{name} = torch.nn.Parameter(0.5 * torch.randn({list(sizes)}))"
            for name, sizes in self.parameters
        ]
        made += [
            f'self.register_buffer("{name}", torch.rand({list(sizes)}))'
            for name, sizes in self.buffers
        ]
        made += ['self.register_buffer("count", torch.zeros(()))', "self.last = torch.zeros(())"]
        if self.has_parts():
            is_doubled = any("self.doubled" in line for line in self.lines)
            made.append(f"add_parts(self, {is_doubled})")
        body = [part for line in self.lines for part in line.splitlines()]
        names = "".join(f", {one.name}" for one in self.inputs)
        if self.packed:
            names = ", given"
            item = 'given["{0}"]' if self.packed == "dict" else "given.{0}"
            body[:0] = [f"{one.name} = {item.format(one.name)}" for one in self.inputs]
        return "\n".join(
            [
                "class Program(torch.nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in made),
                "",
                f"    def forward(self{names}):",
                *(f"        {line}" for line in body),
                f"        return {self.results}",
                "",
            ]
        )

    def has_parts(self) -> bool:
        """Tell whether the module has what `programs_parts.add_parts` gives it."""
        text = "\n".join((*self.lines, self.results))
        return re.search(r"self\.(hot|step|halved|moved|doubled)\b", text) is not None

    def names_in_results(self) -> list[str]:
        """Give the variables that are returned."""
        return re.findall(r"\b[vx]\d+\b", self.results)


_NARROW = re.compile(r"torch\.(float32|bfloat16|float16)\b")
_FUNCTIONS = ("add_parts", "WithPlace", "BetweenConstants", "OneSided", "Unfilled")


def in_double(text: str) -> str:
    """Give a program's text with double in place of narrower types."""
    text = _NARROW.sub("torch.float64", text).replace("torch.complex64", "torch.complex128")
    return text.replace(".float()", ".double()").replace(".bfloat16()", ".double()")


def namespace() -> dict[str, Any]:
    """Give the names that programs use."""
    names = {name: getattr(programs_parts, name) for name in _FUNCTIONS}
    return {"torch": torch, "F": F, "checkpoint": checkpoint, **names}


def make_module(program: Program, wide: bool = False) -> torch.nn.Module:
    """Build a program's module, with the same numbers each time."""
    text = program.text()
    names = namespace()
    exec(compile(in_double(text) if wide else text, f"program_{program.seed}.py", "exec"), names)
    torch.manual_seed(program.seed)
    module = names["Program"]()
    if wide:
        module.double()
        module.last = module.last.double()
    return module


def inputs_text(program: Program, call: Call, number: int) -> list[str]:
    """Give the lines that make the arguments of a call; `number` tells calls apart."""
    lines = [f"generator = torch.Generator().manual_seed({1000 * program.seed + number})"]
    for one in program.inputs:
        sizes = [call.sizes.get(size, size) for size in one.sizes]
        lines += _input_text(one, sizes)
    return lines


def _input_text(one: Input, sizes: list[int]) -> list[str]:
    name = one.name
    if one.same_as:
        return [f"{name} = {one.same_as}"]
    drawn = f"({sizes}, generator=generator)"
    if one.dtype == "bool":
        lines = [f"{name} = torch.rand{drawn} < 0.5"]
    elif "float" not in one.dtype:
        lines = [f"{name} = torch.randint(0, 5, {sizes}, generator=generator)"]
    else:
        lines = [f"{name} = torch.randn{drawn}"]
        if one.special:
            lines.append(f"for number in {SPECIAL}:")
            lines.append(f"    {name}[torch.rand{drawn} < 0.06] = float(number)")
        lines.append(f"{name} = {name}.to(torch.{one.dtype})")
    if one.layout in _LAYOUTS and sizes:
        lines.append(f"{name} = {_LAYOUTS[one.layout].format(name)}")
    return [*lines, f"{name}.requires_grad_()"] if one.requires_grad else lines


SPECIAL = ("nan", "inf", "-inf", "0.0", "-0.0")
_LAYOUTS = {
    "transposed": "{0}.movedim(-1, 0).contiguous().movedim(0, -1)",
    "sliced": "{0}.repeat_interleave(2, -1)[..., ::2]",
    "expanded": "{0}[:1].expand_as({0})",
}


def make_inputs(program: Program, call: Call, number: int, wide: bool = False) -> list[Any]:
    """Build the arguments of a call; `number` tells calls apart."""
    names: dict[str, Any] = {"torch": torch}
    text = "\n".join(inputs_text(program, call, number))
    exec(_NARROW.sub("torch.float64", text) if wide else text, names)
    return [names[one.name] for one in program.inputs]


class Writer:
    """Writes one program; equal seeds write equal programs."""

    def __init__(self, seed: int, num_lines: int | None = None) -> None:
        self.random = random.Random(seed)
        self.wild = self.random.random() < 0.15  # NaN, infinities and large numbers
        self.draws = self.random.random() < 0.2  # from random generators
        self.writes = self.random.random() < 0.5  # in place
        self.num_lines = num_lines or self.random.choice((2, 4, 6, 8, 12, 16, 24, 40))
        self.program = Program(seed, self._inputs(), (), (), (), "None", ())
        self._names = 0
        self._kinds = [
            (words, weight)
            for words, weight in KINDS
            if (words is not RANDOM or self.draws) and (words is not WRITES or self.writes)
        ]
        self._extras = self.random.sample(EXTRA_KINDS, self.random.choice((0, 0, 1, 1, 2, 3)))
        self._kinds += [(words, 3 * weight) for words, weight in self._extras]
        self._kinds += [
            (companion, weight)
            for words, companion, weight in COMPANIONS
            if self._has_extra(words) and self.random.random() < 0.5
        ]

    def _has_extra(self, words: list[str]) -> bool:
        return any(words is extra for extra, _ in self._extras)

    def _inputs(self) -> tuple[Input, ...]:
        choose = self.random.choice
        shapes = (
            ("B", "T"), ("B", "T", 4), ("B", 4), ("B", 2, "T", 4), ("B", 4, "T"), ("T", 6), ("B",),
            (), (3, 4), ("B", "T", 6), ("B", 2, 6, 6),
        )  # fmt: skip
        inputs = []
        for i in range(choose((1, 2, 2, 3))):
            dtype = choose(("float32",) * 8 + ("float64", "bfloat16", "int64", "bool"))
            is_float = "float" in dtype
            layout = choose(("dense",) * 7 + ("transposed", "sliced", "expanded"))
            inputs.append(
                Input(
                    f"x{i}", choose(shapes), dtype, is_float and self.random.random() < 0.5,
                    layout, self.wild and self.random.random() < 0.5,
                )
            )  # fmt: skip
        if self.random.random() < 0.04:
            inputs.append(replace(inputs[0], name=f"x{len(inputs)}", same_as="x0"))
        return tuple(inputs)

    def write(self) -> Program | None:
        """Write the program; None where too little of it came about."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._worlds = [_World(self.program, sizes) for sizes in SIZES[:2]]
            for _ in range(self.num_lines):
                for _ in range(TRIES):
                    if self._add_line():
                        break
            if not self.program.lines:
                return None
            chance, choose = self.random.random, self.random.choice
            self.program = replace(
                self.program, results=self._results(), calls=self._make_calls(),
                packed=choose([*programs_parts.OBJECTS]) if chance() < 0.1 else "",
                at_once=chance() < 0.1 and self._is_the_same_in_any_order(),
            )  # fmt: skip
            return self.program

    def _is_the_same_in_any_order(self) -> bool:
        """Tell whether calls leave nothing behind that later ones read."""
        text = "\n".join(self.program.lines)
        writes = re.search(r"self\.(count|last|step|hot)( [-+*%]?=|\.)|dropout|checkpoint", text)
        return not (self.draws or self.program.buffers or writes)

    # Lines.

    def _add_line(self) -> bool:
        words = self.random.choices(*zip(*self._kinds, strict=True))[0]
        template = self.random.choice(words)
        line = self._filled(template)
        if line is None:
            return False
        before = self.program
        text, parameters, buffers = line
        trial = replace(
            before,
            parameters=before.parameters + tuple(parameters),
            buffers=before.buffers + tuple(buffers),
        )
        is_statement = any(words is one for one in STATEMENTS)
        is_statement = is_statement or text.startswith(("with", "if", "self."))
        is_statement = is_statement or bool(re.match(r"v\d+ = ", text)) or ".b" in text[:6]
        if is_statement:
            return self._try([text], trial)
        counts = {world.count_values(text, trial) for world in self._worlds}
        if len(counts) != 1 or (count := counts.pop()) is None or count > 6:
            return False
        names = [self._new_name() for _ in range(count or 1)]
        return self._try([f"{', '.join(names)}{',' if count == 1 else ''} = {text}"], trial)

    def _try(self, lines: list[str], trial: Program) -> bool:
        """Keep lines if all worlds run them; worlds that did are made anew if one does not."""
        trial = replace(trial, lines=self.program.lines + tuple(lines))
        if all(world.run(lines, trial, self.wild) for world in self._worlds) and self._agree():
            self.program = trial
            return True
        self._worlds = [world.again(self.program) for world in self._worlds]
        return False

    def _agree(self) -> bool:
        """Tell whether values are the same in all worlds but for sizes."""
        first, *others = (
            {name: (v.dtype, v.dim(), v.requires_grad) for name, v in world.values().items()}
            for world in self._worlds
        )
        return all(first == other for other in others)

    def _new_name(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def _filled(self, template: str) -> tuple[str, list, list] | None:
        """Fill a template's holes; None where no value fits."""
        worlds, pick = self._worlds, self._pick
        found: dict[str, str] = {}
        parameters: list[tuple[str, tuple[int, ...]]] = []
        buffers: list[tuple[str, tuple[int, ...]]] = []
        anchor: str | None = None
        for hole in dict.fromkeys(re.findall(r"\{([^}]+)\}", template)):
            kind = hole[0]
            if kind in "fghabimzy":
                chosen = pick(kind, anchor if kind in "ghbmy" else None)
                if chosen is None:
                    return None
                anchor = anchor or chosen
                found[hole] = chosen
            elif kind == "v":
                found[hole] = self._new_name()
            elif kind == "n":
                found[hole] = self.random.choice(("0.5", "-1.5", "2.0", "0.25", "3", "-0.1"))
            elif kind == "t":
                found[hole] = self.random.choice(
                    ("torch.float32", "torch.float64", "torch.bfloat16", "torch.float16")
                )
            elif kind in "wu":
                sizes = self._sizes_of(hole.partition(":")[2], anchor)
                if sizes is None:
                    return None
                prefix, known, made = (
                    ("p", self.program.parameters, parameters)
                    if kind == "w"
                    else ("b", self.program.buffers, buffers)
                )
                same = [name for name, other in known if other == sizes]
                if kind == "u":  # an operator writes one after the other
                    same = [name for name in same if f"self.{name}" not in found.values()]
                if same and self.random.random() < 0.5:
                    name = self.random.choice(same)
                else:
                    name = f"{prefix}{len(known) + len(made)}"
                    made.append((name, sizes))
                found[hole] = f"self.{name}"
            elif kind in "des":
                if anchor is None:
                    return None
                dims = worlds[0].values()[anchor].dim() or 1
                found[hole] = (
                    f"{anchor}.shape" if kind == "s" else str(self.random.randrange(-dims, dims))
                )
        for hole, text in found.items():
            template = template.replace("{" + hole + "}", text)
        return template, parameters, buffers

    def _pick(self, kind: str, anchor: str | None) -> str | None:
        first, second = (world.values() for world in self._worlds)
        names = list(first)
        if kind in "fgh":
            names = [name for name in names if first[name].is_floating_point()]
        elif kind == "i":
            names = [n for n in names if first[n].dtype in (torch.int64, torch.int32)]
        elif kind in "zy":
            names = [name for name in names if first[name].is_complex()]
        elif kind == "m":
            names = [name for name in names if first[name].dtype == torch.bool]
        if anchor is not None:
            names = [
                name
                for name in names
                if all(_broadcasts(values[anchor], values[name]) for values in (first, second))
            ]
        if not names:
            return None
        recent = names[-4:] if self.random.random() < 0.6 else names
        return self.random.choice(recent)

    def _sizes_of(self, text: str, anchor: str | None) -> tuple[int, ...] | None:
        sizes = []
        for word in text.split(","):
            word = word.strip()
            if word.isdigit():
                sizes.append(int(word))
                continue
            dim = -1 if word == "last" else 1
            shapes = [world.values()[anchor].shape for world in self._worlds]
            if any(len(shape) < 2 for shape in shapes[:1]) and dim == 1:
                return None
            if not all(shapes) or len({shape[dim] for shape in shapes}) != 1:
                return None
            sizes.append(shapes[0][dim])
        return tuple(sizes)

    # What is returned, and the calls.

    def _results(self) -> str:
        values = self._worlds[0].values()
        made = [name for name in values if name.startswith("v")] or list(values)
        count = self.random.choice((1, 1, 2, 3, 5))
        trained = [name for name in made if values[name].requires_grad]
        chosen = [made[-1], *trained[-1:]] if trained else [made[-1]]
        pool = list(values) if self.random.random() < 0.2 else made
        chosen += [self.random.choice(pool) for _ in range(count - 1)]
        if self.random.random() > 0.1:
            chosen = list(dict.fromkeys(chosen))
        if len(chosen) == 1 and self.random.random() < 0.5:
            return chosen[0]
        kind = self.random.random()
        if kind < 0.6:
            return f"({', '.join(chosen)},)"
        if kind < 0.75:
            return f"[{', '.join(chosen)}]"
        items = ", ".join(f'"r{i}": {name}' for i, name in enumerate(chosen))
        return f"{{{items}}}" if kind < 0.9 else f"({chosen[0]}, {{{items}}}, None)"

    def _make_calls(self) -> tuple[Call, ...]:
        choose, chance = self.random.choice, self.random.random
        calls = []
        for number in range(choose((2, 3, 4))):
            sizes = SIZES[0] if not number else choose(SIZES)
            mode = choose(("grad",) * 8 + ("no_grad", "inference_mode"))
            backward = choose(("now",) * 5 + ("later", "later", "twice", "never"))
            calls.append(Call(dict(sizes), chance() < 0.75, mode, backward))
        if self._has_extra(STATES):
            calls = [self._in_state(call) for call in calls]
        if self._has_extra(NUMBERS):
            calls = [replace(call, numbers=self._numbers()) for call in calls]
        if chance() < 0.06:
            calls = [replace(call, in_thread=chance() < 0.5) for call in calls]
        if chance() < 0.4:
            calls = [replace(call, unread=choose(((), (0,), (1,), (0, 2)))) for call in calls]
        return tuple(calls)

    def _in_state(self, call: Call) -> Call:
        choose = self.random.choice
        dtype = choose(("", "", "bfloat16", "bfloat16", "float16"))
        return replace(
            call, autocast=dtype,
            backward_in_autocast=bool(dtype) and choose((False, False, True)),
            default_dtype=choose(("float32",) * 6 + ("float64",)),
            deterministic=choose((False,) * 6 + (True,)),
        )  # fmt: skip

    def _numbers(self) -> tuple[tuple[str, float | int], ...]:
        choose = self.random.choice
        hot = choose((0.75, 0.5, 1.0, 0.25, 2.0, -0.5, 0.0, 1, 1e-3, 0.3))
        step = choose((1, 2, 3, 4, 5, 2, 3, 1))
        return tuple(one for one in (("hot", hot), ("step", step)) if self.random.random() < 0.7)


def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(n == m or 1 in (n, m) for n, m in pairs)


class _World:
    """The values of a program's lines for one choice of sizes."""

    def __init__(self, program: Program, sizes: dict[str, int]) -> None:
        self._sizes = sizes
        self._module: torch.nn.Module = torch.nn.Module()
        self._module.register_buffer("count", torch.zeros(()))
        self._module.last = torch.zeros(())
        programs_parts.add_parts(self._module, True)
        inputs = make_inputs(program, Call(sizes), 0)
        self._names = {**namespace(), "self": self._module}
        self._names |= zip((one.name for one in program.inputs), inputs, strict=True)

    def values(self) -> dict[str, torch.Tensor]:
        return {name: v for name, v in self._names.items() if re.fullmatch(r"[vx]\d+", name)}

    def again(self, program: Program) -> _World:
        world = _World(program, self._sizes)
        world._hold(program)
        torch.manual_seed(0)
        for line in program.lines:
            exec(line, world._names)
        return world

    def _hold(self, program: Program) -> None:
        """Let the module have what the program's lines read; what a refused line read may go."""
        for name, sizes in program.parameters:
            if tuple(getattr(self._module, name, torch.zeros(())).shape) != sizes:
                value = 0.5 * torch.randn(sizes, generator=_generator(name))
                self._module.register_parameter(name, torch.nn.Parameter(value))
        for name, sizes in program.buffers:
            if tuple(getattr(self._module, name, torch.zeros(())).shape) != sizes:
                self._module.register_buffer(name, torch.rand(sizes, generator=_generator(name)))

    def count_values(self, text: str, program: Program) -> int | None:
        """Tell how many tensors an expression gives: 0 for one alone; None if it does not run."""
        self._hold(program)
        try:
            value = eval(text, dict(self._names))
        except Exception:
            return None
        if isinstance(value, torch.Tensor):
            return 0
        if not isinstance(value, Sequence) or not value:
            return None
        return len(value) if all(isinstance(one, torch.Tensor) for one in value) else None

    def run(self, lines: list[str], program: Program, wild: bool) -> bool:
        """Run lines; tell whether they run, and all values are such as programs may have."""
        self._hold(program)
        try:
            for line in lines:
                exec(line, self._names)
        except Exception:
            return False
        return all(_is_fit(value, wild) for value in self._all())

    def _all(self) -> Iterator[torch.Tensor]:
        yield from self.values().values()
        yield from self._module.buffers()


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, name)))


def _is_fit(value: Any, wild: bool) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    if value.numel() > MAX_ELEMENTS or value.dim() > MAX_DIMS:
        return False
    if wild or not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return True
    return bool(value.detach().abs().max() <= LARGEST)  # false for NaN as well
