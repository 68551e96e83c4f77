# Hugging Face's Trainer, on each road into the engine, without any code of the user's for it.
from __future__ import annotations

from pathlib import Path

import families
import pytest
import torch
from processes import WITH_TRAINER, run_script

pytestmark = pytest.mark.hf

SCRIPT = Path(families.__file__).read_text()
# The others take minutes.
USUAL = [*((family, "fp32") for family in families.FAMILIES), ("gpt2", "bf16")]
CASES = [
    pytest.param(family, setting, marks=() if (family, setting) in USUAL else pytest.mark.slow)
    for family in families.FAMILIES
    for setting in families.SETTINGS
]
# bfloat16 has 8 bits of precision; a loss is a mean of many numbers of it.
TOLERANCES = {"bf16": {"rtol": 1e-2, "atol": 1e-3}}


@pytest.mark.parametrize(("family", "setting"), CASES)
def test_training_is_that_of_eager(tmp_path, family, setting):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    # Dynamo leaves T5's layers to eager, where checkpointing sets the requires_grad of a result.
    logs = (family, setting) == ("t5", "checkpointing")
    strict = {"TORCH_ORT_STRICT": "0"} if logs else {}
    (report,) = run_script(
        SCRIPT, tmp_path, family, setting, *families.ROADS, imports=WITH_TRAINER, **strict
    )
    eager = report["eager"]
    assert len(eager["losses"]) == families.STEPS
    tolerances = TOLERANCES.get(setting, {"rtol": 1e-4, "atol": 1e-5})
    for road in families.ROADS:
        ours, counters = report[road], report[road]["counters"]
        torch.testing.assert_close(ours["losses"], eager["losses"], **tolerances)
        torch.testing.assert_close(ours["eval"], eager["eval"], **tolerances)
        torch.testing.assert_close(ours["loaded"], ours["resumed"], rtol=0, atol=0)
        if setting != "bf16":
            torch.testing.assert_close(ours["resumed"], eager["resumed"], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(ours["generated"], eager["generated"])
        runs = families.STEPS * families.SETTINGS[setting].get("gradient_accumulation_steps", 1)
        assert counters["fallbacks"] == 0, (road, counters)
        assert counters["backward_runs"] >= runs, (road, counters)
        # One capture serves all lengths. Dynamo captures again once a length has changed, and each
        # of the parts that it breaks a graph into.
        most = 1 if road == "module" else 2 * (1 + counters["graph_breaks"])
        assert 1 <= counters["graphs_captured"] <= most, (road, counters)
