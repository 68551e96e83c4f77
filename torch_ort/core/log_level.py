"""How much an ORTModule says."""

from __future__ import annotations

import enum


class LogLevel(enum.IntEnum):
    """How much an ORTModule says: users need WARNING, developers INFO and below."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5
