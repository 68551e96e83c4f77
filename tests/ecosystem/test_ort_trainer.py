# The trainers that optimum had, and the callback.
from __future__ import annotations

import copy
from pathlib import Path

import families
import pytest
import torch
from own_process import run_python
from processes import WITH_TRAINER, run_script

import torch_ort

pytestmark = pytest.mark.hf

SCRIPT = """
    import os
    import sys

    import torch
    import transformers

    import torch_ort
    from torch_ort.integrations import transformers as ours

    _, _, folder, tests, family, setting = sys.argv
    sys.path.insert(0, tests)
    import families

    def weighted_loss(outputs, labels, num_items_in_batch=None):
        logits = outputs["logits"][:, :-1]
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=-100
        )
        return losses.sum() / num_items_in_batch


    def train(name, trainer_class, arguments_class, **own):
        settings, extra = dict(own), {}
        if setting == "smoothing":
            settings["label_smoothing_factor"] = 0.1
        elif setting == "own_loss":
            extra["compute_loss_func"] = weighted_loss
        elif setting == "generation":
            settings |= {"predict_with_generate": True, "generation_max_length": 6}
        callback = ours.ORTCallback()
        make = lambda: families.make_model(family)
        model = {"model_init": make} if setting == "model_init" else {"model": make()}
        trainer = trainer_class(
            **model,
            args=arguments_class(
                output_dir=f"{folder}/{name}", max_steps=6, logging_steps=1, report_to=[],
                use_cpu=True, save_strategy="no", disable_tqdm=True, seed=3,
                gradient_accumulation_steps=2, per_device_train_batch_size=4, learning_rate=1e-2,
                **settings,
            ),
            train_dataset=families.make_rows(family),
            eval_dataset=families.make_rows(family, 8),
            data_collator=families.collate,
            callbacks=[callback],
            **extra,
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        done = callback.done
        evaluated = trainer.evaluate()["eval_loss"]
        predicted = trainer.predict(families.make_rows(family, 4)).predictions
        trainer.save_model(f"{folder}/{name}/saved")
        loaded = type(families.make_model(family)).from_pretrained(f"{folder}/{name}/saved")
        inner = getattr(trainer.model, "module", trainer.model)
        for key, value in inner.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[key], value, rtol=0, atol=0)
        return {
            "losses": losses, "eval": evaluated, "done": done,
            "predicted": torch.as_tensor(predicted[0] if family == "t5" and
                isinstance(predicted, tuple) else predicted),
            "class": type(trainer.model).__name__,
            "is_model": isinstance(trainer.model, transformers.PreTrainedModel),
            "files": sorted(it for it in os.listdir(f"{folder}/{name}") if it.endswith(".onnx")),
        }

    sequence = setting == "generation"
    report = {
        "eager": train(
            "eager",
            transformers.Seq2SeqTrainer if sequence else transformers.Trainer,
            transformers.Seq2SeqTrainingArguments if sequence else transformers.TrainingArguments,
        )
    }
    trainer = ours.ORTSeq2SeqTrainer if sequence else ours.ORTTrainer
    arguments = ours.ORTSeq2SeqTrainingArguments if sequence else ours.ORTTrainingArguments
    report["ours"] = train("ours", trainer, arguments)
    report["with_loss"] = train("with_loss", trainer, arguments, use_module_with_loss=True)
    report["plain_arguments"] = train(
        "plain", ours.ORTTrainer, transformers.TrainingArguments
    ) if not sequence else report["ours"]
    if setting == "smoothing":
        report["saved"] = train("onnx", trainer, arguments, save_onnx=True, onnx_prefix="gpt")
    torch.save(report, f"{folder}/rank_0.pt")
"""
CASES = [("gpt2", "smoothing"), ("gpt2", "own_loss"), ("t5", "generation"), ("bert", "model_init")]


@pytest.mark.parametrize(("family", "setting"), CASES)
def test_training_is_that_of_transformers(tmp_path, family, setting):
    tests = str(Path(families.__file__).parent)
    (report,) = run_script(SCRIPT, tmp_path, tests, family, setting, imports=WITH_TRAINER)
    eager = report.pop("eager")
    assert eager["done"]["forward_runs"] == 0
    for name, ours in report.items():
        for part in ("losses", "eval", "predicted"):
            torch.testing.assert_close(ours[part], eager[part], rtol=1e-4, atol=1e-5)
        assert ours["done"]["fallbacks"] == 0, name
        assert ours["done"]["graphs_captured"] == 1, name
        assert ours["done"]["backward_runs"] == 12, name
        assert ours["is_model"], name
        assert bool(ours["files"]) == (name == "saved")
    if "saved" in report:
        assert "gpt_optimized_training.onnx" in report["saved"]["files"]


class Scores(torch.nn.Module):
    """Branches on what its first layers give, if it is told to."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.branches = branches
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh())
        self.head = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        if self.branches and y.sum() > 0:
            y = -y
        return {"logits": self.head(y)}


def loss_with_branch(outputs, labels, count):
    loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / count
    return loss * 2 if loss > 1 else loss


# Graphs that run in each of the calls after the first one, which runs in PyTorch.
@pytest.mark.parametrize(("branches", "graphs"), [(False, 1), (True, 2)])
@pytest.mark.hands_over("branches on data")
def test_what_is_not_captured_with_its_loss_runs_in_parts(branches, graphs, monkeypatch):
    hf = pytest.importorskip("torch_ort.integrations.transformers")
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    torch.manual_seed(0)
    eager = Scores(branches)
    ours = hf._WithLoss(copy.deepcopy(eager), torch_ort.DebugOptions(), loss_with_branch)

    def losses(call, parameters) -> list[torch.Tensor]:
        found = []
        for step in range(4):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            loss = call(x, torch.arange(5) % 3)
            found += [loss.detach(), *torch.autograd.grad(loss, parameters)]
        return found

    names = {"labels_of_trainer": None, "num_items_in_batch": 5}
    with pytest.warns(UserWarning, match="those parts of the module that can be captured run in"):
        got = losses(
            lambda x, y: ours(x=x, **{**names, "labels_of_trainer": y})["loss"],
            list(ours.module.parameters()),
        )
    want = losses(lambda x, y: loss_with_branch(eager(x), y, 5), list(eager.parameters()))
    torch.testing.assert_close(got, want)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 1
    assert counters["forward_runs"] == counters["backward_runs"] == 3 * graphs
    ours.recapture()
    assert all("forward" not in vars(part) for part in ours.module.modules())


def test_wrong_arguments_are_refused(tmp_path):
    hf = pytest.importorskip("torch_ort.integrations.transformers")
    loud = hf.ORTTrainingArguments(output_dir=str(tmp_path), onnx_log_level="LOUD")
    with pytest.raises(ValueError, match="onnx_log_level: got 'LOUD', want one of VERBOSE"):
        loud.debug_options()
    nameless = hf.ORTTrainingArguments(output_dir=str(tmp_path), save_onnx=True)
    with pytest.raises(ValueError, match="onnx_prefix: got nothing"):
        nameless.debug_options()


def test_the_import_says_what_is_missing():
    script = (
        "import sys\nsys.modules['accelerate'] = None\n"
        "try:\n    import torch_ort.integrations.transformers\n"
        "except ImportError as error:\n    print(error)"
    )
    done = run_python("-c", script)
    assert "needs transformers 5 and accelerate 1: pip install" in done.stdout, done.stderr
