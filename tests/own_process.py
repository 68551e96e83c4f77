"""Python in a process of its own, for tests of what a whole process does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def run_python(
    *arguments: object, timeout: float = 300, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments; give its return code, its output and its errors as text."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **settings
    )
