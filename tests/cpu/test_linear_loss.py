"""The cross-entropy of a linear layer in chunks of rows, against eager PyTorch in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.cpu.regions import ISAS, crossed, read, run, type_text
from torch_ort import _C

IGNORED = -100
NEAR = {torch.float32: 3e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclasses.dataclass(frozen=True)
class Loss:
    """One form of the node; `rows` and `groups` are its chunks."""

    rows: int = 5
    groups: int = 3
    reduction: str = "mean"
    bias: bool = False
    class_weight: bool = False
    gradients: bool = True
    logits: bool = False
    listed: tuple[int, ...] | None = None  # rows to compute
    soft_cap: float = 0.0
    loss_grad: bool = False
    sums_grad: bool = False
    square_grad: bool = False
    of_rows: bool = False  # gives sums and logsumexp

    def workspace(self, classes: int, width: int) -> int:
        of_row = 2 * self.groups + 3
        if self.gradients:
            of_row += classes + self.groups * width
        if self.listed is not None:
            of_row += width
        return self.rows * (of_row + 2 * self.groups * self.of_rows + self.sums_grad)


def operands(loss: Loss, rows: int, width: int, classes: int, dtype: torch.dtype) -> list[Tensor]:
    """Give hidden [rows, width], weight [classes, width], labels, and bias and class weights."""
    labels = torch.randint(0, max(classes, 1), (rows,))
    labels[torch.rand(rows) < 0.3] = IGNORED
    made = [torch.randn(rows, width, dtype=dtype), torch.randn(classes, width, dtype=dtype), labels]
    if loss.bias:
        made.append(torch.randn(classes, dtype=dtype))
    if loss.class_weight:
        made.append(torch.rand(classes, dtype=dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if loss.loss_grad:
        made.append(torch.randn((rows,) if loss.reduction == "none" else (), dtype=wide))
    made += [torch.randn(rows, dtype=wide) for _ in range(loss.sums_grad + loss.square_grad)]
    if loss.listed is not None:
        made.append(list_of(loss.listed, rows))
        others = torch.ones(rows, dtype=torch.bool)
        others[list(loss.listed)] = False
        if not loss.logits:
            made[0][others] = math.nan
        labels[others] = IGNORED
    return made


def list_of(listed: tuple[int, ...], rows: int) -> Tensor:
    """Give how many, their numbers, and what nobody reads, [rows + 1]."""
    return torch.tensor([len(listed), *listed] + [-7] * (rows - len(listed)))


def computed(
    loss: Loss,
    given: list[Tensor],
    isa: str = "",
    strides: dict | None = None,
    workspace: int | None = None,
):
    """Run the node; give the loss, then gradients of hidden, weight and bias, then logits.

    Gradients of rows that are not listed, which nobody has written, are given as zeros.
    """
    if workspace is None:
        workspace = loss.workspace(len(given[1]), given[1].shape[1])
    hidden, weight, *_ = given
    rows, classes, width, dtype = len(hidden), len(weight), weight.shape[1], hidden.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    names = ["hidden", "weight", "labels"]
    names += ["bias"] * loss.bias + ["class_weight"] * loss.class_weight
    extras = ["loss_grad"] * loss.loss_grad + ["sums_grad"] * loss.sums_grad
    extras += ["square_grad"] * loss.square_grad
    names += extras + ["list"] * (loss.listed is not None)
    of_loss = (rows,) if loss.reduction == "none" else ()
    types = {"loss": (wide, of_loss), "workspace": (wide, (workspace,))}
    attrs = [f"rows = {loss.rows}", f"groups = {loss.groups}", f'reduction = "{loss.reduction}"']
    attrs += ["has_bias = 1"] * loss.bias + ["has_class_weight = 1"] * loss.class_weight
    attrs += ["has_row_list = 1"] * (loss.listed is not None)
    attrs += [f"has_{name} = 1" for name in extras]
    attrs += [f"soft_cap = {loss.soft_cap}"] * (loss.soft_cap != 0)
    if loss.logits:
        types["logits"] = (dtype, (rows, classes))
        attrs.append("makes_logits = 1")
    if loss.gradients:
        types["hidden_grad"] = (wide, (rows, width))
        types["weight_grad"] = (wide, (classes, width))
        attrs += ["makes_hidden_grad = 1", "makes_weight_grad = 1"]
        if loss.bias:
            types["bias_grad"] = (wide, (classes,))
            attrs.append("makes_bias_grad = 1")
    if loss.of_rows:
        types["sums"] = types["logsumexp"] = (wide, (rows,))
        attrs += ["makes_sums = 1", "makes_logsumexp = 1"]
    node = f"{', '.join(types)} = torch_ort.LinearCrossEntropy <{', '.join(attrs)}>"
    graph = read(
        {name: type_text(x.dtype, x.shape) for name, x in zip(names, given, strict=True)},
        [f"{node} ({', '.join(names)})"],
        [name for name in types if name != "workspace"],
        types={name: type_text(*each) for name, each in types.items()},
        strides=strides,
    )
    results = dict(
        zip([n for n in types if n != "workspace"],
            run(graph, dict(zip(names, given, strict=True)), isa), strict=True)
    )  # fmt: skip
    if loss.listed is not None and loss.gradients:
        whole = torch.zeros_like(results["hidden_grad"])
        whole[list(loss.listed)] = results["hidden_grad"][list(loss.listed)]
        results["hidden_grad"] = whole
    logits = [results.pop("logits")] if loss.logits else []
    return [*results.values(), *logits]


def wanted(loss: Loss, given: list[Tensor]) -> list[Tensor]:
    """The same by eager PyTorch in float64."""
    if loss.listed is not None:
        given = [given[0].nan_to_num(0), *given[1:-1]]
    hidden, weight, labels, *rest = (x if x.dtype == torch.int64 else x.double() for x in given)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    bias = rest.pop(0).clone().requires_grad_() if loss.bias else None
    class_weight = rest.pop(0) if loss.class_weight else None
    logits = F.linear(*leaves, bias)
    if loss.soft_cap:
        logits = loss.soft_cap * torch.tanh(logits / loss.soft_cap)
    made = F.cross_entropy(
        logits, labels, class_weight, ignore_index=IGNORED, reduction=loss.reduction
    )
    logsumexp = logits.logsumexp(-1)
    logarithms = logits.log_softmax(-1)
    sums = (logarithms if class_weight is None else logarithms * class_weight).sum(-1)
    total = (made * rest.pop(0) if loss.loss_grad else made).sum()
    if loss.sums_grad:
        total = total + (sums * rest.pop(0)).sum()
    if loss.square_grad:
        total = total + (logsumexp.square() * rest.pop(0)).sum() / 2
    results = [made.detach()]
    if loss.gradients:
        results += torch.autograd.grad(total, leaves + ([bias] if loss.bias else []))
    if loss.of_rows:
        results += [sums.detach(), logsumexp.detach()]
    return results + [logits.detach()] * loss.logits


def largest_term(loss: Loss, given: list[Tensor]) -> float:
    """Give the size of what gradients are sums of, where it may cancel: s - s * 2 * (1 / 2)."""
    first = 3 + loss.bias + loss.class_weight + loss.loss_grad
    of_rows = given[first : first + loss.sums_grad + loss.square_grad]
    sizes = [x.abs().max().item() for x in given[:2] if x.numel()]
    return max((x.abs().max().item() for x in of_rows if x.numel()), default=0) * max([1, *sizes])


def compare(loss: Loss, given: list[Tensor], isa: str = "") -> None:
    near, least = NEAR[given[0].dtype], max(largest_term(loss, given), 1e-30)
    for got, want in zip(computed(loss, given, isa), wanted(loss, given), strict=True):
        scale = want.abs().max().item() if want.numel() and want.isfinite().all() else 1.0
        torch.testing.assert_close(got.double(), want, rtol=near, atol=near * max(scale, least),
                                   equal_nan=True)  # fmt: skip


FORMS = {
    "mean": Loss(),
    "sum": Loss(reduction="sum"),
    "bias": Loss(bias=True),
    "class weights": Loss(class_weight=True),
    "all": Loss(bias=True, class_weight=True, logits=True),
    "no gradients": Loss(bias=True, class_weight=True, gradients=False),
    "logits alone": Loss(gradients=False, logits=True),
    "none": Loss(reduction="none", class_weight=True, loss_grad=True),
    "scaled": Loss(loss_grad=True),
    "soft cap": Loss(bias=True, soft_cap=2.5, logits=True),
}
OF_ROWS = {
    "sums": Loss(sums_grad=True, of_rows=True, reduction="none"),
    "weighted sums": Loss(sums_grad=True, of_rows=True, class_weight=True, bias=True),
    "squares": Loss(square_grad=True, of_rows=True, bias=True),
    "numbers of rows alone": Loss(of_rows=True, class_weight=True, gradients=False),
    "everything": Loss(sums_grad=True, square_grad=True, of_rows=True, class_weight=True, bias=True,
        logits=True, loss_grad=True, soft_cap=3.0),
}  # fmt: skip


@crossed(isa=ISAS, dtype=NEAR, form=FORMS | OF_ROWS)
def test_against_float64(form, dtype, isa):
    torch.manual_seed(0)
    loss = (FORMS | OF_ROWS)[form]
    compare(loss, operands(loss, 13, 7, 1100, dtype), isa)


@settings(max_examples=60, deadline=None)
@given(
    loss=st.builds(
        Loss,
        rows=st.integers(1, 9),
        groups=st.integers(1, 5),
        reduction=st.sampled_from(["none", "mean", "sum"]),
        soft_cap=st.sampled_from([0.0, 4.0]),
        loss_grad=st.booleans(),
        sums_grad=st.booleans(),
        square_grad=st.booleans(),
        of_rows=st.booleans(),
        bias=st.booleans(),
        class_weight=st.booleans(),
        gradients=st.booleans(),
        logits=st.booleans(),
    ),
    rows=st.integers(0, 30),
    width=st.integers(1, 20),
    classes=st.sampled_from([1, 2, 37, 511, 512, 513, 1024, 1700]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_any_form_and_size(loss, rows, width, classes, dtype, seed):
    torch.manual_seed(seed)
    compare(loss, operands(loss, rows, width, classes, dtype))


LISTS = {
    "none": (), "one": (7,), "run": tuple(range(4, 15)), "all": tuple(range(23)),
    "scattered": (0, 1, 4, 8, 9, 10, 13, 16, 17, 20, 21, 22),
}  # fmt: skip


@crossed(isa=ISAS, dtype=NEAR, form=FORMS, listed=LISTS)
def test_listed_rows(listed, form, dtype, isa):
    """Other rows are not read but for their logits, and their gradients are left as they are."""
    torch.manual_seed(1)
    loss = dataclasses.replace(FORMS[form], listed=LISTS[listed])
    if not loss.listed:
        loss = dataclasses.replace(loss, reduction="sum")
    compare(loss, operands(loss, 23, 7, 1100, dtype), isa)


def test_listed_rows_of_any_layout():
    loss = Loss(listed=(1, 2, 5, 9, 10, 11))
    given = operands(loss, 12, 8, 700, torch.float32)
    given[0] = given[0].T.contiguous().T
    for listed in (loss.listed, (4, 5, 6, 7)):
        given[0].nan_to_num_(0)
        given[2].fill_(IGNORED)[list(listed)] = 3
        given[3] = list_of(listed, 12)
        each = dataclasses.replace(loss, listed=listed)
        got = computed(each, given, strides={"hidden": "1,12"})
        for a, b in zip(got, wanted(each, given), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_lists_that_name_no_rows():
    loss = Loss(listed=(1, 2, 5))
    given = operands(loss, 12, 8, 700, torch.float32)
    given[3][3] = 12
    with pytest.raises(IndexError, match="rows: got 12 at 2, want 3 or more, and less than 12"):
        computed(loss, given)
    given[3] = given[3][:12].clone()
    with pytest.raises(_C.InternalError, match="rows: got 12 int64, want 13"):
        computed(loss, given)


@pytest.mark.parametrize("label", [600, -1, -101])
def test_labels_of_rows_that_are_not_listed(label):
    loss = Loss(listed=(1, 2, 5))
    given = operands(loss, 8, 4, 600, torch.float32)
    given[2][3] = label
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds."):
        computed(loss, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_without_a_label(dtype):
    """The mean of nothing is NaN, its gradients are zeros."""
    given = operands(Loss(), 8, 4, 600, dtype)
    given[2].fill_(IGNORED)
    loss, hidden_grad, weight_grad = computed(Loss(), given)
    assert loss.isnan()
    assert not hidden_grad.any()
    assert not weight_grad.any()
    compare(Loss(reduction="sum"), given)


@pytest.mark.parametrize("label", [600, -1, -101])
def test_labels_that_are_no_class(label):
    given = operands(Loss(), 8, 4, 600, torch.float32)
    given[2][3] = label
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds."):
        computed(Loss(), given)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e30])
def test_logits_that_are_no_numbers(number):
    """What is not finite spoils its row, and the loss, as in eager PyTorch."""
    loss = Loss(bias=True, logits=True, reduction="sum")
    given = operands(loss, 8, 4, 1200, torch.float64)
    given[3][700] = number
    compare(loss, given)


def test_classes_that_cannot_be():
    """A bias of -inf leaves a class out, and a block of classes all of which are left out."""
    loss = Loss(bias=True, reduction="sum")
    given = operands(loss, 8, 4, 1200, torch.float64)
    given[3][400:1100] = -float("inf")
    given[2] %= 400
    compare(loss, given)


@pytest.mark.parametrize("loss", [Loss(), OF_ROWS["weighted sums"], OF_ROWS["squares"]])
def test_far_from_zero(loss):
    """Logits near 1000 cost no digits but their own."""
    given = operands(loss, 12, 8, 700, torch.float32)
    given[0] *= 100
    near = computed(loss, given)
    for got, want in zip(near, wanted(loss, given), strict=True):
        assert (got - want).norm() <= 3e-5 * want.norm()


def test_rows_that_do_not_count_have_no_part_in_a_mean_of_nothing():
    """Their squares have gradients."""
    loss = Loss(square_grad=True, sums_grad=True, of_rows=True)
    given = operands(loss, 8, 4, 600, torch.float32)
    given[2].fill_(IGNORED)
    compare(loss, given)


def test_operands_of_any_layout():
    given = operands(Loss(bias=True), 12, 8, 700, torch.float32)
    given[0] = given[0].T.contiguous().T
    given[1] = given[1].T.contiguous().T
    got = computed(Loss(bias=True), given, strides={"hidden": "1,12", "weight": "1,700"})
    for a, b in zip(got, wanted(Loss(bias=True), given), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_any_number_of_threads_gives_the_same_bits():
    loss = Loss(bias=True, rows=8)
    given = operands(loss, 40, 16, 2000, torch.float32)
    before = torch.get_num_threads()
    seen = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(computed(loss, given))
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        for a, b in zip(seen[0], other, strict=True):
            assert torch.equal(a, b)


def test_operands_that_do_not_fit():
    """The workspace has to be that of the chunks, however large these are."""
    loss = Loss(gradients=False)
    given = operands(loss, 6, 4, 20, torch.float32)
    given[2] = given[2][:5]
    with pytest.raises(_C.InternalError, match="the operands do not fit together"):
        computed(loss, given)
    huge = Loss(rows=2**62)
    assert huge.workspace(19, 4) % 2**64 == 0  # as a sum of 64 bits has it
    with pytest.raises(_C.InternalError, match="more numbers than there can be"):
        computed(huge, operands(huge, 6, 4, 19, torch.float32), workspace=0)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (Loss(rows=0), "got 0 rows at a time and 3 groups, want 1 or more"),
        (Loss(reduction="most"), "reduction: got 'most', want none, mean or sum"),
    ],
)
def test_forms_that_there_are_not(loss, words):
    with pytest.raises(_C.UserError, match=words):
        computed(loss, operands(loss, 6, 4, 20, torch.float32))


def test_a_list_that_leaves_out_rows_that_are_given():
    loss = Loss(of_rows=True, listed=(1, 2))
    words = "a list leaves out rows of which something is made"
    with pytest.raises(_C.InternalError, match=words):
        computed(loss, operands(loss, 6, 4, 20, torch.float32))
