# Hugging Face's Trainer finds the backend through its entry point, without an import of ours.
from __future__ import annotations

import json
import textwrap

import pytest
from own_process import run_python

SCRIPT = """
    import json
    import sys

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    backend, folder = sys.argv[1:]

    def losses(**settings):
        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=64,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
        data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (16, 12))]
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            train_dataset=data,
            args=TrainingArguments(
                output_dir=folder, max_steps=4, per_device_train_batch_size=4, logging_steps=1,
                learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True, seed=3,
                disable_tqdm=True, **settings,
            ),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    report = {"eager": losses()}
    report["compiled"] = losses(torch_compile=True, torch_compile_backend=backend)
    engine = sys.modules.get("torch_ort")
    report["counters"] = engine.counters() if engine else {}
    print("REPORT " + json.dumps(report))
"""


@pytest.mark.hf
def test_trainer_uses_the_engine_without_an_import_of_ours(backend, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    name = "onnxrt" if backend == "ort" else backend
    done = run_python("-c", textwrap.dedent(SCRIPT), name, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    report = json.loads(line.removeprefix("REPORT "))
    assert len(report["eager"]) == 4
    assert report["compiled"] == pytest.approx(report["eager"], rel=1e-3)
    if backend == "ort":
        assert report["counters"]["fallbacks"] == 0
        assert report["counters"]["forward_runs"] >= 4
        assert report["counters"]["backward_runs"] >= 4
