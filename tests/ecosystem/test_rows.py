# Rows that nobody reads, in models of Hugging Face's that are made from configurations alone.
from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from families import IGNORED, PAD, VOCABULARY
from torch import Tensor, nn

import torch_ort
from torch_ort.engine import watchers

pytestmark = pytest.mark.hf

LENGTHS = ([12, 3, 1, 5], [2, 12, 7, 4], [12, 12, 12, 12])
CLASSIFIERS = ("bert_classes", "distilbert_classes")
CAUSAL = ("gpt2", "llama", "qwen2")
FAMILIES = (*CLASSIFIERS, "bert_words", *CAUSAL)
# Products of what leads to the classes of each sequence, which have a row for each and no more.
PRODUCTS_OF_SEQUENCES = 6


def make_model(family: str, dropout: float) -> nn.Module:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 32,
    }  # fmt: skip
    of_bert = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if family == "bert_classes":
        return hf.BertForSequenceClassification(hf.BertConfig(**sizes, **of_bert))
    if family == "bert_words":
        return hf.BertForMaskedLM(hf.BertConfig(**sizes, **of_bert))
    if family == "distilbert_classes":
        config = hf.DistilBertConfig(
            vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=32, dropout=dropout,
            attention_dropout=dropout, seq_classif_dropout=dropout,
        )  # fmt: skip
        return hf.DistilBertForSequenceClassification(config)
    if family == "gpt2":
        config = hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0,
            eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )  # fmt: skip
        return hf.GPT2LMHeadModel(config)
    if family == "llama":
        config = hf.LlamaConfig(**sizes, num_key_value_heads=1, attention_dropout=dropout)
        return hf.LlamaForCausalLM(config)
    assert family == "qwen2", family
    config = hf.Qwen2Config(**sizes, num_key_value_heads=1, attention_dropout=dropout)
    return hf.Qwen2ForCausalLM(config)


class Loss(nn.Module):
    """The loss of a model: its logits do not leave."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).loss


def make_inputs(family: str, lengths: list[int]) -> dict[str, Tensor]:
    """Give sequences that are padded on the right; of the words a third has a label."""
    places = torch.arange(max(lengths))
    is_word = places < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, VOCABULARY, is_word.shape).where(is_word, PAD)
    labels = ids.where(is_word & (torch.rand(is_word.shape) < 0.3), IGNORED)
    labels[0, 1] = ids[0, 1]
    if family in CLASSIFIERS:
        labels = torch.randint(2, (len(lengths),))
    return {"input_ids": ids, "attention_mask": is_word.long(), "labels": labels}


def counted(family: str, inputs: dict[str, Tensor]) -> tuple[int, int]:
    """Give how many words there are, and how many rows the head computes."""
    labels = inputs["labels"]
    if family in CAUSAL:
        labels = labels[:, 1:]  # of the place before each
    return int(inputs["attention_mask"].sum()), int((labels != IGNORED).sum())


@pytest.mark.parametrize("returns", ["loss", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_eager(family: str, returns: str) -> None:
    model = make_model(family, dropout=0.0)
    exact = copy.deepcopy(model).double()
    target = Loss(model) if returns == "loss" else model
    # Memory is spoilt before it is written: a row that is read and was not computed is NaN.
    compiled = torch.compile(target, backend="ort", options={"check": 1})
    for lengths in LENGTHS:
        inputs = make_inputs(family, lengths)
        want, got = exact(**inputs), compiled(**inputs)
        if returns == "all":
            torch.testing.assert_close(got.logits.double(), want.logits, rtol=1e-5, atol=1e-5)
            got = got.loss
        assert abs(got.item() - want.loss.item()) <= 1e-5 * abs(want.loss.item())
        model.zero_grad()
        exact.zero_grad()
        got.backward()
        want.loss.backward()
        assert_near(model, exact)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == counters["graph_breaks"] == 0, counters


def assert_near(model: nn.Module, exact: nn.Module) -> None:
    wanted = {name: it.grad for name, it in exact.named_parameters() if it.grad is not None}
    scale = max(grad.norm().item() for grad in wanted.values())
    found = {name: it.grad for name, it in model.named_parameters() if it.grad is not None}
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        # A bias of keys has no influence: its gradient is what rounding leaves of 0.
        error = (found[name].double() - grad).norm().item()
        assert error <= 1e-5 * max(grad.norm().item(), 1e-2 * scale), name


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", FAMILIES)
def test_products_of_all_rows(family: str, dropout: float, monkeypatch) -> None:
    """None but those of the classes of sequences, whose rows all count."""
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "0")
    inputs = make_inputs(family, LENGTHS[0])
    (graph,) = torch_ort.explain(Loss(make_model(family, dropout)), **inputs).graphs
    plain = graph.nodes["MatMul"] + graph.nodes["Gemm"]
    assert plain == (PRODUCTS_OF_SEQUENCES if family in CLASSIFIERS else 0)
    # Forward and two gradients of each linear layer; two blocks have eight or more.
    assert graph.nodes["torch_ort.RowsProduct"] >= 24 - plain
    words, labelled = counted(family, inputs)
    of_head = len(LENGTHS[0]) if family in CLASSIFIERS else labelled
    counts = {each.count for each in graph.row_lists if "RowsProduct" in str(each.readers)}
    assert {words, of_head} <= counts
    assert max(counts) == words < inputs["input_ids"].numel()


def test_what_the_model_warns_of_breaks_no_graph() -> None:
    """GPT-2 says once that it takes the usual loss, between its head and that loss."""
    model = make_model("gpt2", dropout=0.0)
    logging.Logger.warning_once.cache_clear()
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(handler)
    try:
        compiled = torch.compile(model, backend="ort")
        for _ in range(2):
            compiled(**make_inputs("gpt2", LENGTHS[0])).loss.backward()
    finally:
        logger.removeHandler(handler)
    assert ["loss_type=None" in message for message in found] == [True]
    counters = torch_ort.counters()
    assert counters["graphs_captured"] == 1
    assert counters["fallbacks"] == counters["graph_breaks"] == 0, counters


@pytest.mark.parametrize("family", ["bert_words", *CAUSAL])
def test_rows_of_gradients_where_logits_leave(family: str) -> None:
    """All rows of forward are read then, and from the second step on few of backward."""
    model = make_model(family, dropout=0.0)
    inputs = make_inputs(family, LENGTHS[0])
    compiled = torch.compile(model, backend="ort")
    with watchers.watching() as programs:
        for _ in range(2):
            compiled(**inputs).loss.backward()
    (program,) = programs
    counts: dict[int, Any] = {count: rows for _, count, rows in program.session.row_lists()}
    assert counts[counted(family, inputs)[1]] == inputs["input_ids"].numel()
