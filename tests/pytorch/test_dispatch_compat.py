"""What recordings need of private names of torch: each fails readably where torch changes it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torch_ort import _C
from torch_ort.core.refusals import HandOver
from torch_ort.dynamo.inputs import DynamoInputs
from torch_ort.pytorch import dispatch_compat, patches
from torch_ort.pytorch.dispatch_compat import Leaf
from torch_ort.pytorch.trace_compat import TorchDispatchMode
from torch_ort.rules.answers import form_of, rehearsal
from torch_ort.rules.forms import spec_of


def leaf(*sizes: int, device: str = "cpu") -> Leaf:
    strides = _C.contiguous_strides(list(sizes))
    return Leaf(list(sizes), strides, torch.float32, torch.device(device))


def test_a_leaf_is_a_tensor_without_numbers():
    x = leaf(2, 3)
    assert isinstance(x, torch.Tensor)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (3, 1), torch.float32, "cpu")
    with pytest.raises(
        _C.Unsupported,
        match=r"aten.add.Tensor: called during capture with a tensor that has no data",
    ):
        x + 1


def test_a_leaf_may_stand_for_another_device():
    assert leaf(2, device="cuda:0").device == torch.device("cuda:0")


class Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        made = leaf(*args[0].shape)
        made.spec = spec_of(made)
        return made


def test_writes_become_operators():
    x = leaf(2)
    wrapped = dispatch_compat.functionalized(x)
    assert dispatch_compat.is_functionalized(wrapped)
    assert not dispatch_compat.is_functionalized(x)
    with dispatch_compat.functionalization(), Notes() as notes:
        wrapped.add_(1)
    assert notes.seen == ["aten.add.Tensor"]
    assert dispatch_compat.unwrapped(wrapped) is not x


def test_nothing_is_compiled_in_a_recording():
    before = torch.compile
    with dispatch_compat.nothing_compiled():
        with pytest.raises(
            _C.Unsupported, match=r"torch.compile: called while a graph is captured"
        ):
            torch.cond(torch.ones(()) > 0, torch.sin, torch.cos, (torch.ones(2),))
        with ThreadPoolExecutor() as threads:
            assert threads.submit(lambda: torch.compile(len)([1, 2])).result() == 2
    assert torch.compile is before


def test_a_dropout_that_does_nothing_gives_its_argument():
    operator = torch.ops.aten.dropout.default
    before = dict(operator.py_kernels)
    with dispatch_compat.dropout_passes_through(), rehearsal() as like:
        x = like(spec_of(torch.ones(2, 3)))
        for p, train in ((0.5, False), (0.0, True)):
            assert operator(x, p, train) is x
            assert torch.nn.functional.dropout(x, p, train) is x
        assert operator(x, 0.5, True) is not x
    assert operator.py_kernels == before
    assert before


def test_operators_stay_whole():
    aten = torch.ops.aten
    operators = [
        getattr(getattr(aten, name), overload)
        for name in dispatch_compat.RESIZING
        for overload in ("default", "vec")
    ]
    operators += [aten.softshrink.default, aten.hardshrink.default]
    before = [dict(operator.py_kernels) for operator in operators]
    x = dispatch_compat.functionalized(leaf(2, 3, 4, 5)).requires_grad_()
    with (
        dispatch_compat.functionalization(),
        dispatch_compat.enable_python_dispatcher(),
        dispatch_compat.operators_whole(),
        Notes() as notes,
    ):
        torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
        torch.nn.functional.interpolate(x, (8, 7))
        torch.nn.functional.softshrink(x)
        torch.nn.functional.hardshrink(x)
    names = ["upsample_bilinear2d", "upsample_nearest2d", "softshrink", "hardshrink"]
    assert notes.seen == [f"aten.{name}.default" for name in names]
    assert [operator.py_kernels for operator in operators] == before
    assert all(before)


def test_sparse_gradients_are_whole():
    """Dense ones are made as PyTorch makes them."""
    bags = torch.zeros(2, dtype=torch.int64)
    for is_sparse in (True, False):
        table = torch.randn(2, 3, requires_grad=True)
        rows = torch.nn.functional.embedding(bags, table, sparse=is_sparse)
        sums = torch.nn.functional.embedding_bag(
            bags, table, torch.arange(2), mode="sum", sparse=is_sparse
        )
        gathered = torch.gather(table, 0, bags.expand(3, 2).T, sparse_grad=is_sparse)
        with (
            dispatch_compat.enable_python_dispatcher(),
            dispatch_compat.sparse_gradients_whole(),
            Notes() as notes,
        ):
            for each in (rows, sums, gathered):
                torch.autograd.grad(each, table, torch.ones_like(each))
        ours = [name for name in notes.seen if name.startswith("torch_ort.")]
        names = ["embedding", "embedding_bag", "gather"] if is_sparse else []
        assert ours == [f"torch_ort.sparse_{name}_backward.default" for name in names]


def test_captures_are_made_outside_of_inference_mode():
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            with dispatch_compat.outside_inference_mode():
                assert not torch.is_inference_mode_enabled()
                assert not torch.is_grad_enabled()
            assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    with dispatch_compat.outside_inference_mode():
        assert torch.is_grad_enabled()


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_views_are_known_with_their_bases():
    with rehearsal() as make:
        base = make(spec_of(leaf(2, 3))).requires_grad_()
        view, first = base.view(-1)[1:], base.unbind()[0]
        with torch.no_grad():
            unseen = base.view(-1)
        hooked, custom = base.view(-1), Passes.apply(base)
        hooked.register_hook(lambda gradient: gradient)
        views = [view, first, unseen, hooked, custom, custom.view(-1)]
        assert dispatch_compat.is_base(base)
        assert not any(map(dispatch_compat.is_base, views))
        assert all(dispatch_compat.viewed(each) is base for each in [base, *views])
        several = [dispatch_compat.is_one_of_several_views(each) for each in views]
        assert several == [False, True, False, False, False, False]
        assert [dispatch_compat.has_gradient(each) for each in views[:4]] == [
            True, True, False, True,
        ]  # fmt: skip
        known = [dispatch_compat.is_differentiable_view(each, base) for each in views]
        assert known == [True, True, False, False, False, False]
        assert form_of(view).sizes == [5]
        with Notes() as notes:
            dispatch_compat.viewed_again(view, leaf(4))
    assert notes.seen == ["aten.view.default", "aten.slice.Tensor"]


def test_a_rehearsal_leaves_the_recording_around_it_alone():
    seen = []

    class Rehearsing(Notes):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            _C.call_plainly(self.rehearse)
            return super().__torch_dispatch__(func, types, args, kwargs)

        def rehearse(self) -> None:
            with rehearsal() as make:
                made = make(spec_of(leaf(4, 5))).requires_grad_() * 2
                made.view(-1).exp_()
                assert made.requires_grad
                seen.append(form_of(made).sizes)

    wrapped = dispatch_compat.functionalized(leaf(2, 3))
    with dispatch_compat.functionalization(), Rehearsing() as notes:
        wrapped.view(-1).add_(1)
    assert set(notes.seen) == {"aten.view.default", "aten.add.Tensor"}  # views stay views
    assert seen == [[4, 5]] * len(notes.seen)


def test_numbers_are_asked_for_in_vain():
    with dispatch_compat.functionalization(), Notes(), dispatch_compat.WithoutNumbers():
        x = dispatch_compat.functionalized(leaf(2)) + 1
        with pytest.raises(_C.Unsupported, match=r"Tensor.data_ptr: called during capture"):
            x.data_ptr()
    # What does not come through Python's functions finds no numbers either.
    with pytest.raises(RuntimeError, match="data pointer"):
        x.data_ptr()


def test_what_nothing_is_written_into_stays_itself():
    x = leaf(2)
    assert dispatch_compat.unwrapped(dispatch_compat.functionalized(x)) is x


def test_views_share_their_memory():
    wrapped = dispatch_compat.functionalized(leaf(2, 3))
    other = dispatch_compat.functionalized(leaf(2, 3))
    with dispatch_compat.functionalization(), Notes():
        view = wrapped.detach()
    assert dispatch_compat.storage_key(view) == dispatch_compat.storage_key(wrapped)
    assert dispatch_compat.storage_key(other) != dispatch_compat.storage_key(wrapped)


def test_a_wrapped_parameter_is_a_parameter():
    assert isinstance(dispatch_compat.functionalized(leaf(2), True), torch.nn.Parameter)
    assert not isinstance(dispatch_compat.functionalized(leaf(2)), torch.nn.Parameter)


def test_functionalization_ends():
    with dispatch_compat.functionalization():
        pass
    assert not dispatch_compat.is_functionalized(torch.ones(2))


def test_hooks_of_saved_tensors_are_set_aside():
    packed = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda p: p):
        with dispatch_compat.without_saved_tensor_hooks():
            (x * x).sum()
        assert packed == []
        (x * x).sum()
        assert len(packed) == 2


def test_pythons_rules_take_symbols():
    table = _C.SizeSymbols()
    n = table.symbol("n", 3, is_size=True)
    x = torch.empty_strided((n, 4), (4, 1), device="meta")
    with dispatch_compat.shape_questions_answered(), dispatch_compat.enable_python_dispatcher():
        y = torch.cat([torch.nn.functional.gelu(x), x])
    assert [_C.size_text(size) for size in y.shape] == ["2*n", 4]
    assert table.guards() == []


def test_questions_about_other_sizes_are_torchs_own():
    from torch.fx.experimental import symbolic_shapes

    before = symbolic_shapes._static_eval_sym_bool
    with dispatch_compat.shape_questions_answered():
        assert symbolic_shapes._static_eval_sym_bool is not before
        hints = [row for row in (patches.HINT_OF_GUARD, patches.HINT_OF_SIZE) if row.exists]
        assert [getattr(*row.place)(5) for row in hints] == [5]  # under one of the names
    assert symbolic_shapes._static_eval_sym_bool is before


def test_inputs_are_plain_tensors():
    plain = [torch.ones(2), torch.nn.Parameter(torch.ones(2))]
    assert len(DynamoInputs(plain).inputs) == 2
    for other in (leaf(2), torch.ones(2, dtype=torch.complex64).conj()):
        with pytest.raises(HandOver, match=r"input 0 is a \w+ of layout torch.strided"):
            DynamoInputs([other])


def test_descriptions_are_those_of_aotautograd():
    from torch_ort.pytorch import graph_compat

    graph = torch.fx.Graph()
    node = graph.placeholder("primals_1")
    node.meta = {"desc": graph_compat.input_description(0)}
    assert graph_compat.input_position(node) == 0
    output = graph.output((node, node))
    output.meta = {"desc": graph_compat.output_descriptions(1, [0])}
    module = torch.nn.Module()
    module.graph = graph
    assert graph_compat.differentiated(module, 1) == [node]


def test_subclasses_without_numbers():
    calls = []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            calls.append(func)
            return "called"

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return torch.ones(3)

    made = dispatch_compat.without_numbers(Seen, torch.zeros(2, 3), torch.bfloat16)
    with dispatch_compat.plain_functions():
        assert (type(made), made.shape, made.dtype) == (Seen, (2, 3), torch.bfloat16)
        assert torch.equal(made.sum(0), torch.ones(3))
    assert not calls
    assert made.sum() == "called"
    assert calls == [torch.Tensor.sum]
