"""Hugging Face's `generate` through the engine makes the tokens that eager PyTorch makes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import torch_ort

hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.hf

VOCABULARY = 97


def gpt2() -> Any:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_layer=2, n_head=2, n_embd=160, n_positions=64, vocab_size=VOCABULARY,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama() -> Any:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=160,
            intermediate_size=200, max_position_embeddings=64, vocab_size=VOCABULARY,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


CACHES = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}
WAYS = {"greedy": {"do_sample": False}, "beams": {"do_sample": False, "num_beams": 3}}


def models(make: Any) -> tuple[Any, Any]:
    """Make a model, and the same one in the engine."""
    torch.manual_seed(0)
    model = make().eval()
    # Otherwise a text may end, and one batch may be longer than the other.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ours = copy.deepcopy(model)
    ours.forward = torch.compile(ours.forward, backend="ort")
    return model, ours


def padded_prompts() -> dict[str, torch.Tensor]:
    """Two texts of other lengths, padded on the left as decoders want it."""
    ids = torch.randint(1, VOCABULARY, (2, 9))
    mask = torch.ones_like(ids)
    ids[1, :4] = mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("make", [gpt2, llama])
# A static cache is written into, which AOTAutograd traces.
@pytest.mark.parametrize("cache", ["dynamic", pytest.param("static", marks=pytest.mark.hands_over)])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_eager(make, cache, way, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")
    model, ours = models(make)
    prompts, settings = padded_prompts(), CACHES[cache] | WAYS[way] | {"max_new_tokens": 12}
    before = torch_ort.counters()
    with torch.no_grad():
        want = model.generate(**prompts, **settings)
        got = ours.generate(**prompts, **settings)
    assert torch.equal(got, want)
    after = torch_ort.counters()
    assert after["forward_runs"] - before["forward_runs"] >= 12
    for name in ("fallbacks", "frames_left_to_eager", "calls_left_to_eager"):
        assert after[name] == before[name], name


def test_growing_lengths_are_not_captured_anew():
    _, ours = models(gpt2)
    with torch.no_grad():
        for length in (5, 6):  # the second length makes the prompt's a dynamic one
            prompt = torch.ones(1, length, dtype=torch.int64)
            ours.generate(prompt, max_new_tokens=6, do_sample=False)
        before = torch_ort.counters()
        ours.generate(torch.ones(1, 9, dtype=torch.int64), max_new_tokens=40, do_sample=False)
    after = torch_ort.counters()
    assert after["forward_runs"] - before["forward_runs"] == 40
    assert after["graphs_captured"] == before["graphs_captured"]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_new_weights_count_at_once(guard):
    """Also where no version counts the change: through `.data`, and in inference mode."""
    model, ours = models(llama)
    prompt = torch.randint(1, VOCABULARY, (1, 7))
    for change in range(3):
        with guard():
            want = model.generate(prompt, max_new_tokens=8, do_sample=False)
            assert torch.equal(ours.generate(prompt, max_new_tokens=8, do_sample=False), want)
            for each in (model, ours):
                torch.manual_seed(change)
                for parameter in each.parameters():
                    weight = parameter.data if change == 0 else parameter
                    weight.add_(0.05 * torch.randn_like(weight))
