"""The log levels of an ORTModule."""

from __future__ import annotations

import enum


class LogLevel(enum.IntEnum):
    """The least severe messages that an ORTModule logs: WARNING for users, INFO for developers."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5
