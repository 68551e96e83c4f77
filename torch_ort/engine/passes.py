"""Which passes run on a graph, as options say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_ort import _C
from torch_ort.core.switches import OTHER_SWITCHES
from torch_ort.options import session_options

if TYPE_CHECKING:
    from torch_ort.options import Options


def disabled_passes(options: Options) -> list[str]:
    """List the passes that options switch off, by name or because they do not go with one."""
    names = [name for name in options.disable if name not in OTHER_SWITCHES]
    asked = session_options(options)
    return names + [each.name for each in _C.passes() if not _goes_with(each, options, asked)]


def _goes_with(each: _C.Pass, options: Options, asked: _C.SessionOptions) -> bool:
    """Tell whether a pass may run under all options but `disable`."""
    if each.not_with is not None and getattr(options, each.not_with):
        return False
    if each.only_under is not None and not getattr(options, each.only_under):
        return False
    if each.needs_products and not asked.products:
        return False
    return not each.needs_region_kernels or asked.region_mode == "kernel"


def disabled_in_files(options: Options) -> list[str]:
    """List the passes that a graph does not see which other programs read."""
    written = [each.name for each in _C.passes() if each.writes_engine_ops]
    return [*disabled_passes(options), *written]


def asked_of_passes(options: Options) -> dict[str, Any]:
    """Give what options say to passes that run: keyword arguments of `_C.run_pipeline`."""
    asked = session_options(options)
    return {
        "row_sources": _C.RowSources(labels=asked.rows_by_labels, padding=asked.rows_by_padding),
        "communication": _C.Communication(
            options.collective_latency_us, options.collective_bytes_per_second
        ),
    }
