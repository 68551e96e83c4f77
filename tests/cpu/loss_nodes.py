"""Nodes that are cross-entropies of linear layers, and what they give by eager PyTorch."""

from __future__ import annotations

import dataclasses
import math

import torch
from regions import CUDA, read, run_by_name, type_text
from torch import Tensor
from torch.nn import functional as F

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
        """Give the numbers of the kernel's workspace on the CPU."""
        of_row = 2 * self.groups + 3
        if self.gradients:
            of_row += classes + self.groups * width
        if self.listed is not None:
            of_row += width
        return self.rows * (of_row + 2 * self.groups * self.of_rows + self.sums_grad)

    def workspace_on_cuda(self, classes: int, dtype: torch.dtype) -> int:
        """Give the same for a GPU: logits, in rows of whole 16 bytes, losses, and three totals."""
        unit = 16 // dtype.itemsize
        logits = self.rows * -(-classes // unit) * unit * dtype.itemsize
        return logits // (8 if dtype == torch.float64 else 4) + self.rows + 3


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


def graph_of(
    loss: Loss,
    given: list[Tensor],
    isa: str = "",
    strides: dict | None = None,
    workspace: int | None = None,
) -> tuple[_C.Graph, dict[str, Tensor]]:
    """Give a graph of the node alone, and its inputs by name."""
    if workspace is None and isa == CUDA:
        workspace = loss.workspace_on_cuda(len(given[1]), given[1].dtype)
    elif workspace is None:
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
    inputs = dict(zip(names, given, strict=True))
    graph = read(
        {name: type_text(x.dtype, x.shape) for name, x in inputs.items()},
        [f"{node} ({', '.join(names)})"],
        [name for name in types if name != "workspace"],
        types={name: type_text(*each) for name, each in types.items()},
        strides=strides,
    )
    return graph, inputs


def computed(loss: Loss, given: list[Tensor], isa: str = "", **settings) -> list[Tensor]:
    """Run the node; give the loss, then gradients of hidden, weight and bias, then logits.

    Gradients of rows that are not listed, which nobody has written, are given as zeros.
    """
    graph, inputs = graph_of(loss, given, isa, **settings)
    results = run_by_name(graph, inputs, isa)
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
    """Give the size of what gradients are sums of, where it may cancel: s - s * 2 * (1 / 2).

    With w the weight of a class, p its probability and l the logarithm of the sum, a logit has the
    gradient w - p * sum of w of the one sum, and p * l of the square. A few that are as large may
    be added up, each rounded to the dtype of the operands.
    """
    if not (loss.sums_grad or loss.square_grad) or not given[0].numel():
        return 0
    hidden, weight, _, *rest = (x.double() for x in given)
    bias = rest.pop(0) if loss.bias else None
    ones = torch.ones(len(weight), dtype=torch.float64)
    weights = rest.pop(0) if loss.class_weight else ones
    of_rows = [
        each.abs().max() for each in rest[loss.loss_grad :][: loss.sums_grad + loss.square_grad]
    ]
    logits = F.linear(hidden, weight, bias).nan_to_num(0)
    probability, logarithm = logits.softmax(-1).max(), logits.logsumexp(-1).abs().max()
    terms = [1.0]
    if loss.sums_grad:
        terms.append(of_rows.pop(0) * max(1, probability * weights.sum()))
    if loss.square_grad:
        terms.append(of_rows.pop(0) * max(1, probability * logarithm))
    sizes = [x.nan_to_num(0).abs().max().item() for x in (hidden, weight)]
    return float(4 * max(terms) * max([1, *sizes]))


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
