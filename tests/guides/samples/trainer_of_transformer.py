# The trainer of the getting-started guide: a language model, descriptions that do not fit its data.
import warnings

import torch
from onnxruntime.capi.ort_trainer import IODescription, ModelDescription, ORTTrainer

import torch_ort

LENGTH, BATCH, WORDS, WIDTH, RATE = 7, 4, 29, 16, 1.0


class Model(torch.nn.Module):
    """Words in, scores of the next word out, [length, batch, words]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decoder = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, src):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(len(src))
        return self.decoder(self.encoder(self.embedding(src), mask, is_causal=True))


criterion = torch.nn.CrossEntropyLoss()


def flat_loss(output, target):
    return criterion(output.view(-1, WORDS), target)


def describe_model():
    ids = IODescription("src", [LENGTH, BATCH], torch.float32)
    label = IODescription("label", [LENGTH, BATCH, WORDS], torch.int64)
    loss = IODescription("loss", [], torch.float32)
    output = IODescription("output", [LENGTH, BATCH, WORDS], torch.float32)
    return ModelDescription([ids, label], [loss, output])


def describe_rate():
    return IODescription("Learning_Rate", [RATE], torch.float32)


text = (torch.arange(400) * 7 % WORDS).view(-1, BATCH)


def batches():
    for i in range(0, len(text) - 1, LENGTH):
        length = min(LENGTH, len(text) - 1 - i)
        yield text[i : i + length], text[i + 1 : i + 1 + length].reshape(-1)


def trained(optimizer, **options):
    torch.manual_seed(0)
    trainer = ORTTrainer(
        Model(), flat_loss, describe_model(), optimizer, None, describe_rate(), "cpu",
        _opset_version=12, **options,
    )  # fmt: skip
    rate = torch.tensor([RATE if optimizer == "SGDOptimizer" else 0.01])
    losses = []
    for _ in range(3):
        for data, targets in batches():
            loss, output = trainer.train_step(data, targets, rate)
            losses.append(loss.item())
    assert output.shape == (*data.shape, WORDS)
    return trainer, losses


with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    trainer, losses = trained("SGDOptimizer")
words = [str(it.message) for it in told if "described as" in str(it.message)]
assert [it.split(":")[0] for it in words] == ["src", "label", "output"], words

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
eager = []
for _ in range(3):
    for data, targets in batches():
        loss = flat_loss(model(data), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        eager.append(loss.detach())
torch.testing.assert_close(torch.tensor(losses), torch.stack(eager), rtol=1e-3, atol=1e-4)

data, targets = next(batches())
trainer.eval()
loss, output = trainer(data, targets)
torch.testing.assert_close(trainer.eval_step(data, fetches=["output"]), output)
trainer.save_as_onnx("model.onnx")

warnings.simplefilter("ignore")
for name in ("LambOptimizer", "AdamOptimizer"):
    _, losses = trained(name)
    assert losses[-2] < 0.7 * losses[0], (name, losses)
# The options of several processes, in one.
trained("AdamOptimizer", world_rank=0, world_size=1, deepspeed_zero_stage=0)
trained("AdamOptimizer", world_rank=0, world_size=1, deepspeed_zero_stage=1)

assert torch_ort.counters()["fallbacks"] == 0, torch_ort.counters()
