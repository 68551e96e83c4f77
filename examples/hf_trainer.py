"""Train a small GPT-2 on nine plays by Hugging Face's Trainer, in eager PyTorch or in the engine.

`--road module` wraps the model in an ORTModule, `--road ort` lets the Trainer compile it. The text
is read byte by byte, so that no tokenizer is needed; the model is made from a configuration.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from command_line import Parser, positive, print_counters, run, whole
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import torch_ort
from torch_ort.integrations.transformers import ORTCallback

PLAYS = Path(__file__).parent / "data" / "plays"
PROMPT = "The king "


class Bytes(Dataset):
    """Pieces of a text, each `length` bytes long."""

    def __init__(self, text: bytes, length: int) -> None:
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length = length

    def __len__(self) -> int:
        return len(self.ids) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.ids[index * self.length : (index + 1) * self.length]
        return {"input_ids": piece, "labels": piece}


def make_model(length: int) -> GPT2LMHeadModel:
    """Return a model of two layers for texts of `length` bytes."""
    config = GPT2Config(
        vocab_size=256, n_positions=length, n_embd=128, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def train(options: argparse.Namespace) -> None:
    """Train, evaluate, save, and let the model write a line."""
    text = b"".join(path.read_bytes() for path in sorted(PLAYS.glob("*.txt")))
    kept = len(text) * 9 // 10
    set_seed(options.seed)
    model = make_model(options.length)
    compiled = {"torch_compile": True, "torch_compile_backend": "ort"}
    callback = ORTCallback()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=torch_ort.ORTModule(model) if options.road == "module" else model,
            train_dataset=Bytes(text[:kept], options.length),
            eval_dataset=Bytes(text[kept:], options.length),
            callbacks=[callback],
            args=TrainingArguments(
                output_dir=options.save or folder, max_steps=options.steps, report_to=[],
                logging_steps=max(options.steps // 10, 1), save_strategy="no", use_cpu=True,
                per_device_train_batch_size=options.batch_size,
                per_device_eval_batch_size=64, learning_rate=options.lr,
                bf16=options.bf16, seed=options.seed, disable_tqdm=True,
                **(compiled if options.road == "ort" else {}),
            ),
        )  # fmt: skip
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        if options.save:
            trainer.save_model()
    prompt = torch.tensor([list(PROMPT.encode())])
    written = trainer.model.generate(
        input_ids=prompt, max_new_tokens=min(60, options.length - prompt.shape[1]),
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    print(f"evaluation loss {loss:.4f}")
    print(f"it writes: {bytes(written[0].tolist()).decode(errors='replace')!r}")
    print(f"graphs {callback.done['graphs_captured']}, backward {callback.done['backward_runs']}")
    print_counters("ort")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--road", choices=("module", "ort", "eager"), default="module")
    parser.add_argument("--steps", type=whole(1), default=300, help="training steps")
    parser.add_argument("--batch-size", type=whole(1), default=16, help="pieces in a step")
    parser.add_argument("--length", type=whole(16), default=128, help="bytes of a piece")
    parser.add_argument("--lr", type=positive, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--bf16", action="store_true", help="train under bfloat16 autocast")
    parser.add_argument("--save", metavar="FOLDER", help="where the trained model goes")
    parser.add_argument("--seed", type=whole(0), default=0, help="seed of all random numbers")
    options = parser.parse_args(argv)
    return run(parser, lambda: train(options))


if __name__ == "__main__":
    sys.exit(main())
