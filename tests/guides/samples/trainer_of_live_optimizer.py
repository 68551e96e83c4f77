# The trainer of the introduction: a model, a criterion and an optimizer that is there already.
import onnxruntime.training.pytorch as ort
import torch


class Net(torch.nn.Module):
    """Two layers."""

    def __init__(self, num_in, num_hidden, num_out):
        super().__init__()
        self.first = torch.nn.Linear(num_in, num_hidden)
        self.second = torch.nn.Linear(num_hidden, num_out)

    def forward(self, x):
        return self.second(self.first(x).relu())


torch.manual_seed(0)
x, y = torch.randn(64, 50), torch.randn(64, 5)
model = Net(50, 20, 5)
criterion = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = ort.trainer(model, criterion, optimizer)
losses = []
for _ in range(100):
    loss, prediction = trainer.step(x, y)
    losses.append(loss.item())
assert prediction.shape == y.shape
assert losses[-1] < 0.8 * losses[0], losses
