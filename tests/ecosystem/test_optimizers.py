# Optimizers of torch_ort on parameters that two processes share.
from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_script

SCRIPT = """
    import sys

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from torch_ort import optim

    rank, folder, name, placement = int(sys.argv[1]), *sys.argv[2:]
    store = dist.FileStore(folder + "/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    placements = [Shard(0) if placement == "shard" else Replicate()]
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(6, 4))
    divided = nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, placements))
    optimizers = [getattr(optim, name)([it], lr=0.1, weight_decay=0.1) for it in (whole, divided)]
    norms = []
    for _ in range(3):
        whole.grad = torch.randn(6, 4)
        divided.grad = distribute_tensor(whole.grad, mesh, placements)
        for optimizer in optimizers:
            optimizer.step(max_norm=1.0)
        norms.append([optimizer.grad_norm for optimizer in optimizers])
    torch.save(
        {"whole": whole.detach(), "divided": divided.full_tensor().detach(), "norms": norms},
        f"{folder}/rank_{rank}.pt",
    )
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["FusedAdam", "Lamb"])
@pytest.mark.parametrize("placement", ["shard", "replicate"])
def test_divided_parameters_become_what_whole_ones_do(
    tmp_path: Path, name: str, placement: str
) -> None:
    for report in run_script(SCRIPT, tmp_path, name, placement, ranks=2):
        assert (report["whole"] - report["divided"]).abs().max() < 1e-6
        for whole, divided in report["norms"]:
            assert divided == pytest.approx(whole, rel=1e-6)
