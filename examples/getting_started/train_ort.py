"""Train a word-level transformer language model on seven plays."""

import math
import time

import torch
from model import TransformerModel
from text import Vocabulary, batches, columns, read_splits, tokenize
from torch import Tensor, nn

EPOCHS = 3
LENGTH = 35
BATCH_SIZE = 20


def train_epoch(model: nn.Module, text: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Train once over the text; return the mean loss of its batches."""
    model.train()
    losses = []
    for words, targets in batches(text, LENGTH):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    """Return the mean loss per word."""
    model.eval()
    total = 0.0
    for words, targets in batches(text, LENGTH):
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), targets)
        total += len(targets) * loss.item()
    return total / text[1:].numel()


def main() -> None:
    """Train, validate after each epoch, and test at the end."""
    torch.manual_seed(0)
    tokens = [tokenize(text) for text in read_splits()]
    vocabulary = Vocabulary.of(tokens[0], min_frequency=3)
    train, valid, test = (columns(vocabulary.encode(part), BATCH_SIZE) for part in tokens)

    model = TransformerModel(len(vocabulary))
    model = torch.compile(model, backend="ort")
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.95)
    for epoch in range(1, EPOCHS + 1):
        start = time.perf_counter()
        loss = train_epoch(model, train, optimizer)
        seconds = time.perf_counter() - start
        perplexity = math.exp(evaluate(model, valid))
        print(f"epoch {epoch}: loss {loss:.3f}, perplexity {perplexity:.1f}, {seconds:.1f} s")
        schedule.step()
    print(f"test perplexity {math.exp(evaluate(model, test)):.1f}")


if __name__ == "__main__":
    main()
