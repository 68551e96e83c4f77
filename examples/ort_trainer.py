"""Trains the language model of getting_started through ORTTrainer: one call a step.

The calls are those of ONNX Runtime Training's second trainer; scripts for it import the same names
from `onnxruntime.training` after `python -m torch_ort.compat install`.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent / "getting_started"))

from model import TransformerModel
from text import PLAYS, Vocabulary, columns, read_splits, tokenize

from torch_ort.optim import AdamConfig
from torch_ort.optim.lr_scheduler import LinearWarmupLRScheduler
from torch_ort.trainers.v1 import ORTTrainer, ORTTrainerOptions

LENGTH, BATCH = 32, 16


def loss_of_words(logits: Tensor, words: Tensor) -> Tensor:
    """Give the mean loss of all positions; logits [length, batch, words], words [length, batch]."""
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def make_trainer(num_words: int, num_steps: int, is_mixed: bool) -> ORTTrainer:
    """Make a trainer of a small model, which updates at every second step."""
    model = TransformerModel(num_words, width=64, hidden_width=64)
    description = {
        "inputs": [("words", ["length", "batch"]), ("next_words", ["length", "batch"])],
        "outputs": [("loss", [], True), ("logits", ["length", "batch", num_words])],
    }
    biases = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    adam = AdamConfig([{"params": biases, "lambda_coef": 0.0}], lr=3e-3, lambda_coef=0.01)
    options = ORTTrainerOptions(
        {
            "batch": {"gradient_accumulation_steps": 2},
            "lr_scheduler": LinearWarmupLRScheduler(max(1, num_steps // 2), warmup=0.1),
            "mixed_precision": {"enabled": is_mixed},
        }
    )
    return ORTTrainer(model, description, adam, loss_of_words, options)


def main(arguments: list[str] | None = None) -> None:
    """Train, from a checkpoint if there is one, and write a checkpoint and an ONNX file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=PLAYS, help="text to train on")
    parser.add_argument("--steps", type=int, default=400, help="steps in all")
    parser.add_argument("--stop", type=int, help="end before that, after so many")
    parser.add_argument("--checkpoint", type=Path, default=Path("ort_trainer.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--onnx", type=Path, help="where to write the trained model")
    parser.add_argument("--mixed", action="store_true", help="compute in float16 where that does")
    chosen = parser.parse_args(arguments)

    torch.manual_seed(0)
    splits = [tokenize(text) for text in read_splits(chosen.data)]
    vocabulary = Vocabulary.of(splits[0], min_frequency=3)
    train, valid = (columns(vocabulary.encode(tokens), BATCH) for tokens in splits[:2])
    trainer = make_trainer(len(vocabulary), chosen.steps, chosen.mixed)
    if chosen.resume:
        trainer.load_checkpoint(chosen.checkpoint)

    num_rows = len(train) - LENGTH
    last = min(chosen.steps, chosen.stop or chosen.steps)
    for step in range(trainer.train_step_info.step, last):
        torch.manual_seed(step)  # of dropout, so that a resumed run draws the same
        row = step * LENGTH % num_rows
        words = train[row : row + LENGTH + 1]
        loss, _ = trainer.train_step(words[:-1], words[1:])
        if step % 50 == 0 or step == last - 1:
            print(f"step {step:4}  loss {loss.item():.4f}")

    words = valid[: LENGTH + 1]
    loss, _ = trainer.eval_step(words[:-1], words[1:])
    print(f"validation loss {loss.item():.4f}")
    chosen.checkpoint.unlink(missing_ok=True)
    trainer.save_checkpoint(chosen.checkpoint, {"words": vocabulary.words})
    if chosen.onnx:
        trainer.save_as_onnx(chosen.onnx)


if __name__ == "__main__":
    main()
