# Lightning, with the network compiled or wrapped in `configure_model`, or with the LightningModule
# itself compiled: forward and the steps of training and validation, in one context of Dynamo.
from __future__ import annotations

import pytest
import torch
from processes import run_script

pytestmark = pytest.mark.hf

SCRIPT = """
    import glob
    import sys

    import lightning
    import torch

    import torch_ort

    _, _, folder, precision = sys.argv

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3)

        def forward(self, x):
            return self.last(torch.nn.functional.gelu(self.first(x)))

    class Training(lightning.LightningModule):
        def __init__(self, road):
            super().__init__()
            torch.manual_seed(0)
            self.net, self.road, self.losses = Net(), road, []

        def configure_model(self):
            if self.road == "compile":
                self.net = torch.compile(self.net, backend="ort")
            elif self.road == "module":
                self.net = torch_ort.ORTModule(self.net)

        def training_step(self, batch, index):
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            if not torch.compiler.is_compiling():
                self.losses.append(loss.item())
            return loss

        def on_train_batch_end(self, outputs, batch, index):
            if self.road == "whole":
                self.losses.append(2 * outputs["loss"].item())  # divided by the accumulated ones

        def configure_optimizers(self):
            return torch_ort.optim.AdamW(self.parameters(), lr=1e-2)

    def train(road):
        torch._dynamo.reset()
        torch_ort.reset_counters()
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(40, 8, generator=generator)
        labels = torch.randint(0, 3, (40,), generator=generator)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(rows, labels), batch_size=8
        )
        losses, checkpoint = [], None
        for epochs in (2, 3):  # the third one goes on from what was saved after the second
            training = Training(road)
            trainer = lightning.Trainer(
                accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False,
                default_root_dir=f"{folder}/{road}", precision=precision,
                enable_model_summary=False, accumulate_grad_batches=2, gradient_clip_val=1.0,
            )
            trained = torch.compile(training, backend="ort") if road == "whole" else training
            trainer.fit(trained, loader, ckpt_path=checkpoint, weights_only=False)
            losses += training.losses
            checkpoint = glob.glob(f"{folder}/{road}/checkpoints/*.ckpt")[0]
        return {"losses": losses, "counters": torch_ort.counters()}

    report = {road: train(road) for road in ("eager", "compile", "module", "whole")}
    torch.save(report, f"{folder}/rank_0.pt")
"""


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_is_that_of_eager(tmp_path, precision):
    pytest.importorskip("lightning")
    (report,) = run_script(SCRIPT, tmp_path, precision)
    assert len(report["eager"]["losses"]) == 15
    tolerance = 1e-5 if precision == "32-true" else 1e-2
    for road in ("compile", "module", "whole"):
        ours, counters = report[road]["losses"], report[road]["counters"]
        torch.testing.assert_close(ours, report["eager"]["losses"], rtol=tolerance, atol=tolerance)
        assert counters["fallbacks"] == 0
        assert counters["graph_breaks"] == 0
        assert counters["calls_left_to_eager"] == 0
        assert counters["backward_runs"] == 15
