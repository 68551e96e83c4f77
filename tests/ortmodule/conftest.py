from __future__ import annotations

from typing import Any

import pytest

from torch_ort.core.refusals import HandOver


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave all captures to AOTAutograd."""

    def hand_over(*args: Any, **kwargs: Any) -> None:
        raise HandOver("the test wants it")

    monkeypatch.setattr("torch_ort.capture.recorded.record", hand_over)
