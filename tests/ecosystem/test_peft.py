# LoRA adapters of PEFT, trained by a Trainer.
from __future__ import annotations

from pathlib import Path

import families
import pytest
import torch
from processes import run_script

pytestmark = pytest.mark.hf

SCRIPT = """
    import os
    import sys

    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Trainer, TrainingArguments

    import torch_ort

    _, _, folder, tests = sys.argv
    sys.path.insert(0, tests)
    import families

    def train(road):
        torch._dynamo.reset()
        torch_ort.reset_counters()
        torch.manual_seed(1)
        settings = LoraConfig(
            r=4, lora_alpha=8, target_modules=["c_attn"], init_lora_weights=False,
            fan_in_fan_out=True, task_type="CAUSAL_LM",
        )
        model = get_peft_model(families.make_model("gpt2"), settings)
        compiled = {} if road != "ort" else {"torch_compile_backend": road, "torch_compile": True}
        trainer = Trainer(
            model=torch_ort.ORTModule(model) if road == "module" else model,
            train_dataset=families.make_rows("gpt2"),
            eval_dataset=families.make_rows("gpt2", 8),
            data_collator=families.collate,
            args=TrainingArguments(
                output_dir=f"{folder}/{road}", max_steps=8, logging_steps=1, report_to=[],
                use_cpu=True, save_strategy="no", disable_tqdm=True, seed=3, learning_rate=1e-2,
                **compiled,
            ),
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        counters = torch_ort.counters()
        trainer.save_model(f"{folder}/{road}/saved")
        loaded = PeftModel.from_pretrained(families.make_model("gpt2"), f"{folder}/{road}/saved")
        adapters = {name: it for name, it in model.state_dict().items() if "lora" in name}
        for name, it in adapters.items():
            torch.testing.assert_close(loaded.state_dict()[name], it, rtol=0, atol=0)
        return {
            "losses": losses, "counters": counters, "adapters": adapters,
            "eval": trainer.evaluate()["eval_loss"],
            "is_peft": isinstance(trainer.model, PeftModel),
        }

    torch.save({road: train(road) for road in ("eager", "module", "ort")}, f"{folder}/rank_0.pt")
"""


def test_training_is_that_of_eager(tmp_path):
    pytest.importorskip("peft")
    (report,) = run_script(SCRIPT, tmp_path, str(Path(families.__file__).parent))
    eager = report["eager"]
    for road in ("module", "ort"):
        ours = report[road]
        for part in ("losses", "eval", "adapters"):
            torch.testing.assert_close(ours[part], eager[part], rtol=1e-3, atol=1e-4)
        assert ours["is_peft"]
        assert ours["counters"]["fallbacks"] == 0
        assert ours["counters"]["backward_runs"] >= 8
