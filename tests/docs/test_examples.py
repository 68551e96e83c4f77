"""The Python examples of README.md, docs/ and the other pages, run as a reader would run them.

The blocks of a page are one program, in their order: what one has defined the next ones may use.
A program runs in a process and a folder of its own, in strict mode: a fork of one that has imported
PyTorch and torch_ort, unless it sets variables of the environment. A page whose first example says
in a comment that torchrun starts it is started so. A block that cannot run is headed by the comment
`<!-- not run: why -->`, which readers do not see.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from forked_process import run_fork
from own_process import run_python

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
TORCHRUN = re.compile(r"^# .*torchrun --nproc-per-node (\d+)", re.MULTILINE)

# A process that ends soon after a collective of gloo may be aborted: docs/distributed.md tells why.
LEAVES = """
import os, sys, torch.distributed
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)
"""


def program_of(page: str) -> str:
    """Take a page's Python examples, each on its own lines, so that errors name lines of the page.

    Raises ValueError for a block that never ends.
    """
    lines, program = page.splitlines(), []
    runs, indent = False, None  # of the block that this line is in
    for number, line in enumerate(lines):
        fence = re.match(r"( *)```(\w*)", line)
        if fence is None:
            program.append(line.removeprefix(" " * len(indent)) if runs else "")
            continue
        if indent is not None:
            runs, indent = False, None
        else:
            indent = fence[1]
            before = next((text for text in reversed(lines[:number]) if text.strip()), "")
            runs = fence[2] == "python" and not NOT_RUN.fullmatch(before.strip())
        program.append("")
    if indent is not None:
        raise ValueError("a block of code never ends")
    return "\n".join(program).rstrip() + "\n"


PROGRAMS = {
    path.relative_to(ROOT).as_posix(): program
    for path in PAGES
    if (program := program_of(path.read_text())).strip()
}


def with_needs(page: str) -> Any:
    imports = re.findall(r"^(?:from|import) (\w+)", PROGRAMS[page], re.MULTILINE)
    return pytest.param(page, marks=[pytest.mark.hf] if "transformers" in imports else [])


@pytest.mark.parametrize("page", map(with_needs, PROGRAMS))
def test_examples_run(page: str, tmp_path: Path) -> None:
    program = PROGRAMS[page]
    script = tmp_path / (page.replace("/", "_") + ".py")
    settings = {
        "cwd": tmp_path,
        "env": os.environ | {"TORCH_ORT_STRICT": "1", "OMP_NUM_THREADS": "1"},
        "timeout": 300,
    }
    if ranks := TORCHRUN.search(program):
        script.write_text(program + LEAVES)
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks[1])
        done = run_python(*launcher, script, **settings)
    else:
        script.write_text(program)
        # Some of the variables count as PyTorch is imported.
        run = run_python if "os.environ" in program else run_fork
        done = run(script, **settings)
    assert done.returncode == 0, done.stderr[-4000:]


def test_blocks_stay_on_their_lines() -> None:
    page = """\
# Page

```python
a = 1
```

- in a list

  ```python
  if a:
      b = 2
  ```

<!-- not run: there is no c -->
```python
c()
```

```
make test
```
"""
    lines = program_of(page).splitlines()
    assert [(i + 1, line) for i, line in enumerate(lines) if line] == [
        (4, "a = 1"),
        (10, "if a:"),
        (11, "    b = 2"),
    ]


def test_a_block_ends() -> None:
    with pytest.raises(ValueError, match="never ends"):
        program_of("```python\na = 1\n")
