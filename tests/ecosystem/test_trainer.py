# Hugging Face's Trainer with a model inside an ORTModule.
from __future__ import annotations

import pytest
import torch
from processes import run_script

pytestmark = pytest.mark.hf

SCRIPT = """
    import sys

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import torch_ort

    folder, tied = sys.argv[2], sys.argv[3] == "tied"
    settings = {"bf16": sys.argv[3] == "bf16"}

    class SavingTrainer(Trainer):
        def save_model(self, output_dir=None, _internal_call=False):
            self.model.module.save_pretrained(output_dir or self.args.output_dir)

    def train(wrap, name):
        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=64,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            tie_word_embeddings=tied,
        )
        rows = torch.randint(0, 64, (24, 12))
        data = [
            {"input_ids": row[: 8 + i % 3], "labels": row[: 8 + i % 3], "unknown": 1}
            for i, row in enumerate(rows.repeat_interleave(3, 0))
        ]
        model = GPT2LMHeadModel(config)
        # Trainer saves the state of what is no model of theirs, where no two may share memory.
        trainer = (SavingTrainer if tied and name == "ours" else Trainer)(
            model=wrap(model),
            train_dataset=data,
            eval_dataset=data[:6],
            args=TrainingArguments(
                output_dir=f"{folder}/{name}", max_steps=4, per_device_train_batch_size=1,
                per_device_eval_batch_size=1, gradient_accumulation_steps=2, logging_steps=1,
                learning_rate=1e-2, report_to=[], save_strategy="steps", save_steps=2,
                use_cpu=True, seed=3, disable_tqdm=True,
                label_names=["labels"],  # else it looks at the class of the model
                **settings,
            ),
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        # The last two steps once more, from what was saved after the first two.
        trainer.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-2")
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, parameters[name], rtol=1e-3, atol=1e-4)
        return {
            "losses": losses, "parameters": parameters, "eval": trainer.evaluate()["eval_loss"]
        }

    report = {"eager": train(lambda model: model, "eager")}
    report["ours"] = train(torch_ort.ORTModule, "ours")
    report["counters"] = torch_ort.counters()
    torch.save(report, folder + "/rank_0.pt")
"""


@pytest.mark.parametrize("setting", ["tied", "bf16"])
def test_training_is_that_of_eager(tmp_path, setting):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    # In bfloat16 PyTorch's own kernels run, whose results are eager's to the bit.
    kernels = {"TORCH_ORT_DISABLE": "own_kernels"} if setting == "bf16" else {}
    (report,) = run_script(SCRIPT, tmp_path, setting, **kernels)
    eager, ours, counters = report["eager"], report["ours"], report["counters"]
    assert len(eager["losses"]) == 4
    for part in ("losses", "parameters", "eval"):
        torch.testing.assert_close(ours[part], eager[part], rtol=1e-3, atol=1e-4)
    assert counters["fallbacks"] == 0, counters
    assert counters["backward_runs"] == 12, counters
