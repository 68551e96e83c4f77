"""The benchmarks' models run in the engine as in eager PyTorch. Nothing here depends on speed."""

import torch

import torch_ort


def test_the_recommender_runs_in_the_engine(load_script):
    models = load_script("models")
    ours, eager = (models.build("recommender", "cpu") for _ in range(2))
    call, before = torch.compile(ours.model, backend="ort"), torch_ort.counters()
    batch = ours.batches[0]
    loss, want = call(*batch), eager.model(*batch)
    torch.testing.assert_close(loss, want)
    loss.backward()
    want.backward()
    for parameter, other in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    after = torch_ort.counters()
    assert after["fallbacks"] == before["fallbacks"]
    assert after["graphs_captured"] - before["graphs_captured"] == 1
