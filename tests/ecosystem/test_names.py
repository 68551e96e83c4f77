# Our names among those of Accelerate and Transformers, whoever is imported first.
from __future__ import annotations

import importlib.metadata
import textwrap
import types

import pytest
import torch
from own_process import run_python

pytestmark = pytest.mark.hf

IMPORTS = {
    "before": "import torch_ort, transformers, accelerate, transformers.trainer_optimizer",
    "after": "import transformers, accelerate, transformers.trainer_optimizer, torch_ort",
}
CHECKS = """
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from transformers import trainer_optimizer
from transformers.training_args import OptimizerNames
from torch_ort.integrations import names
"""


def run(script: str) -> str:
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("order", IMPORTS)
def test_names_are_known_whoever_is_imported_first(order):
    run(
        IMPORTS[order]
        + CHECKS
        + textwrap.dedent("""
            assert TorchDynamoPlugin(backend="ort").to_dict()["backend"] == "ort"
            assert DynamoBackend("ORT") is DynamoBackend.ORT is DynamoBackend["ORT"]
            assert "ORT" in DynamoBackend.list() and str(DynamoBackend.ORT) == "ORT"
            name = OptimizerNames("adamw_ort_fused")
            assert name is OptimizerNames.ADAMW_ORT_FUSED and name == "adamw_ort_fused"
            assert name in trainer_optimizer._OPTIMIZER_HANDLERS
        """)
    )


def test_registering_twice_adds_one_name_and_unregistering_takes_it_out():
    run(
        IMPORTS["before"]
        + CHECKS
        + textwrap.dedent("""
            from transformers import TrainingArguments
            handlers = trainer_optimizer._OPTIMIZER_HANDLERS
            count, known = len(DynamoBackend), len(handlers)
            names.register()
            assert (len(DynamoBackend), len(handlers)) == (count, known)
            names.unregister()
            names.unregister()
            assert (len(DynamoBackend), len(handlers)) == (count - 1, known - 1)
            assert not hasattr(DynamoBackend, "ORT")
            for wrong in (
                lambda: TorchDynamoPlugin(backend="ort"),
                lambda: TrainingArguments(optim="adamw_ort_fused"),
            ):
                try:
                    wrong()
                except ValueError as error:
                    assert "not a valid" in str(error), error
                else:
                    raise AssertionError("the name is still known")
            names.register()
            assert TorchDynamoPlugin(backend="ort").backend is DynamoBackend.ORT
        """)
    )


def test_unregistering_before_the_libraries_come_leaves_them_alone():
    run(
        "import torch_ort\nfrom torch_ort.integrations import names\nnames.unregister()\n"
        "from accelerate.utils import DynamoBackend\n"
        "assert not hasattr(DynamoBackend, 'ORT')"
    )


def test_importing_torch_ort_imports_none_of_them():
    run(
        "import sys, torch_ort\n"
        "assert not {'transformers', 'accelerate', 'deepspeed', 'peft'} & {*sys.modules}"
    )


def test_another_major_version_is_left_alone_and_named(monkeypatch, caplog):
    from torch_ort.integrations import names

    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.0.1")
    names._BACKEND(types.ModuleType("accelerate.utils.dataclasses"))
    assert "accelerate 2.0.1 does not get the name 'ort', want version 1" in caplog.text
    assert 'write "onnxrt"' in caplog.text


def test_visitors_are_called_once_with_the_module_that_somebody_imports(tmp_path, monkeypatch):
    from torch_ort.integrations.after_import import after_import, forget

    (tmp_path / "visited_late.py").write_text("number = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen, forgotten = [], []
    after_import("visited_late", seen.append)
    after_import("visited_late", forgotten.append)
    forget("visited_late", forgotten.append)  # another bound method, but an equal one
    import visited_late

    assert seen == [visited_late]
    assert forgotten == []
    assert type(visited_late.__loader__).__name__ == "SourceFileLoader"
    assert visited_late.__spec__.loader is visited_late.__loader__
    after_import("visited_late", seen.append)
    assert seen == [visited_late, visited_late]


def test_a_visited_module_that_does_not_exist_is_missed_as_ever():
    from torch_ort.integrations.after_import import after_import, forget

    visit = print
    after_import("no_such_module_anywhere", visit)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        import no_such_module_anywhere  # noqa: F401
    forget("no_such_module_anywhere", visit)


LAUNCHED = """
    import sys

    import torch
    from accelerate import Accelerator

    folder = sys.argv[1]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x).pow(2).mean()

    accelerator = Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(Net(), torch.optim.SGD(model.parameters(), lr=0.1))
    x, losses = torch.randn(16, 4), []
    for _ in range(3):
        loss = net(x)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    import torch_ort

    torch.save({"losses": losses, "counters": torch_ort.counters()}, folder + "/rank_0.pt")
"""


def test_accelerate_launch_takes_the_backend(tmp_path):
    script = tmp_path / "launched.py"
    script.write_text(textwrap.dedent(LAUNCHED))
    reports = {}
    for backend in ("no", "onnxrt"):
        folder = tmp_path / backend
        folder.mkdir()
        command = ["accelerate.commands.launch", "--cpu", "--num_processes", "1"]
        command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", backend]
        done = run_python("-m", *command, script, folder)
        assert done.returncode == 0, done.stderr[-4000:]
        reports[backend] = torch.load(folder / "rank_0.pt", weights_only=False)
    torch.testing.assert_close(reports["onnxrt"]["losses"], reports["no"]["losses"])
    assert reports["onnxrt"]["counters"]["fallbacks"] == 0
    assert reports["onnxrt"]["counters"]["backward_runs"] == 3
    assert reports["no"]["counters"]["backward_runs"] == 0
