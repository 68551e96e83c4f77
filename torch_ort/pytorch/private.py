"""The private names of torch that the package uses: a table, and what was found of each.

The other files of this room import from here what they name alone, and read from torch what has
dots. How a torch that lacks one is met is in versions.py.
"""

from __future__ import annotations

from torch_ort.pytorch.versions import Missing, is_within, look_up, missing, placeholder

# By module of torch.
NAMES = {
    "torch": """
        _TorchCompileWrapper _disable_functionalization _enable_functionalization
        _from_functional_tensor _functionalize_enable_reapply_views
        _functionalize_has_data_mutation _functionalize_is_multi_output_view _fused_sdp_choice
        _is_functional_tensor _sync _to_functional_tensor
        Tensor._make_wrapper_subclass Tensor._version
        autograd.Variable._execution_engine.queue_callback autograd._get_sequence_nr
        """,
    "torch._C": """
        DispatchKey ScriptMethod _VariableFunctions _disabled_torch_function_impl _is_tracing
        DisableTorchFunctionSubclass _AutoDispatchBelowAutograd _SymNode
        _are_functorch_transforms_active _cuda_endAllocateToPool
        _autograd._pop_saved_tensors_default_hooks _autograd._push_saved_tensors_default_hooks
        _autograd._top_saved_tensors_default_hooks _current_autograd_node
        _dispatch_has_kernel_for_dispatch_key _dynamo.eval_frame.set_code_exec_strategy
        _functionalization.apply_view_meta_sequence _functionalization.get_view_meta_sequence
        _functionalization_reapply_views_tls _functorch.peek_interpreter_stack _get_obj_in_tls
        _get_sdp_priority_order _is_key_in_tls _len_torch_dispatch_stack _remove_obj_from_tls
        _set_grad_enabled _set_sdp_priority_order _set_throw_on_mutable_data_ptr _stash_obj_in_tls
        """,
    "torch._VF": "_pack_padded_sequence gru lstm rnn_relu rnn_tanh",
    "torch._dispatch.python": "enable_python_dispatcher no_python_dispatcher",
    "torch._dynamo": """
        config.allow_rnn config.assume_static_by_default config.disable
        config.fail_on_recompile_limit_hit config.skip_tensor_guards_with_matching_dict_tags
        config.suppress_errors
        convert_frame.has_tensor_in_frame eval_frame.OptimizedModule._call_lazy_check
        eval_frame._stance.stance eval_frame.innermost_backend eval_frame.innermost_fn
        exc.Unsupported exc.UserError exc.unimplemented external_utils.wrap_inline
        symbolic_convert.tls trace_rules.check
        """,
    "torch._dynamo.backends.common": "aot_autograd",
    "torch._dynamo.backends.distributed": "DDPOptimizer",
    "torch._dynamo.exc": """
        RestartAnalysis ShortenTraceback SkipFrame TorchRuntimeError UncapturedHigherOrderOpError
        """,
    "torch._dynamo.source": "AttrSource LocalSource",
    "torch._dynamo.types": "ConvertFrameReturn FrameAction FrameExecStrategy",
    "torch._dynamo.utils": "ExactWeakKeyDictionary get_metrics_context graph_break_reasons",
    "torch._dynamo.variables": "ConstantVariable UserFunctionVariable",
    "torch._functorch._aot_autograd.descriptors": "GradAOTOutput PlainAOTInput PlainAOTOutput",
    "torch._functorch._aot_autograd.schemas": "OutputType",
    "torch._functorch.partitioners": "default_partition",
    "torch._guards": "CompileContext TracingContext detect_fake_mode tracing",
    "torch._higher_order_ops": "auto_functionalize.auto_functionalized_v2",
    "torch._library.fake_class_registry": "FakeScriptObject",
    "torch._ops": "HigherOrderOperator OpOverload OpOverloadPacket",
    "torch._subclasses.fake_tensor": """
        DataDependentOutputException FakeTensor FakeTensorMode UnsupportedFakeTensorException
        """,
    "torch._subclasses.functional_tensor": "FunctionalTensor",
    "torch.autograd": "forward_ad._current_level forward_ad.unpack_dual",
    "torch.distributed.distributed_c10d": "_resolve_process_group",
    "torch.fx.experimental": """
        symbolic_shapes.free_unbacked_symbols symbolic_shapes.statically_known_true
        """,
    "torch.fx.experimental.symbolic_shapes": """
        DimDynamic GuardOnDataDependentSymNode ShapeEnv StatelessSymbolicContext
        """,
    "torch.nn.modules": "batchnorm._NormBase",
    "torch.nn.modules.module": """
        _global_backward_hooks _global_backward_pre_hooks _global_forward_hooks
        _global_forward_pre_hooks
        """,
    "torch.utils": """
        _pytree.tree_leaves _pytree.tree_map _pytree.tree_map_only
        checkpoint._StopRecomputationError
        """,
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes",
    "torch.utils._sympy": """
        functions.CeilToInt functions.CleanDiv functions.FloorDiv functions.FloorToInt functions.Max
        functions.Min functions.Mod functions.PythonMod functions.ToFloat
        """,
    "torch.utils._sympy.printers": "PythonPrinter",
}
# Names that older versions lack, with the first version that has them.
SINCE = {"torch._C._remove_obj_from_tls": "2.13"}


def _take(module: str, name: str) -> None:
    """Look a name up; let it be imported from here, or its first part if it has dots."""
    path, first = f"{module}.{name}", name.partition(".")[0]
    if not is_within(SINCE.get(path, ""), ""):
        return
    try:
        look_up(module, name)
        found = look_up(module, first)
    except (ImportError, AttributeError):
        missing.append(path)
        found = placeholder(f"{module}.{first}")
    if not isinstance(globals().get(first), Missing):
        globals()[first] = found


for _module, _names in NAMES.items():
    for _name in _names.split():
        _take(_module, _name)
