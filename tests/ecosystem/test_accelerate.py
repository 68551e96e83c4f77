# Models in the engine that Accelerate prepares: gradient accumulation, mixed precision, loss
# scales, its saved states.
from __future__ import annotations

import pytest
import torch
from processes import WITH_TRAINER, run_script

pytestmark = pytest.mark.hf

SCRIPT = """
    import sys
    from types import MethodType

    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import set_seed
    from torch import nn

    import torch_ort

    folder, road, precision, scales = sys.argv[2:]
    torch.set_num_threads(1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 4)

        def forward(self, x, *, scale=None):
            y = self.down(self.norm(nn.functional.gelu(self.up(x))))
            return y if scale is None else y * scale

    def losses_of(model, optimizer, loader, accelerator):
        found = []
        for x, y in loader:
            with accelerator.accumulate(model):
                result = model(x)
                assert result.dtype == torch.float32
                loss = nn.functional.cross_entropy(result, y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
            if accelerator.scaler is not None:
                found.append(accelerator.scaler.get_scale())
                found.append(float(optimizer.step_was_skipped))
        return found

    def train(wrap, **settings):
        set_seed(0)
        AcceleratorState._reset_state(reset_partial_state=True)  # which keeps the first backend
        accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2, **settings
        )
        net, rows = Net(), torch.randn(44, 16)
        if scales == "scaled":
            # On CPUs Accelerate makes no scaler of its own, and takes one.
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
            rows[20] = torch.inf
        data = torch.utils.data.TensorDataset(rows, torch.randint(0, 4, (44,)))
        model, optimizer, loader = accelerator.prepare(
            wrap(net), torch.optim.AdamW(net.parameters(), lr=1e-2),
            torch.utils.data.DataLoader(data, batch_size=8),
        )
        losses = losses_of(model, optimizer, loader, accelerator)
        accelerator.save_state(folder)
        losses += losses_of(model, optimizer, loader, accelerator)
        after = {name: p.detach().clone() for name, p in net.named_parameters()}
        # What was trained since is undone, and comes again.
        accelerator.load_state(folder)
        losses += losses_of(model, optimizer, loader, accelerator)
        for name, p in net.named_parameters():
            torch.testing.assert_close(p, after[name], rtol=1e-3, atol=1e-4)
        state = accelerator.get_state_dict(model)
        names = [name.removeprefix("_orig_mod.") for name in state]
        assert names == list(net.state_dict())
        x = torch.randn(3, 16)
        with torch.no_grad():
            prepared = model(x)
            bare = accelerator.unwrap_model(
                model, keep_fp32_wrapper=False, keep_torch_compile=False
            )
            assert type(bare) is type(wrap(net))
            assert "_original_forward" not in vars(net)
            torch.testing.assert_close(bare(x, scale=2.0), net(x, scale=2.0), rtol=1e-4, atol=1e-5)
        return {"losses": losses, "parameters": after, "result": prepared}

    report = {"eager": train(lambda net: net)}
    if road == "ortmodule":
        report["ours"] = train(torch_ort.ORTModule)
    else:
        report["ours"] = train(lambda net: net, dynamo_backend="onnxrt")
    report["counters"] = torch_ort.counters()
    torch.save(report, folder + "/rank_0.pt")
"""


# Of fp16, Accelerate does nothing on a CPU: it trains in float32.
TOLERANCES = {"no": (1e-3, 1e-4), "fp16": (1e-3, 1e-4), "bf16": (5e-2, 2e-2)}


@pytest.mark.parametrize(
    ("precision", "scales"), [("no", ""), ("bf16", ""), ("bf16", "scaled"), ("fp16", "scaled")]
)
@pytest.mark.parametrize("road", ["ortmodule", "onnxrt"])
def test_training_and_saved_states_are_those_of_eager(tmp_path, road, precision, scales):
    pytest.importorskip("accelerate")
    (report,) = run_script(SCRIPT, tmp_path, road, precision, scales, imports=WITH_TRAINER)
    rtol, atol = TOLERANCES[precision]
    eager, ours, counters = report["eager"], report["ours"], report["counters"]
    assert len(eager["losses"]) == (54 if scales == "scaled" else 18)
    torch.testing.assert_close(
        ours["losses"], eager["losses"], rtol=rtol, atol=atol, equal_nan=True
    )
    torch.testing.assert_close(ours["result"], eager["result"], rtol=rtol, atol=atol)
    torch.testing.assert_close(ours["parameters"], eager["parameters"], rtol=rtol, atol=atol)
    if scales == "scaled":
        # Of three updates in a pass over the rows the second is left out, and the scale halved.
        assert eager["losses"][1::3][:6] == [256.0, 256.0, 256.0, 128.0, 128.0, 128.0]
        assert eager["losses"][2::3][:6] == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
        assert ours["losses"][1::3] == eager["losses"][1::3]
        assert ours["losses"][2::3] == eager["losses"][2::3]
    assert counters["fallbacks"] == 0, counters
    assert counters["backward_runs"] == 18, counters
