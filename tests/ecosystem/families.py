# Small models of Hugging Face's families, made from configurations alone, and rows for them.
#
# As a script: `families.py RANK FOLDER FAMILY SETTING` trains one in eager PyTorch and on each road
# into the engine, and saves what came of it.
from __future__ import annotations

import sys
from typing import Any

import torch

FAMILIES = ("bert", "gpt2", "t5", "llama", "vit")
VOCABULARY = 64
PAD, IGNORED = 0, -100
STEPS = 20


def make_model(family: str) -> torch.nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes["intermediate_size"] = 32
    if family == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(vocab_size=VOCABULARY, **sizes, **no_dropout))
    if family == "gpt2":
        config = hf.GPT2Config(
            n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=VOCABULARY, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return hf.GPT2LMHeadModel(config)
    if family == "t5":
        config = hf.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0,
        )  # fmt: skip
        return hf.T5ForConditionalGeneration(config)
    if family == "llama":
        config = hf.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **sizes)
        return hf.LlamaForCausalLM(config)
    assert family == "vit", family
    config = hf.ViTConfig(image_size=16, patch_size=4, num_labels=4, **sizes, **no_dropout)
    return hf.ViTForImageClassification(config)


def make_rows(family: str, count: int = 48) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        images = torch.randn(count, 3, 16, 16, generator=generator)
        return [{"pixel_values": image, "labels": i % 4} for i, image in enumerate(images)]
    rows = [torch.randint(3, VOCABULARY, (6 + i % 9,), generator=generator) for i in range(count)]
    return [{"input_ids": row, "labels": row, "attention_mask": row.ne(PAD).long()} for row in rows]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad each batch to its own longest row."""
    if "pixel_values" in rows[0]:
        images = torch.stack([row["pixel_values"] for row in rows])
        return {"pixel_values": images, "labels": torch.tensor([row["labels"] for row in rows])}
    padding = {"input_ids": PAD, "labels": IGNORED, "attention_mask": 0}
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [row[name] for row in rows], batch_first=True, padding_value=value
        )
        for name, value in padding.items()
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
}
ROADS = ("module", "ort")


def train(family: str, road: str, setting: str, folder: str) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    import torch_ort

    model = make_model(family)
    compiled = {} if road in ("eager", "module") else {"torch_compile_backend": road}
    torch._dynamo.reset()
    torch_ort.reset_counters()
    trainer = Trainer(
        model=torch_ort.ORTModule(model) if road == "module" else model,
        train_dataset=make_rows(family),
        eval_dataset=make_rows(family, 8),
        data_collator=collate,
        args=TrainingArguments(
            output_dir=f"{folder}/{road}", max_steps=STEPS, logging_steps=1, report_to=[],
            use_cpu=True, save_strategy="steps", save_steps=STEPS // 2, disable_tqdm=True, seed=3,
            per_device_train_batch_size=4, learning_rate=2e-3, torch_compile=bool(compiled),
            **compiled, **SETTINGS[setting],
        ),
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    counters = torch_ort.counters()
    evaluated = trainer.evaluate()["eval_loss"]
    # The second half once more, from what was saved after the first.
    trainer.train(resume_from_checkpoint=f"{folder}/{road}/checkpoint-{STEPS // 2}")
    resumed = {name: it.detach().clone() for name, it in model.named_parameters()}
    trainer.save_model(f"{folder}/{road}/saved")
    loaded = type(model).from_pretrained(f"{folder}/{road}/saved")
    return {
        "losses": losses,
        "eval": evaluated,
        "counters": counters,
        "resumed": resumed,
        "loaded": {name: it.detach() for name, it in loaded.named_parameters()},
        "generated": generate(trainer.model, family),
    }


def generate(model: torch.nn.Module, family: str) -> torch.Tensor | None:
    if family in ("bert", "vit"):
        return None
    ids = torch.arange(3, 8).reshape(1, -1)
    return model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)


def main(folder: str, family: str, setting: str, *roads: str) -> None:
    report = {road: train(family, road, setting, folder) for road in ("eager", *roads)}
    torch.save(report, f"{folder}/rank_0.pt")


if __name__ == "__main__":
    main(*sys.argv[2:])
