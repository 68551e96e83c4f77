"""The first use of the backend in a process, by several threads at once."""

from __future__ import annotations

import textwrap

import pytest
from own_process import run_python

from torch_ort.pytorch.versions import is_within

pytestmark = pytest.mark.ort_only

SCRIPT = """
    import threading

    import torch
    {imports}

    errors = []
    barrier = threading.Barrier(8)

    def train(backend):
        model = torch.nn.Linear(4, 4)
        barrier.wait()
        try:
            torch.compile(model, backend=backend)(torch.randn(2, 4)).sum().backward()
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=train, args=(name,)) for name in ("ort", "onnxrt") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    import torch_ort

    counters = torch_ort.counters()
    assert not errors, errors
    assert counters["forward_runs"] == counters["backward_runs"] == 8, counters
    assert {{"ort", "onnxrt"}} <= {{*torch.compiler.list_backends()}}
    try:  # other backends are registered as ever
        torch._dynamo.register_backend(torch_ort.compile, name="ort")
    except AssertionError as error:
        assert "duplicate name: ort" in str(error)
    else:
        raise AssertionError("another backend has taken the name")
    torch._dynamo.register_backend(name="of_a_test")(lambda module, inputs: module.forward)
    assert torch.compile(lambda x: x + 1, backend="of_a_test")(torch.zeros(1)) == 1
"""


@pytest.mark.skipif(
    is_within("", "2.13"), reason="Dynamo of this torch crashes there with any backend"
)
@pytest.mark.parametrize("imports", ["import torch_ort", ""], ids=["imported", "by_entry_point"])
def test_threads_that_compile_at_once(imports):
    code = textwrap.dedent(SCRIPT).format(imports=imports)
    run = run_python("-c", code)
    assert run.returncode == 0, run.stderr
