"""Files with kernels that were chosen by timing, of matrix products and of attention on CUDA.

A file is a list of results, each of one machine, in the form that ONNX Runtime gives its files of
these names: `ep` is whose results they are, `validators` what has to be as it was, and `results`
the choices by operator. Only those of this machine are used; others stay as they are.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import platform
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torch_ort import _C, _build_info
from torch_ort._C import UserError
from torch_ort.core.user_code import calling_line, warn_at
from torch_ort.engine import attention

# The name of the file, by whether the graph has a backward.
FILES = {True: "tuning_results_training.json", False: "tuning_results_inference.json"}

_OURS = "torch_ort"
# Whether a kernel is the engine's own, by its name in files.
_KERNELS = {"torch": False, "torch_ort": True}
_CPUINFO = "/proc/cpuinfo"

_lock = threading.RLock()
_read: set[str] = set()  # folders
_written: dict[tuple[str, bool], int] = {}  # number of choices, by folder and kind of graph


class TuningWarning(UserWarning):
    """Results of a file are not used; the message says why."""


def read(folder: str) -> None:
    """Take in the choices that the files of a folder hold, the first time that it is named.

    Choices that the process has already stay. Results of other machines are left out, with a
    TuningWarning. Raises UserError for a file that holds no results, and OSError for one that
    cannot be read.
    """
    folder = os.path.abspath(folder)
    with _lock:
        if folder in _read:
            return
        for name in FILES.values():
            path = os.path.join(folder, name)
            found = _ours(path, _results_in(path), says_others=True)
            _C.load_kernel_choices(_choices(path, found) if found else {})
            attention.load_choices(_attentions(path, found) if found else {})
        _read.add(folder)


def write(folder: str, is_training: bool) -> None:
    """Add all choices of the process to the file of one kind of graphs, and to it again at the end.

    What the file holds stays: several processes may write into it. Raises as `read`.
    """
    with _lock:
        folder = os.path.abspath(folder)
        choices = {
            "Product": {text: _as_json(choice) for text, choice in _C.kernel_choices().items()},
            "Attention": {
                text: {"kernel": choice.kernel, "us": _rounded(choice.us)}
                for text, choice in attention.choices().items()
            },
        }
        count = sum(map(len, choices.values()))
        if count > _written.get((folder, is_training), 0):
            os.makedirs(folder, exist_ok=True)
            _add(os.path.join(folder, FILES[is_training]), choices)
        _written[folder, is_training] = count


@atexit.register
def write_again() -> None:
    """Write what has been measured since into all files that were written."""
    for folder, is_training in list(_written):
        write(folder, is_training)


def forget() -> None:
    """Begin anew as a process does that has measured and read nothing; for tests."""
    with _lock:
        _read.clear()
        _written.clear()
        _C.forget_kernel_choices()
        attention.forget_choices()


def machine() -> dict[str, str]:
    """Describe what choices depend on besides what their own text says.

    That of a product has the instruction set and the number of threads, that of attention the GPU.
    """
    return {
        "torch_ort": _build_info.VERSION,
        "torch": torch.__version__,
        "processor": _processor(),
        "instruction sets": ", ".join(_C.isa_names()),
    }


def _processor() -> str:
    try:
        with open(_CPUINFO, encoding="utf-8") as file:
            lines = file.read().partition("\n\n")[0].splitlines()
    except OSError:  # the system is not Linux
        return platform.processor() or platform.machine()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = ("model name", "cpu family", "model", "stepping")
    return ", ".join(f"{name} {said[name]}" for name in names if name in said)


def _add(path: str, choices: Mapping[str, Mapping[str, Any]]) -> None:
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        results = _results_in(path)
        found = _ours(path, results)
        if found is None:
            found = {"ep": _OURS, "validators": machine(), "results": {"Product": {}}}
            results.append(found)
        is_changed = False
        for operator, chosen in choices.items():
            there = found["results"].get(operator, {})
            if chosen.keys() - there.keys():
                found["results"][operator] = {**chosen, **there}
                is_changed = True
        if is_changed:
            _replace(path, json.dumps(results, indent=2) + "\n")


def _as_json(choice: _C.KernelChoice) -> dict[str, Any]:
    return {
        "kernel": "torch_ort" if choice.is_own else "torch",
        "torch_us": round(choice.torch_us, 3),
        "torch_ort_us": round(choice.own_us, 3),
    }


def _rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(us, 3) for name, us in times.items()}


def _replace(path: str, text: str) -> None:
    """Replace a file atomically: concurrent readers see the old one. The caller holds its lock."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.new", path)


def _results_in(path: str) -> list[dict[str, Any]]:
    """Give the results in a file; none where there is no file."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return []
    try:
        results = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"no JSON: {error}") from None
    if not isinstance(results, list) or not all(_is_result(each) for each in results):
        raise _wrong(path, "want a list of objects with ep, validators and results")
    return results


def _is_result(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("ep"), str)
        and isinstance(value.get("validators"), dict)
        and isinstance(value.get("results"), dict)
    )


def _ours(
    path: str, results: list[dict[str, Any]], says_others: bool = False
) -> dict[str, Any] | None:
    """Give the results of this machine, after a look at their form; None where there are none."""
    found, here = None, machine()
    for each in results:
        if each["ep"] == _OURS and each["validators"] == here:
            if found is not None:
                raise _wrong(path, "two results of this machine")
            _choices(path, each)
            _attentions(path, each)
            found = each
        elif says_others:
            warn_at(
                calling_line(),
                f"torch_ort: {path}: results are not used: {_difference(each, here)}",
                TuningWarning,
            )
    return found


def _difference(result: dict[str, Any], here: dict[str, str]) -> str:
    if result["ep"] != _OURS:
        return f"ep: got {result['ep']!r}, want {_OURS!r}"
    there = result["validators"]
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return "; ".join(f"{name}: got {there.get(name)!r}, want {here.get(name)!r}" for name in names)


def _choices(path: str, result: dict[str, Any]) -> dict[str, _C.KernelChoice]:
    """Read the results for products. Raises UserError where they are no choices."""
    products = result["results"].get("Product")
    if not isinstance(products, dict) or result["results"].keys() - {"Product", "Attention"}:
        raise _wrong(
            path, "results: want an object 'Product', perhaps one 'Attention', and nothing else"
        )
    choices = {}
    for product, choice in products.items():
        if not isinstance(choice, dict) or choice.keys() != {"kernel", "torch_us", "torch_ort_us"}:
            raise _wrong(path, f"{product!r}: got {choice!r}, want kernel, torch_us, torch_ort_us")
        kernel, times = choice["kernel"], (choice["torch_ort_us"], choice["torch_us"])
        if not isinstance(kernel, str) or kernel not in _KERNELS:
            raise _wrong(path, f"{product!r}: kernel: got {kernel!r}, want torch or torch_ort")
        _check_times(path, product, times)
        choices[product] = _C.KernelChoice(_KERNELS[kernel], *times)
    return choices


def _attentions(path: str, result: dict[str, Any]) -> dict[str, attention.Choice]:
    """Read the results for attention. Raises UserError where they are no choices."""
    found = result["results"].get("Attention", {})
    if not isinstance(found, dict):
        raise _wrong(path, "results: want an object 'Attention'")
    choices = {}
    for call, choice in found.items():
        if not isinstance(choice, dict) or choice.keys() != {"kernel", "us"}:
            raise _wrong(path, f"{call!r}: got {choice!r}, want kernel, us")
        kernel, times = choice["kernel"], choice["us"]
        names = [kernel, *times] if isinstance(times, dict) else [kernel]
        for name in names:
            if name not in attention.KERNEL_NAMES:
                raise _wrong(
                    path, f"{call!r}: kernel: got {name!r}, want cudnn, efficient or flash"
                )
        if not isinstance(times, dict):
            raise _wrong(path, f"{call!r}: got {times!r}, want microseconds by kernel")
        _check_times(path, call, times.values())
        choices[call] = attention.Choice(kernel, times)
    return choices


def _check_times(path: str, call: str, times: Iterable[Any]) -> None:
    for time in times:
        if isinstance(time, bool) or not isinstance(time, int | float) or not time >= 0:
            raise _wrong(path, f"{call!r}: got {time!r}, want microseconds")


def _wrong(path: str, what: str) -> UserError:
    return UserError(
        f"tuning_results_path: {path}: {what}; delete the file, or name another folder"
    )
