# The second trainer: options, schedules, mixed precision, checkpoints of one file.
import onnxruntime
import torch
from onnxruntime.training import (
    ORTTrainer,
    ORTTrainerOptions,
    TrainStepInfo,
    amp,
    checkpoint,
    model_desc_validation,
    optim,
)

torch.manual_seed(0)
x, y = torch.randn(16, 5), torch.randint(3, (16,))
desc = {
    "inputs": [("data", ["batch", 5]), ("target", ["batch"])],
    "outputs": [("loss", [], True), ("scores", ["batch", 3])],
}
schedule = optim.lr_scheduler.LinearWarmupLRScheduler(total_steps=20, warmup=0.1)
scaler = amp.loss_scaler.DynamicLossScaler(loss_scale=256.0)


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    options = ORTTrainerOptions(
        {
            "batch": {"gradient_accumulation_steps": 2},
            "device": {"id": "cpu"},
            "lr_scheduler": schedule,
            "mixed_precision": {"enabled": True, "loss_scaler": scaler},
        }
    )
    config = optim.AdamConfig(lr=0.05, params=[{"params": ["0.bias"], "lambda_coef": 0.0}])
    return ORTTrainer(model, desc, config, torch.nn.CrossEntropyLoss(), options)


trainer = make(0)
losses = [trainer.train_step(x, y)[0].item() for _ in range(30)]
assert losses[-1] < 0.7 * losses[0], losses
assert isinstance(trainer.train_step_info, TrainStepInfo)
trainer.save_checkpoint("run.ort", {"epoch": 1})
other = make(1)
assert other.load_checkpoint("run.ort") == {"epoch": 1}
torch.testing.assert_close(other.eval_step(x, y), trainer.eval_step(data=x, target=y))
weights = checkpoint.aggregate_checkpoints(["run.ort"])
torch.testing.assert_close(weights, trainer.state_dict(pytorch_format=True))
trainer.save_as_onnx("model.onnx")
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
assert [it.name for it in session.get_inputs()] == ["data", "target"]
words = "model_desc: inputs: got [], want a list of (name, shape); outputs: got None"
error = None
try:
    model_desc_validation._ORTTrainerModelDesc({"inputs": []})
except ValueError as caught:
    error = str(caught)
assert error is not None
assert error.startswith(words), error
