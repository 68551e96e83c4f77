"""How the engine is told of options: `_C.SessionOptions`, which `torch_ort/options.py` fills."""

from __future__ import annotations

import re

import pytest

from torch_ort import _C, UserError
from torch_ort.options import resolve, session_options

# What depends on the graph, and no option tells, or not alone.
OF_PROGRAM = {"parameter_gradients", "gradient_inputs", "disabled_passes", "region_writer"}
FIELDS = {name for name, made in vars(_C.SessionOptions).items() if isinstance(made, property)}


def fields_of(options: _C.SessionOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in FIELDS}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"verfy": True}, "session options: unknown option: got 'verfy', want one of reorder, in_"),
        ({"verify": 1}, "verify: got 1, want a bool"),
        ({"reorder": "yes"}, "reorder: got 'yes', want a bool"),
        ({"products": None}, "products: got None, want a bool"),
        ({"segment_bytes": 1.5}, "segment_bytes: got 1.5, want an integer"),
        ({"segment_bytes": 2**64}, "segment_bytes: got 18446744073709551616, want an integer"),
        ({"most_tuning_ms": "10"}, "most_tuning_ms: got '10', want a number"),
        ({"kernel_dump_dir": 3}, "kernel_dump_dir: got 3, want a string"),
        ({"gradient_inputs": [0, "x"]}, "gradient_inputs: got [0, 'x'], want a list of integers"),
        ({"region_mode": "fast"}, "region_mode: got 'fast', want one of kernel, checked, nodes"),
        ({"region_mode": 1}, "region_mode: got 1, want one of kernel, checked, nodes"),
        ({"isa": "sse9"}, "isa: got 'sse9', want one of portable"),
        ({"region_writer": "triton"}, "region_writer: got 'triton', want a function or None"),
        ({"disabled_passes": [1]}, "disabled_passes: got [1], want a list of strings"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_what_is_unknown_or_of_another_type_is_an_error(given: dict, words: str) -> None:
    with pytest.raises(UserError, match="^" + re.escape(words)):
        _C.SessionOptions(**given)


def test_each_field_is_given_and_read() -> None:
    other = {
        "reorder": False, "in_place": False, "place_parts": False, "products": False,
        "tune": True, "most_tuning_ms": 2.5, "search_convs": True, "cuda_graphs": True,
        "parameter_gradients": [0, 2],
        "gradient_inputs": [3, -1], "segment_bytes": 7, "verify": True, "synchronize": True,
        "isa": "portable", "emulate_eager_casts": True, "region_mode": "checked",
        "kernel_dump_dir": "there", "disabled_passes": ["fuse_regions"], "rows_by_labels": False,
        "rows_by_padding": False, "region_writer": print,
    }  # fmt: skip
    assert {*other} == FIELDS
    given = _C.SessionOptions(**other)
    assert {name: getattr(given, name) for name in other} == other
    plain = fields_of(_C.SessionOptions())
    assert all(plain[name] != value for name, value in other.items())
    assert _C.SessionOptions(most_tuning_ms=10).most_tuning_ms == 10
    with pytest.raises(AttributeError):
        given.verify = False
    assert all(getattr(_C.SessionOptions, name).__doc__ for name in FIELDS)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"disable": "reorder"}, {"reorder": False}),
        ({"disable": "in_place"}, {"in_place": False}),
        ({"disable": "place_parts"}, {"place_parts": False}),
        ({"disable": "products"}, {"products": False}),
        ({"disable": "region_kernels"}, {"region_mode": "nodes"}),
        ({"disable": "region_kernels", "check": 3},
         {"region_mode": "nodes", "verify": True, "synchronize": True}),
        ({"check": 1}, {"verify": True}),
        ({"check": 2}, {"verify": True, "synchronize": True}),
        ({"check": 3}, {"verify": True, "synchronize": True, "region_mode": "checked"}),
        ({"isa": "portable"}, {"isa": "portable"}),
        ({"emulate_eager_casts": True}, {"emulate_eager_casts": True}),
        ({"gradient_segment_bytes": 9}, {"segment_bytes": 9}),
        ({"enable_tuning": True}, {"tune": True}),
        ({"max_tuning_duration_ms": 8}, {"most_tuning_ms": 8}),
        ({"conv_algo_search": "EXHAUSTIVE"}, {"search_convs": True}),
        ({"cuda_graphs": True}, {"cuda_graphs": True}),
        ({"dump": "cuda", "dump_dir": "there"}, {"kernel_dump_dir": "there"}),
        ({"enable_label_sparse_optimizer": False}, {"rows_by_labels": False}),
        ({"enable_embedding_sparse_optimizer": False}, {"rows_by_padding": False}),
        ({"dump": "steps", "dump_dir": "there"}, {}),
        ({"use_triton": True}, {"rows_by_labels": False, "rows_by_padding": False}),
    ],
    ids=str,
)  # fmt: skip
def test_options_say_what_the_engine_is_told(given: dict, told: dict) -> None:
    plain, chosen = (fields_of(session_options(resolve(options))) for options in ({}, given))
    assert {name: value for name, value in chosen.items() if value != plain[name]} == told


def test_every_field_is_told_by_some_option(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {}
    monkeypatch.setattr(_C, "SessionOptions", lambda **fields: told.update(fields))
    session_options(resolve())
    assert {*told} == FIELDS - OF_PROGRAM
