# An ORTModule handed to Accelerate: gradient accumulation, mixed precision, its saved states.
from __future__ import annotations

import pytest
import torch
from processes import run_script

pytestmark = pytest.mark.hf

SCRIPT = """
    import sys
    from types import MethodType

    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch import nn

    import torch_ort

    folder, precision = sys.argv[2:]
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
        return found

    def train(wrap):
        set_seed(0)
        accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
        )
        net = Net()
        data = torch.utils.data.TensorDataset(torch.randn(44, 16), torch.randint(0, 4, (44,)))
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
        assert list(state) == list(net.state_dict())
        x = torch.randn(3, 16)
        with torch.no_grad():
            prepared = model(x)
            bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            assert type(bare) is type(wrap(net))
            assert "_original_forward" not in vars(net)
            torch.testing.assert_close(bare(x, scale=2.0), net(x, scale=2.0), rtol=1e-4, atol=1e-5)
        return {"losses": losses, "parameters": after, "result": prepared}

    report = {"eager": train(lambda net: net), "ours": train(torch_ort.ORTModule)}
    report["counters"] = torch_ort.counters()
    torch.save(report, folder + "/rank_0.pt")
"""


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_training_and_saved_states_are_those_of_eager(tmp_path, precision):
    pytest.importorskip("accelerate")
    (report,) = run_script(SCRIPT, tmp_path, precision)
    rtol, atol = (1e-3, 1e-4) if precision == "no" else (5e-2, 2e-2)
    eager, ours, counters = report["eager"], report["ours"], report["counters"]
    assert len(eager["losses"]) == 18
    torch.testing.assert_close(ours["losses"], eager["losses"], rtol=rtol, atol=atol)
    torch.testing.assert_close(ours["result"], eager["result"], rtol=rtol, atol=atol)
    torch.testing.assert_close(ours["parameters"], eager["parameters"], rtol=rtol, atol=atol)
    assert counters["fallbacks"] == 0, counters
    assert counters["backward_runs"] == 18, counters
