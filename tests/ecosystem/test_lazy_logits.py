# Hugging Face's Trainer with logits that are made at first read: training reads none, evaluation
# and prediction read all.
from __future__ import annotations

import pytest
import torch
from processes import WITH_TRAINER, run_script

pytestmark = pytest.mark.hf

SCRIPT = """
    import sys

    import torch
    import transformers as hf

    import torch_ort
    from torch_ort.steps.lazy_logits import LazyLogits

    folder, precision = sys.argv[2:]
    vocabulary, made = 5000, []
    as_it_is = LazyLogits._with_history
    LazyLogits._with_history = lambda self: (made.append(self.shape), as_it_is(self))[1]
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, vocabulary, (128,), generator=generator) for _ in range(32)]
    rows = [{"input_ids": row, "labels": row} for row in rows]

    def accuracy(prediction):
        best = prediction.predictions[:, :-1].argmax(-1)
        return {"accuracy": float((best == prediction.label_ids[:, 1:]).mean())}

    def train(road):
        torch.manual_seed(0)
        model = hf.LlamaForCausalLM(hf.LlamaConfig(
            vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, use_cache=False,
        ))
        settings = {}
        if road == "dynamo":
            settings = {"torch_compile": True, "torch_compile_backend": "ort"}
        trainer = hf.Trainer(
            torch_ort.ORTModule(model) if road == "module" else model,
            hf.TrainingArguments(
                folder, per_device_train_batch_size=16, per_device_eval_batch_size=16, max_steps=4,
                report_to=[], use_cpu=True, logging_steps=1, bf16=precision == "bf16",
                save_strategy="no", disable_tqdm=True, optim="sgd", learning_rate=0.1,
                **settings,
            ),
            train_dataset=rows, eval_dataset=rows, compute_metrics=accuracy,
        )
        seen = []
        compute = trainer.compute_loss

        def watched(*args, return_outputs=False, **kwargs):
            loss, given = compute(*args, return_outputs=True, **kwargs)
            seen.append(type(given.logits).__name__)
            return (loss, given) if return_outputs else loss

        trainer.compute_loss = watched
        before = torch_ort.counters()["fallbacks"]
        trainer.train()
        counts = [len(made)]
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        kinds = set(seen)
        scores = trainer.evaluate()
        counts.append(len(made))
        predicted = trainer.predict(rows).predictions
        made.clear()
        return {
            "losses": [float(loss) for loss in losses], "eval": scores["eval_loss"],
            "accuracy": scores["eval_accuracy"], "made": counts, "kinds": kinds,
            "logits": torch.from_numpy(predicted),
            "fallbacks": torch_ort.counters()["fallbacks"] - before,
        }

    report = {road: train(road) for road in ("eager", "dynamo", "module")}
    torch.save(report, f"{folder}/rank_0.pt")
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trainer(tmp_path, precision):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (report,) = run_script(
        SCRIPT, tmp_path, precision, TORCH_ORT_LAZY_LOGITS="1", imports=WITH_TRAINER
    )
    near = {"rtol": 1e-4, "atol": 1e-4} if precision == "fp32" else {"rtol": 1e-2, "atol": 2e-2}
    eager = report["eager"]
    for road in ("dynamo", "module"):
        ours = report[road]
        assert ours["fallbacks"] == 0
        assert ours["kinds"] == {"LazyLogits"}
        torch.testing.assert_close(ours["losses"], eager["losses"], **near)
        torch.testing.assert_close(ours["eval"], eager["eval"], **near)
        torch.testing.assert_close(ours["logits"], eager["logits"], **near)
        assert ours["accuracy"] == pytest.approx(eager["accuracy"], abs=1e-3)
        assert ours["made"][0] == 0  # by training
    # Trainer evaluates the model that it was given, which `torch_compile` leaves as it is.
    assert report["module"]["made"][1] > 0
