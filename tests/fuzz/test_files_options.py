"""Random options, environments and JSON files are taken or refused by UserError, with the name."""

from __future__ import annotations

import functools
import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_ort import ORTModule, UserError, options
from torch_ort.ortmodule import json_config

pytestmark = pytest.mark.ort_only

TABLES = (options.TABLE, options.ORTMODULE_TABLE)
WORDS = (
    "", "0", "1", "2", "-1", "true", "no", "none", "auto", "ir,passes", "ir,,x", "fuse_regions",
    "fuse_region", "avx2", "INFO", "FALLBACK_DISABLE", "FALLBACK_DISABLE|x", "|", "1e9", "9" * 5000,
    "\u00e9", "\ud800", "/no/where", " 1", "0x10", "nan",
)  # fmt: skip


# Values in JSON that keys take which do not take true.
RIGHT = {
    "DebugOptions": {"LogLevel": "INFO"},
    "FallbackPolicy": "FALLBACK_DISABLE",
    "OnnxOpsetVersion": 17,
    "SkipCheck": ["SKIP_CHECK_DEVICE"],
}


def any_value(rng: random.Random, depth: int = 0) -> Any:
    plain = (
        None, True, False, 0, 1, -1, 28, 2**70, 0.5, float("nan"), *WORDS, b"ir", object(), print,
        torch.ones(2), (), [], {}, {1, 2},
    )  # fmt: skip
    if depth < 3 and rng.random() < 0.2:
        items = [any_value(rng, depth + 1) for _ in range(rng.randrange(3))]
        return rng.choice((items, tuple(items), {"x": items}))
    return rng.choice(plain)


def changed_name(name: str, rng: random.Random) -> str:
    at = rng.randrange(len(name))
    return rng.choice((name, name, name, name[:at] + name[at + 1 :], name[:at] + "x" + name[at:]))


def refusal(
    call: Callable[[], object], errors: tuple[type[Exception], ...] = (UserError,)
) -> str | None:
    """Give the message of the error that a call raises; None if it raises none."""
    try:
        call()
    except errors as error:
        return str(error)
    return None


def test_random_options() -> None:
    rng, messages = random.Random(0), []
    defaults = {
        row.name: row.default() if callable(row.default) else row.default
        for table in TABLES
        for row in table
    }
    names = list(defaults)

    def resolve(given: dict[str, Any]) -> None:
        ours, others = options.split(given)
        options.resolve(ours, rng.choice((None, None, None, "default", "fast", any_value(rng))))
        options.resolve_ortmodule(others, rng.random() < 0.5)

    for _ in range(1500):
        given = {
            changed_name(name, rng): rng.choice((defaults[name], any_value(rng)))
            for name in rng.choices(names, k=rng.choice((1, 2)))
        }
        message = refusal(functools.partial(resolve, given))
        messages.append(message)
        unknown = [name for name in given if name not in names]
        if unknown:
            assert any(repr(name) in message for name in unknown)
            assert "did you mean" in message or min(map(len, unknown)) < 6
        elif message is not None:
            assert any(name in message for name in (*given, "mode")), message
    assert 100 < messages.count(None) < len(messages) - 100


def test_random_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, messages = random.Random(0), []
    variables = [row.variable for table in TABLES for row in table]
    for _ in range(500):
        with monkeypatch.context() as patch:
            chosen = rng.choice(variables)
            patch.setenv(chosen, rng.choice([word for word in WORDS if word != "\ud800"]))
            message = refusal(options.resolve) or refusal(options.resolve_ortmodule)
        messages.append(message)
        assert message is None or chosen in message
    assert 100 < messages.count(None) < len(messages) - 100


def test_random_json(tmp_path: pathlib.Path) -> None:
    rng, messages = random.Random(0), []
    path, module = tmp_path / "config.json", ORTModule(torch.nn.Linear(2, 2))
    debug_keys = ("LogLevel", "SaveONNX", "ONNXPrefix", "SaveONNXPath")
    # The last two are DebugOptions' own.
    errors, words = (UserError, ValueError, OSError), (
        "load_from_json", "options:", "onnx_prefix:", "save_path:",
    )  # fmt: skip
    for _ in range(500):
        config = {
            changed_name(key, rng): rng.choice((RIGHT.get(key, True), json_value(rng)))
            for key in rng.choices(json_config._KEYS, k=2)
        }
        if rng.random() < 0.5:
            config["DebugOptions"] = {changed_name(rng.choice(debug_keys), rng): json_value(rng)}
        data = json.dumps(config if rng.random() < 0.95 else json_value(rng)).encode()
        if rng.random() < 0.2:
            at = rng.randrange(len(data) + 1)
            data = data[:at] + rng.randbytes(rng.randrange(3)) + data[at + rng.randrange(2) :]
        path.write_bytes(data)
        message = refusal(lambda: json_config.load_from_json(module, path), errors)
        messages.append(message)
        assert message is None or any(word in message for word in words), message
    assert 10 < messages.count(None) < len(messages) - 10


def json_value(rng: random.Random) -> Any:
    value = any_value(rng)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return rng.choice(WORDS)
    return value


def test_json_files_that_are_none(tmp_path: pathlib.Path) -> None:
    module = ORTModule(torch.nn.Linear(2, 2))
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{")
    for name, words in (("deep", "recursion"), ("bytes", "decode")):
        with pytest.raises(UserError, match=f"load_from_json: .*{words}"):
            json_config.load_from_json(module, tmp_path / name)
    (tmp_path / "near").write_text('{"FallbackPolcy": 1}')
    with pytest.raises(
        UserError, match=r"unknown key 'FallbackPolcy'.*did you mean FallbackPolicy\?"
    ):
        json_config.load_from_json(module, tmp_path / "near")
