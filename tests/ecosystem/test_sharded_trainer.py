# FSDP2 by Trainer and Accelerate on two ranks, around an ORTModule of a model of transformers'.
from __future__ import annotations

from pathlib import Path

import families
import pytest
import torch
import torch.distributed as dist
from processes import WITH_TRAINER, run_script

pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

SCRIPT = """
    import os
    import sys
    import warnings

    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel, Trainer, TrainingArguments

    import torch_ort

    rank, folder, tests, family, layer = sys.argv[1:]
    sys.path.insert(0, tests)
    import families

    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
    make_state = PartialState.__init__

    def on_cpu(self, *args, **settings):
        # Accelerate shards nothing on CPUs, though all of it works there.
        make_state(self, *args, **settings)
        if self._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = on_cpu
    sharding = {"fsdp_version": 2, "version": 2, "auto_wrap_policy": "NO_WRAP"}
    if layer:
        sharding["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        sharding["transformer_layer_cls_to_wrap"] = [layer]

    def train(name, wrap):
        torch_ort.reset_counters()
        model = families.make_model(family)
        trainer = Trainer(
            model=wrap(model), train_dataset=families.make_rows(family),
            eval_dataset=families.make_rows(family, 8), data_collator=families.collate,
            args=TrainingArguments(
                output_dir=f"{folder}/{name}", max_steps=6, logging_steps=1, report_to=[],
                use_cpu=True, save_steps=3, disable_tqdm=True, seed=3, learning_rate=2e-3,
                per_device_train_batch_size=4, fsdp=True, fsdp_config=dict(sharding),
            ),
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        counters = torch_ort.counters()
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.save_model(f"{folder}/{name}/saved")
        dist.barrier()
        loaded = type(model).from_pretrained(f"{folder}/{name}/saved")
        for (_, saved), own in zip(loaded.named_parameters(), trainer.model.parameters()):
            torch.testing.assert_close(saved, own.full_tensor(), rtol=0, atol=0)
        trainer.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-3")
        return {
            "losses": losses, "eval": evaluated, "counters": counters,
            "kinds": [isinstance(trainer.model, kind) for kind in (PreTrainedModel, FSDPModule)],
            "resumed": [p.full_tensor().detach() for p in trainer.model.parameters()],
        }

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = {"eager": train("eager", lambda model: model)}
        report["ours"] = train("ours", torch_ort.ORTModule)
    report["warnings"] = [str(it.message) for it in caught if "ORTModule" in str(it.message)]
    torch.save(report, f"{folder}/rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
"""
LAYERS = {"gpt2": "GPT2Block", "llama": "LlamaDecoderLayer"}


@pytest.mark.parametrize(
    ("family", "is_by_layer"), [("gpt2", True), ("gpt2", False), ("llama", True)]
)
def test_parts_run_in_the_engine(tmp_path, family, is_by_layer):
    """Accelerate shards embeddings and the head beside the rest, so that no whole is captured."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    tests = str(Path(families.__file__).parent)
    layer = LAYERS[family] if is_by_layer else ""
    ranks = run_script(
        SCRIPT, tmp_path, tests, family, layer, ranks=2, TORCH_ORT_STRICT="0", imports=WITH_TRAINER
    )
    for report in ranks:
        eager, ours = report["eager"], report["ours"]
        assert eager["kinds"] == ours["kinds"] == [True, True]
        for part in ("losses", "eval"):
            torch.testing.assert_close(ours[part], eager[part], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours["resumed"], eager["resumed"], rtol=1e-3, atol=1e-4)
        (words,) = set(report["warnings"])
        assert "of fully_shard, which takes an ORTModule and no part of one" in words
        assert "those parts of the module that can be captured run in the engine" in words
        # Two layers in each of the six steps but the first.
        counters = ours["counters"]
        assert counters["graphs_captured"] == 2
        assert counters["forward_runs"] == counters["backward_runs"] == 10
