"""The inputs of a graph from Dynamo for a recording, with our symbols in place of Dynamo's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_ort import _C
from torch_ort.core.refusals import HandOver
from torch_ort.guards.structure import has_plain_layout
from torch_ort.pytorch import dynamo_compat, size_compat, trace_compat
from torch_ort.record.recorder import input_like
from torch_ort.rules.data_sizes import example_of
from torch_ort.rules.forms import Spec
from torch_ort.rules.numbers import Conditions, conditions_of_recording, number_for, of_size
from torch_ort.rules.symbols import expression_text

_PLAIN = (torch.Tensor, torch.nn.Parameter, trace_compat.FakeTensor)
_WORDS = {"min": torch.sym_min, "max": torch.sym_max}


class DynamoInputs:
    """Inputs for `record` that stand for those of one graph.

    Conditions on sizes and numbers that a recording relies on are passed to Dynamo, which guards
    those that it does not know to hold. Floats, and integers that are no sizes, are those of one
    call unless this `opens_numbers`.
    """

    def __init__(
        self, values: Sequence[Any], graph: fx.Graph | None = None, opens_numbers: bool = True
    ) -> None:  # fmt: skip
        self._opens_numbers = opens_numbers
        graph = graph or fx.Graph()
        # Nodes that read a number of the user's program: what Dynamo's own symbol for it is.
        self.reads = dynamo_compat.float_reads(graph)
        self._as_numbers = dynamo_compat.integers_as_numbers(graph)
        self._numbers: dict[str, Any] = {}  # Dynamo's symbols, by our names
        self._num_new = 0  # number of sizes that only data tells
        self._sizes = _C.SizeSymbols()
        self._theirs: dict[str, torch.SymInt] = {}  # by name
        lengths = [
            size
            for value in values
            if isinstance(value, torch.Tensor)
            for size in value.shape
            if isinstance(size, torch.SymInt)
        ]
        self._lengths = {name for size in lengths for name in size_compat.dynamo_symbols(size)}
        self._given: set[int | str] = set()  # integers that are inputs of the graph
        self.inputs = [self._input(i, value) for i, value in enumerate(values)]
        missing = self._theirs.keys() - self._given
        if missing:
            raise HandOver(f"size {min(missing)} is no input of the graph")

    def _input(self, position: int, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) not in _PLAIN or not has_plain_layout(value):
                kind = type(value).__name__
                raise HandOver(f"input {position} is a {kind} of layout {value.layout}")
            sizes, strides = map(self._integers, (value.shape, value.stride()))
            return input_like(value, Spec(sizes, strides, value.dtype, value.device))
        if isinstance(value, torch.SymInt):
            ours = self._integer(value)
            self._given.add(_C.size_text(ours))
            return ours
        if isinstance(value, int | float | None):
            return value
        raise HandOver(f"input {position} is a {type(value).__name__}")

    def _integers(self, sizes: Sequence[int | torch.SymInt]) -> list[int | torch.SymInt]:
        return [self._integer(n) if isinstance(n, torch.SymInt) else n for n in sizes]

    def _integer(self, size: torch.SymInt) -> int | torch.SymInt:
        for name, symbol in size_compat.dynamo_symbols(size).items():
            if name not in self._theirs:
                if symbol.value is None:
                    raise HandOver(f"size {name} is known from data alone")
                self._theirs[name] = symbol.integer
                is_size = name in self._lengths
                self._sizes.symbol(name, symbol.value, is_size, symbol.low, symbol.high)
        return self._sizes.expression(expression_text(size.node.expr))

    def new_size(self, most: int | None) -> torch.SymInt:
        """Give a symbol for a size that only data tells, and that is at most a number."""
        self._num_new += 1
        return self._sizes.unbacked(f"data_{self._num_new}", example_of(most), most)

    def number_read_by(self, node: fx.Node, tensor: torch.Tensor) -> torch.SymFloat:
        """Give what stands for a float that a node reads of a 0-d tensor."""
        theirs = self.reads[node]
        self._numbers[node.args[0].name] = theirs
        value = size_compat.hint_of(theirs)
        return self._number(value, node.args[0].name, tensor)

    def number_given_by(self, node: fx.Node, value: Any) -> Any:
        """Give what stands for an integer that is no size; else the value."""
        theirs = self._as_numbers.get(node)
        if theirs is None or not isinstance(value, torch.SymInt):
            return value
        if size_compat.dynamo_symbols(theirs).keys() <= self._lengths:
            return torch.SymInt(of_size(value))
        self._numbers[node.name] = theirs
        return self._number(size_compat.hint_of(theirs), node.name, value)

    def _number(self, value: int | float, name: str, source: torch.Tensor | torch.SymInt) -> Any:
        number = number_for(value, name, source, conditions_of_recording())
        return number if self._opens_numbers else number.node.asked()

    @property
    def has_numbers(self) -> bool:
        """Tell whether numbers are open, and whether the graph has read any."""
        return self._opens_numbers and bool(self._numbers)

    def tell_guards(self, asked: Conditions) -> None:
        """Let Dynamo guard the conditions under which the same would be recorded.

        `asked` are those on numbers.
        Raises HandOver, before it guards anything, where a size would be a constant from then on:
        whether it has to be, AOTAutograd knows.
        """
        open_ones = [text for text in self._sizes.guards() if not self._is_known(text)]
        fixing = [text for text in open_ones if size_compat.fixes_a_size(self._asked(text))]
        if fixing:
            raise HandOver(f"a size has to be constant: {fixing[0]}")
        for text in open_ones:
            if not self._asked(text):
                raise HandOver(f"a condition does not hold: {text}")
        if not asked.hold(self._numbers, self._theirs):
            raise HandOver(f"a condition does not hold: {asked}")

    def _is_known(self, text: str) -> bool:
        return size_compat.is_known(self._asked(text))

    def _asked(self, text: str) -> bool | torch.SymBool:
        # Python's `and` and `or` would ask for the truth of a symbolic condition.
        text = text.replace(" and ", " & ").replace(" or ", " | ")
        return eval(text, _WORDS | self._theirs)
