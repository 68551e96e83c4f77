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


def cases(is_odd: bool) -> list[Any]:
    """Give models, caches and ways in all combinations, half of them slow; the rest has all pairs.

    The half of a road is what the other road leaves out.
    """
    found = []
    for i, make in enumerate((gpt2, llama)):
        for j, cache in enumerate(CACHES):
            # A static cache is written into, which AOTAutograd traces.
            marks = [pytest.mark.hands_over] if cache == "static" else []
            for k, way in enumerate(WAYS):
                slow = [] if (i + j + k) % 2 == is_odd else [pytest.mark.slow]
                case = f"{make.__name__}-{cache}-{way}"
                found.append(pytest.param(make, cache, way, marks=[*marks, *slow], id=case))
    return found


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


@pytest.mark.parametrize(("make", "cache", "way"), cases(is_odd=False))
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


class TestORTModule:
    """`generate` of an ORTModule."""

    @pytest.mark.parametrize(("make", "cache", "way"), cases(is_odd=True))
    def test_tokens_are_those_of_eager(self, make, cache, way, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "1")
        model, _ = models(make)
        prompts, settings = padded_prompts(), CACHES[cache] | WAYS[way] | {"max_new_tokens": 12}
        wrapped, before = torch_ort.ORTModule(model), torch_ort.counters()
        want = model.generate(**prompts, **settings)
        for _ in range(2):
            assert torch.equal(wrapped.generate(**prompts, **settings), want)
        after = torch_ort.counters()
        assert after["forward_runs"] - before["forward_runs"] >= 24
        for name in ("fallbacks", "frames_left_to_eager", "calls_left_to_eager"):
            assert after[name] == before[name], name
        assert "forward" not in vars(model)

    def test_it_trains_in_between(self):
        model, _ = models(gpt2)
        wrapped = torch_ort.ORTModule(model)
        prompt = torch.randint(1, VOCABULARY, (2, 9))
        optimizer = torch.optim.SGD(wrapped.parameters(), 1.0)
        for _ in range(3):
            settings = {"max_new_tokens": 8, "do_sample": False}
            want = model.generate(prompt, **settings)
            assert torch.equal(wrapped.generate(prompt, **settings), want)
            wrapped.train()(input_ids=prompt, labels=prompt).loss.backward()
            optimizer.step()
            wrapped.eval()

    def test_its_options_hold(self):
        model, _ = models(gpt2)
        options = torch_ort.DebugOptions(config={"disable": ["fuse_regions", "expand_composites"]})
        wrapped = torch_ort.ORTModule(model, options)
        before = torch_ort.counters()
        wrapped.generate(torch.ones(1, 5, dtype=torch.int64), max_new_tokens=3)
        after = torch_ort.counters()
        assert after["forward_runs"] - before["forward_runs"] == 3
        assert after["steps_region"] == before["steps_region"]

    def test_a_copy_generates_with_its_own_weights(self):
        model, _ = models(gpt2)
        wrapped = torch_ort.ORTModule(model)
        prompt, settings = torch.ones(1, 5, dtype=torch.int64), {"max_new_tokens": 8}
        wrapped.generate(prompt, **settings)
        other = copy.deepcopy(wrapped)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.normal_()
        want = other.module.generate(prompt, **settings)
        assert torch.equal(other.generate(prompt, **settings), want)
        assert not torch.equal(wrapped.generate(prompt, **settings), want)

    def test_generate_of_the_users_class(self):
        class Shouting(hf.GPT2LMHeadModel):
            def generate(self, *args, **kwargs):
                return super().generate(*args, **kwargs) + 1000

        torch.manual_seed(0)
        model = Shouting(gpt2().config).eval()
        model.generation_config.pad_token_id = 0
        prompt, before = torch.ones(1, 5, dtype=torch.int64), torch_ort.counters()
        got = torch_ort.ORTModule(model).generate(prompt, max_new_tokens=3)
        assert torch.equal(got, model.generate(prompt, max_new_tokens=3))
        assert torch_ort.counters()["forward_runs"] > before["forward_runs"]
