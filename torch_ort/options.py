"""Every option: tables of what compiles graphs, of what ORTModule adds to it, and of the process.

The only reader of the environment. `torch.compile(..., options={...})` wins over the environment,
which wins over the default. `python -m torch_ort.options` prints the tables, which are
`docs/options.md`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass, replace
from typing import Any

from torch_ort import _C
from torch_ort._C import UserError
from torch_ort.core.clusters import (
    check_clusters,
    check_probe_config,
    check_probe_level,
    recomputes_by_name,
)
from torch_ort.core.log_level import LogLevel
from torch_ort.core.policy import (
    DEFAULT_POLICY,
    FallbackPolicy,
    ORTModuleONNXModelException,
)
from torch_ort.core.switches import OTHER_SWITCHES, OWN_KERNELS, with_own_kernels
from torch_ort.core.words import listed

NEWEST_OPSET = 28
OLDEST_OPSET = 12
DUMP_KINDS = ("ir", "passes", "plan", "steps", "cuda")
CONV_SEARCHES = ("HEURISTIC", "EXHAUSTIVE")
# The modes of torch.compile, with the reason if a mode changes nothing.
_NOT_MEASURED = "kernels are chosen by measuring where ORTMODULE_ENABLE_TUNING=1 asks for it"
MODES = {
    "default": "",
    "reduce-overhead": "",  # the option cuda_graphs
    "max-autotune": _NOT_MEASURED,
    "max-autotune-no-cudagraphs": _NOT_MEASURED,
}


@dataclass(frozen=True)
class Row:
    """One option. `parse` reads text, `check` takes any value; both raise ValueError or KeyError.

    An option that is `never_needed` for a reason is accepted and ignored, and one of which
    `is_for_both` is False is ignored by `torch.compile`; whoever sets one is told so once.
    """

    name: str
    variable: str
    default: Any
    kind: str
    doc: str
    parse: Callable[[str], Any]
    check: Callable[[Any], Any]
    never_needed: str = ""
    is_for_both: bool = True


class UnknownName(UserError, KeyError):
    """A name that an option does not know."""

    def __str__(self) -> str:
        return str(self.args[0])


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "on", "yes"):
        return True
    if text.lower() in ("", "0", "false", "off", "no"):
        return False
    raise ValueError("want 0 or 1")


def _check_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("want a bool")


def _check_int(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise ValueError(f"want an integer from {low} to {high}")

    return check


def _check_str(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("want a string")


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check_names(allowed: Callable[[], tuple[str, ...]]) -> Callable[[Any], tuple[str, ...]]:
    def check(value: Any) -> tuple[str, ...]:
        names = _parse_names(value) if isinstance(value, str) else tuple(value)
        for name in names:
            if name not in allowed():
                near = difflib.get_close_matches(name, allowed(), 3, 0.4) or allowed()
                raise ValueError(f"want one of {', '.join(near)}; '{name}' is not known")
        return names

    return check


def _pass_names() -> tuple[str, ...]:
    return (*_C.pass_names(), *OTHER_SWITCHES)


def _check_disabled(value: Any) -> tuple[str, ...]:
    return with_own_kernels(_check_names(_pass_names)(value))


def _check_search(value: Any) -> str:
    name = _check_str(value).upper()
    if name not in CONV_SEARCHES:
        raise ValueError(f"want {' or '.join(CONV_SEARCHES)}")
    return name


def _parse_budget(text: str) -> int | float:
    return int(text) if text.strip().isdigit() else float(text)


def _check_budget(value: Any) -> int | float:
    is_bytes = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if is_bytes or (isinstance(value, float) and 0 < value <= 1):
        return value
    raise ValueError("want bytes as an integer, or a fraction above 0.0 and up to 1.0")


def _check_isa(value: Any) -> str:
    names = _C.isa_names()
    if value not in ("", *names):
        raise ValueError(f"want one of {', '.join(names)}, or nothing")
    return value


def _parse_flag(text: str) -> bool:
    """Read a flag as ONNX Runtime Training does: 1 is on, any other integer off."""
    return int(text) == 1


def _flag(name: str, default: bool, doc: str, **others: Any) -> Row:
    variable = f"ORTMODULE_{name.upper()}"
    return Row(name, variable, default, "flag", doc, _parse_flag, _check_bool, **others)


TABLE: tuple[Row, ...] = (
    Row("strict", "TORCH_ORT_STRICT", False, "bool",
         "Raise an error where the engine would otherwise fall back to eager PyTorch.",
         _parse_bool, _check_bool),
    Row("exact_random", "TORCH_ORT_EXACT_RANDOM", False, "bool",
         "Draw dropout masks from the same random stream as eager PyTorch, so that they are the "
         "same masks; on CUDA eager's own kernel for dropout draws them. False: the masks are "
         "computed inside fused regions and the engine's attention, from one draw per step. "
         "Either way `torch.manual_seed` makes a run repeatable.",
         _parse_bool, _check_bool),
    Row("emulate_eager_casts", "TORCH_ORT_EMULATE_EAGER_CASTS", False, "bool",
         "Round every bfloat16 and float16 value inside fused regions as eager PyTorch does. "
         "False: regions compute in float32 and round only the values that leave them, and a cast "
         "of a program's own to a shorter dtype and back, as in `x.half().float()`, may be left "
         "out, as by inductor. That is closer to the exact result, but a program that wants to see "
         "the rounded number, or its overflow, needs True. Files of `export_onnx` keep all casts.",
         _parse_bool, _check_bool),
    Row("save_onnx", "ORTMODULE_SAVE_ONNX", False, "bool",
         "Write each compiled graph to `<onnx_prefix>_<number>_captured.onnx` and "
         "`<onnx_prefix>_<number>_optimized.onnx`.",
         _parse_bool, _check_bool),
    Row("onnx_prefix", "ORTMODULE_SAVE_ONNX_PREFIX", "torch_ort", "path",
         "Start of the file names that `save_onnx` writes. It may contain a folder, which must "
         "exist.",
         str, _check_str),
    Row("opset", "ORTMODULE_ONNX_OPSET_VERSION", NEWEST_OPSET, "int",
         "Newest opset of standard ONNX whose operators may be used. A file names the lowest "
         "opset that contains all of its operators.",
         int, _check_int(OLDEST_OPSET, NEWEST_OPSET)),
    Row("dump", "TORCH_ORT_DUMP", (), "names",
         f"Which internal representations to write into `dump_dir`: {', '.join(DUMP_KINDS)}.",
         _parse_names, _check_names(lambda: DUMP_KINDS)),
    Row("dump_dir", "TORCH_ORT_DUMP_DIR", "torch_ort_dump", "path",
         "Folder of the dumps. It is created when the first file is written.",
         str, _check_str),
    Row("disable", "TORCH_ORT_DISABLE", (), "names",
         "Passes to skip, by name. Further names switch off other parts of the engine: `reorder`, "
         "`in_place`, `place_parts` and `deliver_gradients` are parts of the memory plan; without "
         "`region_kernels` the nodes of a fused region run one by one; without `products` PyTorch "
         "computes all matrix products; without `choose_attention` PyTorch chooses the kernel of "
         "attention on CUDA whatever was measured; without `recorder` AOTAutograd captures all "
         "graphs. "
         "`own_kernels` stands for everything that rounds at other places than eager PyTorch "
         f"({listed([f'`{name}`' for name in OWN_KERNELS])}).",
         _parse_names, _check_disabled),
    Row("isa", "TORCH_ORT_ISA", "", "name",
         "Instruction set of the fused regions on the CPU: portable, avx2, avx512 or neon. Empty: "
         "the widest one that the processor supports.",
         str, _check_isa),
    Row("memory_budget", "TORCH_ORT_MEMORY_BUDGET", 0, "bytes or fraction",
         "Limit on what a training graph may hold for backward, from the end of forward to the "
         "end of backward: bytes (an integer), or a fraction (a float up to 1.0) of what it holds "
         "without a budget. To keep within it, the engine recomputes in backward what is cheapest "
         "to recompute, with the same values. A budget that cannot be met is an error that names "
         "the smallest possible one. 0: no budget. See [memory.md](memory.md).",
         _parse_budget, _check_budget),
    _flag("enable_compute_optimizer", True,
          "If off, graphs give the same bits as eager PyTorch. This implies `own_kernels` in "
          "`disable`, `exact_random` and `emulate_eager_casts`, and wins over the values given "
          "for them."),
    _flag("enable_sparse_optimizer", True,
          "Skip rows whose values nothing reads, such as padding: the pass `row_sparsity` "
          "([rows.md](rows.md)). If off, the two following options are off as well."),
    _flag("enable_label_sparse_optimizer", True,
          "Let labels decide which rows are needed: rows whose label the loss ignores are "
          "skipped."),
    _flag("enable_embedding_sparse_optimizer", True,
          "Let padding decide which rows are needed: rows of keys that the attention mask hides "
          "are skipped. ONNX Runtime Training had this off by default, because its user had to "
          "know that nothing reads a padded position. Here the pass proves it."),
    _flag("print_input_density", False,
          "Print, in a table for every ten inputs, which share of the tokens is not padding and "
          "which share of the labels is not ignored ([rows.md](rows.md))."),
    Row("memory_opt_level", "ORTMODULE_MEMORY_OPT_LEVEL", 0, "int",
         "Recompute activations in backward, with the same values, by level. 0: recompute what "
         "`memory_opt_config` lists. 1: of each transformer layer, recompute all that backward "
         "reads from the input of the layer. 2: as 1, but save a smaller intermediate value of "
         "the layer where that avoids saving a larger one. Cannot be combined with "
         "`memory_budget`. See [memory.md](memory.md).",
         int, _check_int(0, 2)),
    Row("memory_opt_config", "ORTMODULE_MEMORY_OPT_CONFIG", (), "clusters",
         "What level 0 recomputes: entries `<Op+Op+>:<type>:<count>` separated by commas, or the "
         "path of a JSON file with a list of them. The log at level INFO lists the possible "
         "entries and what each saves. Type 0: do not recompute; 1: recompute; 2: recompute, also "
         "where a smaller value has to be saved for it. Count: apply the entry to the first so "
         "many occurrences; -1: to all. If several entries name one cluster, the last one counts. "
         "Entries that match nothing have no effect.",
         str, check_clusters),
    Row("memory_opt_probe_recompute_level", "ORTMODULE_MEMORY_OPT_PROBE_RECOMPUTE_LEVEL", "1",
         "name",
         "Which operators the clusters offered for recomputation may contain. 0: views, random "
         "draws and point-wise operations; 1: also matrix products, norms, softmax and attention.",
         str, check_probe_level),
    Row("memory_opt_probe_config", "ORTMODULE_MEMORY_OPT_PROBE_CONFIG", "1:0", "name",
         "`<level>:<layers>`. The level is that of `memory_opt_probe_recompute_level`, over which "
         "it wins unless this option is `1:0`. The second number is 1 to save the inputs of "
         "transformer layers under `memory_opt_level` 0 too.",
         str, check_probe_config),
    Row("enable_tuning", "ORTMODULE_ENABLE_TUNING", False, "bool",
         "Time PyTorch's and the engine's kernel for each kind of matrix product on the CPU when "
         "it first occurs, and use the faster one in the whole process from then on. On CUDA, time "
         "those of PyTorch's kernels for attention (flash, cuDNN, memory-efficient) that can run a "
         "call and are allowed, when a call of its kind is first captured. This is not done for "
         "dropout under `exact_random`, and not under `torch.use_deterministic_algorithms`. "
         "False: sizes, dtype and processor decide, so that runs repeat bit for bit.",
         _parse_bool, _check_bool),
    Row("max_tuning_duration_ms", "ORTMODULE_MAX_TUNING_DURATION_MS", 0, "int",
         "Milliseconds for which one kind of product or attention may be timed; each kernel runs "
         "at least once. 0: until the fastest times of all kernels no longer change, which takes "
         "about 30 ms, or six runs of each kernel where they take long.",
         int, _check_int(0, 2**31 - 1)),
    Row("tuning_results_path", "ORTMODULE_TUNING_RESULTS_PATH", "", "path",
         "Folder of `tuning_results_training.json` and `tuning_results_inference.json`. Choices "
         "that were made on the same processor, with the same versions and the same number of "
         "threads, for attention on the same kind of GPU, are read from both files, whether tuning "
         "is on or off. With tuning on, all "
         "choices of the process are added to the file of their kind, after the first run of a "
         "graph and at exit. Empty: no files.",
         str, _check_str),
    Row("use_triton", "ORTMODULE_USE_TRITON", False, "bool",
         "Have Triton compile the fused regions of a graph, in place of the engine's own kernels. "
         "This needs the package `triton`, and on the CPU its interpreter (`TRITON_INTERPRET=1`), "
         "which is slow and meant for tests. A region that Triton does not compile gets the "
         "engine's kernel, and one line says so.",
         _parse_bool, _check_bool),
    Row("triton_config_file", "ORTMODULE_TRITON_CONFIG_FILE", "", "path",
         "A JSON file that says which operators Triton gets, with the keys of ONNX Runtime "
         "Training: `ops` (`versions`, `domain`, `conditions`, `is_no_op`, `ignore_min_nodes`), "
         "`initializer` and `min_nodes`. A region is Triton's if all of its nodes are. Empty: all "
         "regions are.",
         str, _check_str),
    Row("triton_debug", "ORTMODULE_TRITON_DEBUG", False, "bool",
         "Write each region that Triton compiles into the folder `triton_debug` of the working "
         "directory: the sub-graph as an ONNX file, what is computed in each pass over its "
         "columns, and the source of the kernel.",
         _parse_bool, _check_bool),
    Row("conv_algo_search", "ORTMODULE_CONV_ALGO_SEARCH", "HEURISTIC", "name",
         "How cuDNN chooses the algorithm of a convolution on CUDA. HEURISTIC: as "
         "`torch.backends.cudnn.benchmark` says, which is by a guess unless somebody has set it. "
         "EXHAUSTIVE: it times its algorithms when sizes first occur, which takes some tenths of a "
         "second for each, and uses the fastest one in the whole process from then on.",
         str, _check_search),
    Row("cuda_graphs", "TORCH_ORT_CUDA_GRAPHS", False, "bool",
         "Run forward and backward on CUDA as CUDA graphs, which the host queues in one call each. "
         "The mode `reduce-overhead` of `torch.compile` does the same. Memory of these graphs is "
         "not given back between calls. A call that does not fit a graph runs without one: see "
         "[gpu.md](gpu.md#cuda-graphs). On the CPU it does nothing.",
         _parse_bool, _check_bool),
    Row("early_gradients", "TORCH_ORT_EARLY_GRADIENTS", False, "bool",
         "Hand out parameter gradients while backward is still running, whenever "
         "`gradient_segment_bytes` of them are ready. False: do so only where a parameter has a "
         "hook (of DistributedDataParallel, or of an optimizer that steps in backward); elsewhere "
         "gradients are handed out at the end of backward.",
         _parse_bool, _check_bool),
    Row("gradient_segment_bytes", "TORCH_ORT_GRADIENT_SEGMENT_BYTES", 25 << 20, "int",
         "Bytes of gradients that are handed out together where they leave early. The first "
         "segment has at most 1 MiB, like the first bucket of DistributedDataParallel. 0: all "
         "gradients are handed out at the end.",
         int, _check_int(0, 2**62)),
    Row("collective_latency_us", "TORCH_ORT_COLLECTIVE_LATENCY_US", 0, "int",
         "What communication between the ranks of a graph takes that moves nothing, in "
         "microseconds. It says, with the next option, how much work is put between the start of a "
         "collective and the wait for it, and what gathering once more for `memory_budget` costs. "
         "Set both alike on all ranks. 0: 100 on the CPU, 20 on CUDA. See "
         "[distributed.md](distributed.md#parameters-and-gradients-in-the-graph).",
         int, _check_int(0, 10**9)),
    Row("collective_bytes_per_second", "TORCH_ORT_COLLECTIVE_BYTES_PER_SECOND", 0, "int",
         "The bytes of the larger of operand and result that a collective moves in a second. 0: "
         "10**9 on the CPU, as gloo does between processes of one machine, and 2 * 10**11 on CUDA.",
         int, _check_int(0, 2**62)),
    Row("lazy_logits", "TORCH_ORT_LAZY_LOGITS", False, "bool",
         "Do not compute in the step the logits that a model returns beside a loss that is "
         "computed in chunks. They are computed when they are first read, from the input, the "
         "weight and the bias of the last layer. Reading them raises an error if one of these was "
         "modified in place since, as by an optimizer's step. The returned logits are a subclass "
         "of torch.Tensor. See [transformers.md](transformers.md).",
         _parse_bool, _check_bool),
    Row("bisect", "TORCH_ORT_BISECT", -1, "int",
         "Apply only the first n rewrites of the passes in each graph. -1: apply all.",
         int, _check_int(-1, 2**31 - 1)),
    Row("check", "TORCH_ORT_CHECK", 0, "int",
         "How much the engine verifies. 0: nothing. 1: the captured and the final graph and every "
         "memory plan, and memory is filled with garbage before results are written into it. 2: "
         "also the graph after each pass; on a GPU the host waits for each kernel call, so that "
         "an error names it. 3: also each fused region against its nodes run one by one; the "
         "first difference raises an error. Higher levels are slow.",
         int, _check_int(0, 3)),
)  # fmt: skip


def _parse_truth(text: str) -> bool:
    return text.lower() in ("1", "true", "yes")


def _check_policy(value: Any) -> Any:
    """Take a FallbackPolicy, the name of one, or a list of names."""
    if isinstance(value, FallbackPolicy):
        return value
    names = [value] if isinstance(value, str) else list(value)
    policy = FallbackPolicy(0)
    for name in names:
        policy |= _member(FallbackPolicy, name)
    return policy


def _default_policy() -> Any:
    return DEFAULT_POLICY


def _check_level(value: Any) -> Any:
    return value if isinstance(value, LogLevel) else _member(LogLevel, value)


def _default_level() -> Any:
    return LogLevel.WARNING


def _member(kind: Any, name: Any) -> Any:
    if name not in kind.__members__:
        raise KeyError(f"want one of {', '.join(kind.__members__)}")
    return kind[name]


SKIP_CHECKS = (
    "SKIP_CHECK_DISABLED", "SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT",
    "SKIP_CHECK_EXECUTION_AGENT",
)  # fmt: skip


def _check_skip_checks(value: Any) -> tuple[str, ...]:
    names = tuple(value.split("|")) if isinstance(value, str) else tuple(value)
    for name in names:
        if name not in SKIP_CHECKS:
            raise KeyError(f"want one of {', '.join(SKIP_CHECKS)}, with | between them")
    return names


def _text(name: str, doc: str, default: str = "", **others: Any) -> Row:
    variable = f"ORTMODULE_{name.upper()}"
    return Row(name, variable, default, "text", doc, str, _check_str, **others)


ORTMODULE_TABLE: tuple[Row, ...] = (
    Row("fallback_policy", "ORTMODULE_FALLBACK_POLICY", _default_policy, "name",
         "Which failures make a module run in plain PyTorch instead of raising an exception: "
         "FALLBACK_DISABLE (none), FALLBACK_FORCE_TORCH_FORWARD, FALLBACK_FORCE_TORCH_BACKWARD, "
         "FALLBACK_UNSUPPORTED_DEVICE, FALLBACK_UNSUPPORTED_DATA, "
         "FALLBACK_UNSUPPORTED_TORCH_MODEL, FALLBACK_UNSUPPORTED_ONNX_MODEL or "
         "FALLBACK_BAD_INITIALIZATION. The default is the four UNSUPPORTED ones.",
         str, _check_policy),
    Row("fallback_retry", "ORTMODULE_FALLBACK_RETRY", False, "bool",
         "Try the engine again at every call after a failure, instead of staying with PyTorch. "
         "Under torch.compile this holds for graphs that failed while running; what could not be "
         "captured stays in PyTorch.",
         _parse_truth, _check_bool),
    Row("log_level", "ORTMODULE_LOG_LEVEL", _default_level, "name",
         "VERBOSE, DEVINFO, INFO, WARNING, ERROR or FATAL. Wins over DebugOptions.",
         str, _check_level),
    Row("save_onnx_path", "ORTMODULE_SAVE_ONNX_PATH", "", "path",
         "Folder of the files of DebugOptions(save_onnx=True), which wins over its save_path, and "
         "of the files of ORTMODULE_SAVE_ONNX. Empty: the current folder.",
         str, _check_str),
    Row("json_config_path", "ORTMODULE_JSON_CONFIG_PATH", "", "path",
         "File that `load_from_json` reads. Affects ORTModule only.",
         str, _check_str, is_for_both=False),
    Row("skipcheck_policy", "ORTMODULE_SKIPCHECK_POLICY", SKIP_CHECKS[1:], "names",
         "Checks that may be skipped after the first step.",
         str, _check_skip_checks,
         never_needed="all checks of a call take microseconds and none is skipped, so that no "
         "change goes unnoticed"),
    _flag("deepcopy_before_model_export", True,
          "Copy the module before it is captured.",
          never_needed="capture does not change the module"),
    _flag("allow_autograd_checkpoint", False,
          "Allow torch.utils.checkpoint in the module.",
          never_needed="torch.utils.checkpoint is captured, and its recomputation is kept"),
    _flag("enable_custom_autograd", True,
          "Make each torch.autograd.Function one node, a PythonOp, which calls the Function's own "
          "forward and backward. If off, Functions are traced through, and keep their own "
          "backward. Under torch.compile, Dynamo always traces through them, except for Functions "
          "that torch_ort.python_op wraps.", is_for_both=False),
    _flag("disable_custom_autograd_support", False,
          "Older name for the opposite of enable_custom_autograd.", is_for_both=False),
    _text("skipped_autograd_functions",
          "Full names, separated by commas, of Functions that do not become PythonOps but are "
          "traced through.", is_for_both=False),
    _flag("print_memory_stats", False,
          "Print the memory in use after each phase of a step, for steps 0 to 9 and then for "
          "steps that are powers of two. Affects ORTModule only.", is_for_both=False),
    _text("cache_dir",
          "Keep captured graphs between runs.",
          never_needed="a capture takes tenths of a second and always reflects the code as it is "
          "now"),
    _flag("enable_mem_efficient_grad_mgmt", False,
          "Hand out gradients while backward is still running, whether or not a hook waits for "
          "them. Sets the option `early_gradients`."),
    _flag("enable_zero_stage3", False,
          "Let stage 3 of DeepSpeed's ZeRO gather each block of the module as a whole, so that "
          "the block runs as one graph. If off, each module inside of it is a graph of its own. "
          "Affects ORTModule only.", is_for_both=False),
    _flag("use_efficient_attention", False,
          "Use memory-efficient attention.",
          never_needed="attention runs in fused kernels in any case"),
    _text("aten_sdpa_fallback",
          "Export attention as an ATen operator.",
          never_needed="attention is one node in any case"),
    _flag("use_flash_attention", False,
          "Use Triton's flash attention.",
          never_needed="attention on a GPU runs in PyTorch's flash, cuDNN or memory-efficient "
          "kernel, and ORTMODULE_ENABLE_TUNING=1 takes the fastest one"),
)  # fmt: skip

# These are read from the environment only, and once in a process.
PROCESS_TABLE: tuple[Row, ...] = (
    Row("libcuda", "TORCH_ORT_LIBCUDA", "", "path",
         "Path of the CUDA driver's library. Empty: `libcuda.so.1`, found as the system finds "
         "libraries.",
         str, _check_str),
    Row("nvrtc", "TORCH_ORT_NVRTC", "", "path",
         "Path of NVRTC, CUDA's run-time compiler. It must be version 12 or later and no newer "
         "than the driver. Empty: the one that PyTorch has loaded or brings in its packages, "
         "otherwise the system's.",
         str, _check_str),
    Row("kernel_cache_dir", "TORCH_ORT_KERNEL_CACHE_DIR", "", "path",
         "Folder in which compiled CUDA kernels are kept for later processes. Several processes "
         "may share it. Files that another user could have written are not read. Empty: "
         "`torch_ort/kernels` in `XDG_CACHE_HOME`, or in `~/.cache`.",
         str, _check_str),
    Row("kernel_cache_bytes", "TORCH_ORT_KERNEL_CACHE_BYTES", 256 << 20, "int",
         "Limit on the total size in bytes of the kept kernels; the least recently used ones are "
         "deleted first. 0: keep none.",
         int, _check_int(0, 2**62)),
)  # fmt: skip

_BY_NAME = {row.name: row for row in TABLE}
_ORTMODULE_BY_NAME = {row.name: row for row in ORTMODULE_TABLE}

Options = make_dataclass(
    "Options", [(row.name, Any, row.default) for row in TABLE], frozen=True,
    namespace={"__doc__": "One value for each row of TABLE."},
)  # fmt: skip

ProcessOptions = make_dataclass(
    "ProcessOptions", [(row.name, Any, row.default) for row in PROCESS_TABLE], frozen=True,
    namespace={"__doc__": "One value for each row of PROCESS_TABLE."},
)  # fmt: skip

ORTModuleOptions = make_dataclass(
    "ORTModuleOptions", [*((row.name, Any) for row in ORTMODULE_TABLE), ("given", frozenset)],
    frozen=True,
    namespace={"__doc__": "One value for each row of ORTMODULE_TABLE; which somebody has `given`."},
)  # fmt: skip


def resolve(given: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
    """Give the options in force.

    Raises UserError on an unknown option or mode (naming near matches), on a value of the
    wrong kind, and on options that do not go together.
    """
    if mode is not None and mode not in [*MODES]:  # a list, as the mode may have no hash
        names = ", ".join(MODES)
        raise UserError(f"mode: got {mode!r}, want one of {names}{near(mode, [*MODES])}")
    values = _from_environment(TABLE)
    for name, value in (given or {}).items():
        if name not in _BY_NAME:
            names = sorted(_BY_NAME)
            raise UserError(
                f"options: unknown option: got {name!r}, want one of {', '.join(names)}"
                f"{near(name, names)}"
            )
        values[name] = _checked(_BY_NAME[name], name, value)
    if mode == "reduce-overhead" and "cuda_graphs" not in (given or {}):
        values["cuda_graphs"] = True
    options = Options(**values)
    if options.memory_budget and recomputes_by_name(options):
        raise UserError(
            "options: memory_budget: got a budget and memory_opt_level or memory_opt_config, want "
            "one of them: a budget chooses by itself what is made again"
        )
    return _as_eager(options)


def session_options(options: Options, **of_program: Any) -> _C.SessionOptions:
    """Give what the engine is told of the options when it compiles a graph and runs it.

    `of_program` are the fields that depend on the graph.
    """
    return _C.SessionOptions(
        reorder="reorder" not in options.disable,
        in_place="in_place" not in options.disable,
        place_parts="place_parts" not in options.disable,
        products="products" not in options.disable,
        region_mode=_region_mode(options),
        verify=options.check >= 1,
        synchronize=options.check >= 2,
        isa=options.isa,
        emulate_eager_casts=options.emulate_eager_casts,
        segment_bytes=options.gradient_segment_bytes,
        tune=options.enable_tuning,
        most_tuning_ms=options.max_tuning_duration_ms,
        search_convs=options.conv_algo_search == "EXHAUSTIVE",
        cuda_graphs=options.cuda_graphs,
        # Kernels of Triton take no lists of rows.
        rows_by_labels=options.enable_label_sparse_optimizer and not options.use_triton,
        rows_by_padding=options.enable_embedding_sparse_optimizer and not options.use_triton,
        kernel_dump_dir=options.dump_dir if "cuda" in options.dump else "",
        **of_program,
    )


def _region_mode(options: Options) -> str:
    if "region_kernels" in options.disable:
        return "nodes"
    return "checked" if options.check >= 3 else "kernel"


def _as_eager(options: Options) -> Options:
    """Switch off all that has other bits than eager PyTorch, if nothing is to be optimized."""
    if options.enable_compute_optimizer:
        return options
    disabled = with_own_kernels((*options.disable, "own_kernels"))
    return replace(options, disable=disabled, exact_random=True, emulate_eager_casts=True)


def resolve_ortmodule(
    given: Mapping[str, Any] | None = None, environment_wins: bool = False
) -> Any:
    """Give the options of an ORTModule in force; the environment may win over what is given.

    Raises UserError, which is a ValueError, on a value of the wrong kind, and UnknownName, which is
    a KeyError too, on a name that an option does not know.
    """
    values = {row.name: row.default() if callable(row.default) else row.default
              for row in ORTMODULE_TABLE}  # fmt: skip
    read = _from_environment(ORTMODULE_TABLE)
    if not environment_wins:
        values |= read
    for name, value in (given or {}).items():
        values[name] = _checked(_ORTMODULE_BY_NAME[name], name, value)
    if environment_wins:
        values |= read
    return ORTModuleOptions(**values, given=frozenset({*read, *(given or {})}))


def resolve_process() -> ProcessOptions:
    """Give the options of the process; the folder of kernels is empty if there is no place for one.

    Raises UserError on a value of the wrong kind.
    """
    found = ProcessOptions(**_from_environment(PROCESS_TABLE))
    if found.kernel_cache_dir:
        return replace(found, kernel_cache_dir=os.path.abspath(found.kernel_cache_dir))
    caches = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification requires absolute paths, and that others are ignored.
    caches = caches if os.path.isabs(caches) else os.path.expanduser("~/.cache")
    folder = os.path.join(caches, "torch_ort", "kernels") if os.path.isabs(caches) else ""
    return replace(found, kernel_cache_dir=folder)


def log_level(name: str) -> Any:
    """Read a level by its name. Raises UnknownName."""
    return _checked(_ORTMODULE_BY_NAME["log_level"], "log_level", name)


def split(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part options by name into those of graphs and those of ORTModule.

    Raises UserError on an unknown name, with near matches.
    """
    names = sorted({*_BY_NAME, *_ORTMODULE_BY_NAME})
    for name in config:
        if name not in names:
            raise UserError(f"options: unknown option: got {name!r}{near(name, names)}")
    return (
        {name: value for name, value in config.items() if name in _BY_NAME},
        {name: value for name, value in config.items() if name in _ORTMODULE_BY_NAME},
    )


def resolve_compiled(
    given: Mapping[str, Any] | None = None, mode: str | None = None
) -> tuple[Options, Any]:
    """Give the options of `torch.compile` in force, and the switches of the environment.

    What is given wins over the switches: nothing may run in eager PyTorch if the fallback policy
    does not let a graph do so, and files go into the folder that a switch names.
    Raises UserError as `resolve` and `resolve_ortmodule`.
    """
    chosen, settings = resolve(given, mode), resolve_ortmodule()
    if "strict" not in (given or {}) and not _may_run_in_eager(settings):
        chosen = replace(chosen, strict=True)
    return in_force(chosen, given, settings), settings


def in_force(options: Any, given: Mapping[str, Any] | None, settings: Any) -> Options:
    """Let the switches say what options do not that are given."""
    if settings.enable_mem_efficient_grad_mgmt and "early_gradients" not in (given or {}):
        options = replace(options, early_gradients=True)
    return in_save_path(options, given, settings)


def _may_run_in_eager(settings: Any) -> bool:
    return settings.fallback_policy.allows(ORTModuleONNXModelException)


def in_save_path(options: Any, given: Mapping[str, Any] | None, settings: Any) -> Options:
    """Put the files of `save_onnx` into the folder of the switches, if no prefix is given."""
    if "onnx_prefix" in (given or {}):
        return options
    prefix = os.path.join(settings.save_onnx_path, options.onnx_prefix)
    return replace(options, onnx_prefix=prefix)


def asked_in_vain(settings: Any, by_torch_compile: bool = False) -> list[tuple[str, str]]:
    """Name the switches that somebody has set and that do nothing, with the reason.

    What is off anyway, and set to be so, does what it is asked for.
    """
    found = []
    for row in ORTMODULE_TABLE:
        value = getattr(settings, row.name)
        if row.name not in settings.given or value == "":
            continue
        if row.never_needed:
            found.append((row.variable, f"never needed, ignored: {row.never_needed}"))
        elif value is False:
            continue
        elif by_torch_compile and not row.is_for_both:
            found.append((row.variable, "acts on ORTModule alone, ignored by torch.compile"))
    return found


@dataclass(frozen=True)
class Launched:
    """What a launcher of several ranks, torchrun or mpirun, has put into the environment.

    `num_local` is the number of ranks on this machine, `has_address` tells whether it says where
    ranks meet. Without a launcher there is one rank.
    """

    rank: int
    world_size: int
    num_local: int
    has_address: bool


# The variables of torchrun, of Open MPI, and of MPICH or Intel MPI.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)


def launched() -> Launched:
    """Tell what a launcher of several ranks says; raises UserError for what is no number."""
    has_address = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    for rank, world_size, num_local in _LAUNCHERS:
        if {rank, world_size} <= os.environ.keys():
            numbers = (_rank_number(name) for name in (rank, world_size, num_local))
            return Launched(*numbers, has_address)
    return Launched(0, 1, 1, has_address)


def _rank_number(variable: str) -> int:
    text = os.environ.get(variable, "0")
    if not text.isdecimal():
        raise UserError(f"environment: {variable}: got {text!r}, want a whole number")
    return int(text)


def _from_environment(table: tuple[Row, ...]) -> dict[str, Any]:
    values = {}
    for row in table:
        text = os.environ.get(row.variable)
        if text is not None:
            values[row.name] = _checked(row, row.variable, text, row.parse)
    return values


def _checked(row: Row, where: str, value: Any, parse: Callable[[str], Any] | None = None) -> Any:
    try:
        return row.check(parse(value) if parse else value)
    except KeyError as error:
        raise UnknownName(f"options: {where}: got {value!r}, {error.args[0]}") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"options: {where}: got {value!r}, {error}") from None


def near(name: str, names: tuple[str, ...] | list[str]) -> str:
    """Ask, at the end of a message, for the names that are most like an unknown one."""
    found = difflib.get_close_matches(str(name), names, 2, 0.5)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def page() -> str:
    """Give the tables as a page of Markdown."""
    return "\n".join(
        [
            _HEAD, *map(_line, TABLE),
            _ORTMODULE_HEAD, *map(_ortmodule_line, ORTMODULE_TABLE),
            _PROCESS_HEAD, *map(_ortmodule_line, PROCESS_TABLE),
        ]
    )  # fmt: skip


_HEAD = """\
# Options

All settings of torch_ort, with their defaults. None has to be set: look here when you want less
memory, other numerics, files of what the engine did, or a part of it switched off.

```python
import torch

model = torch.nn.Linear(8, 4)
compiled = torch.compile(model, backend="ort", options={"strict": True})
```

The same setting comes from the environment as `TORCH_ORT_STRICT=1`. What is given to
`torch.compile` in `options={...}` wins over the environment, which wins over the default. In the
environment a bool is `0` or `1`, a flag is on if it is `1` and off if it is any other integer, and
names are separated by commas. Unknown options and values of the wrong kind are errors.

This page is printed by `python -m torch_ort.options`.

## Options of compiled graphs

| option | variable | default | kind | meaning |
| --- | --- | --- | --- | --- |"""

_ORTMODULE_HEAD = """
## Switches of ORTModule

These are the switches of ONNX Runtime Training. They are read when an ORTModule is made;
`DebugOptions(config={...})` takes the options of this table and of the one above by name.
`torch.compile(backend="ort")` reads the switches too, from the environment, whenever it compiles a
graph: a fallback policy that does not let a graph run in PyTorch acts as `strict` there. A flag is
on if it is `1` and off if it is any other integer; other text is an error. Switches that are
never needed are accepted and ignored, and the log says so once.

| variable | default | kind | what it does here |
| --- | --- | --- | --- |"""


_PROCESS_HEAD = """
## Settings of the process

These are read from the environment only, whenever a graph is compiled. The libraries are opened
when the engine first uses CUDA; naming another path after that is an error.

| variable | default | kind | meaning |
| --- | --- | --- | --- |"""


def _line(row: Row) -> str:
    default = "none" if row.default == () else f"`{row.default}`"
    return f"| `{row.name}` | `{row.variable}` | {default} | {row.kind} | {row.doc} |"


def _ortmodule_line(row: Row) -> str:
    value = row.default() if callable(row.default) else row.default
    text = "|".join(value) if isinstance(value, tuple) else getattr(value, "name", value)
    escaped = str(int(text) if isinstance(text, bool) else text).replace("|", "\\|")
    default = f"`{escaped}`" if escaped else "none"
    doc = row.doc + (f" Never needed: {row.never_needed}." if row.never_needed else "")
    return f"| `{row.variable}` | {default} | {row.kind} | {doc} |"


if __name__ == "__main__":
    print(page())
