"""Small random models of Hugging Face's families: five steps, eager's losses, one capture."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import ORTModuleONNXModelException

pytestmark = [pytest.mark.hf, pytest.mark.ort_only]

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
TOKENS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
TWO_STACKS = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}  # fmt: skip
EXPERTS = {"experts_implementation": "batched_mm", **GROUPED}


def ids(batch: int = 2, length: int = 10, high: int = 99) -> torch.Tensor:
    return torch.randint(3, high, (batch, length))


def sentences() -> dict:
    return {"input_ids": ids(), "labels": torch.tensor([0, 1])}


def masked_sentences() -> dict:
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    return {**sentences(), "attention_mask": mask}


def tokens() -> dict:
    return {"input_ids": ids(), "labels": ids()}


def marked_tokens() -> dict:
    return {"input_ids": ids(), "labels": ids() % 2}


def text() -> dict:
    given = ids()
    return {"input_ids": given, "labels": given}


def images(size: int = 32) -> dict:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


def large_images() -> dict:
    return images(64)


def sound() -> dict:
    return {"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 1])}


def spectra() -> dict:
    return {"input_features": torch.randn(2, 20, 60), "labels": ids()}


def pairs() -> dict:
    return {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}


@dataclass
class Family:
    """A model of transformers: its configuration, its class, what one batch is."""

    config: str
    model: str
    batch: Callable[[], dict]
    settings: dict

    def make(self) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(1)
        return without_dropout(
            getattr(transformers, self.model)(
                getattr(transformers, self.config)(**copy.deepcopy(self.settings))
            )
        )


FAMILIES = {
    "bert": Family("BertConfig", "BertForSequenceClassification", masked_sentences, SMALL),
    "albert": Family("AlbertConfig", "AlbertForSequenceClassification", sentences,
        SMALL | {"embedding_size": 16}),
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel", text,
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | TOKENS),
    "llama": Family("LlamaConfig", "LlamaForCausalLM", text, GROUPED),
    "bart": Family("BartConfig", "BartForConditionalGeneration", tokens,
        {**TWO_STACKS, "max_position_embeddings": 64}),
    "vit": Family("ViTConfig", "ViTForImageClassification", images, IMAGE),
    "convnext": Family("ConvNextConfig", "ConvNextForImageClassification", large_images,
        {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]}),
    "wav2vec2": Family("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", sound,
        {**SMALL, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 8),
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
        "layerdrop": 0.0}),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", text,
        {**EXPERTS, "num_local_experts": 4, "output_router_logits": True}),
    "clip": Family("CLIPConfig", "CLIPModel", pairs,
        {"text_config": {**SMALL, **TOKENS, "max_position_embeddings": 32}, "vision_config": IMAGE,
        "projection_dim": 16}),
    "distilbert": Family("DistilBertConfig", "DistilBertForTokenClassification", marked_tokens,
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "bloom": Family("BloomConfig", "BloomForCausalLM", text,
        {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "roberta": Family("RobertaConfig", "RobertaForMaskedLM", tokens, {**SMALL, "pad_token_id": 1}),
    "electra": Family("ElectraConfig", "ElectraForPreTraining", marked_tokens,
        {**SMALL, "embedding_size": 32}),
    "mistral": Family("MistralConfig", "MistralForCausalLM", text, GROUPED),
    "phi": Family("PhiConfig", "PhiForCausalLM", text, SMALL),
    "gemma": Family("GemmaConfig", "GemmaForCausalLM", text, {**GROUPED, "head_dim": 8}),
    "opt": Family("OPTConfig", "OPTForCausalLM", text,
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
    "t5": Family("T5Config", "T5ForConditionalGeneration", tokens,
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0}),
    "resnet": Family("ResNetConfig", "ResNetForImageClassification", images,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    "swin": Family("SwinConfig", "SwinForImageClassification", images,
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2],
        "window_size": 4}),
    "whisper": Family("WhisperConfig", "WhisperForConditionalGeneration", spectra,
        {**TWO_STACKS, **TOKENS, "max_source_positions": 30, "max_target_positions": 20,
        "decoder_start_token_id": 1, "num_mel_bins": 20}),
    "qwen2_moe": Family("Qwen2MoeConfig", "Qwen2MoeForCausalLM", text,
        {**EXPERTS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16}),
    "mamba": Family("MambaConfig", "MambaForCausalLM", text,
        {"vocab_size": 99, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}),
}  # fmt: skip

DEBERTA = Family(
    "DebertaV2Config",
    "DebertaV2ForSequenceClassification",
    sentences,
    {
        **SMALL,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "max_position_embeddings": 64,
    },
)


def without_dropout(model: nn.Module) -> nn.Module:
    """Turn all dropout off, as modules keep it under several names."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def losses(call: Callable, parameters: Any, batches: list[dict]) -> list[float]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def train_both(family: Family) -> None:
    """Train in eager and as ORTModule with the same batches; compare losses and weights."""
    model = family.make()
    expected = copy.deepcopy(model)
    torch.manual_seed(2)
    batches = [family.batch() for _ in range(5)]
    want = losses(expected, expected.parameters(), batches)
    wrapped = ORTModule(model)
    got = losses(wrapped, wrapped.parameters(), batches)
    assert len(set(want)) == 5, "the model was meant to learn"
    assert got == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_trains_as_in_eager(name):
    train_both(FAMILIES[name])
    counters = torch_ort.counters()
    assert (counters["graphs_captured"], counters["graphs_recorded"]) == (1, 1)
    assert counters["backward_runs"] == 5
    assert counters["fallbacks"] == 0


@pytest.mark.hands_over("forward branches on data")
class TestDataDependentControlFlow:
    """DeBERTa's attention asks whether a position that it has computed is positive."""

    def test_falls_back_clearly_and_right(self, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_both(DEBERTA)
        said = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
        assert len(said) == 1
        assert "ORTModuleONNXModelException" in said[0]
        assert "data-dependent: Python asks for a number in a tensor" in said[0]
        assert "parts of the module that can be captured run in the engine, the rest" in said[0]
        assert torch_ort.counters()["fallbacks"] == 1
        assert torch_ort.counters()["forward_runs"] > 0
        assert torch_ort.counters()["backward_runs"] > 0

    def test_strict_raises(self):
        model = DEBERTA.make()
        with pytest.raises(ORTModuleONNXModelException, match="data-dependent: Python asks"):
            ORTModule(model)(**DEBERTA.batch())
        assert torch_ort.counters()["fallbacks"] == 0
