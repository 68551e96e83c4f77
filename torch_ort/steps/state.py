"""The state that forward and backward of one captured graph share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ort import _C
from torch_ort.engine import compiler
from torch_ort.engine.program import Program
from torch_ort.fallback import asked_for
from torch_ort.options import Options


@dataclass
class GraphState:
    """What the pieces of one captured graph tell each other."""

    options: Options
    files: Any = None  # of an ORTModule: writes graphs and plans
    rewrite: Callable[[_C.Graph], _C.Graph] | None = None  # of an ORTModule: the user's passes
    say_run: Callable[[Program], None] = lambda program: None  # logs what only a run can show
    names_inputs: bool = False  # messages or files name the inputs as the user does
    failed: bool = False  # a backward has failed, so the graph runs in eager PyTorch from now on
    is_differentiated_twice: bool = False  # the reason of the failure
    is_repeatable: bool = False  # running again changes nothing: no writes, no random numbers
    # Other ranks take part in its runs, so that none can be run again, or in eager PyTorch, alone.
    communicates: bool = False
    programs: list[Program] = field(default_factory=list)
    # What a first run writes to, with copies from before; None once such a run has succeeded.
    written: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def note_first_run(self) -> None:
        """Say and write what only a run can tell; called when a first run has succeeded."""
        for program in self.programs:
            self.say_run(program)
        with asked_for():
            compiler.write_choices(self.programs, self.options)
            if "plan" in self.options.dump:
                for program in self.programs:
                    compiler.write_plan(program, self.options)
            if self.files is not None:
                for program in self.programs:
                    self.files.write_run(program, self.options)
