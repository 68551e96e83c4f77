# Mistakes of the user: the words are eager's, torch's or ours, and the next good step works.
from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.both_roads


def rows(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 6, requires_grad=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class TestSettings:
    def test_unknown_backend(self, backend):
        with pytest.raises(Exception, match=f"Invalid backend.*{backend}x"):
            torch.compile(network(), backend=f"{backend}x")(rows())

    @pytest.mark.ort_only
    def test_unknown_option_names_near_matches(self):
        with pytest.raises(Exception, match=r"save_onx.*save_onnx"):
            torch.compile(network(), backend="ort", options={"save_onx": True})(rows())

    @pytest.mark.ort_only
    def test_option_of_the_wrong_type(self):
        with pytest.raises(Exception, match=r"save_onnx.*want"):
            torch.compile(network(), backend="ort", options={"save_onnx": "maybe"})(rows())

    @pytest.mark.ort_only
    def test_unknown_mode(self):
        with pytest.raises(Exception, match=r"mode.*fastest"):
            torch.compile(network(), backend="ort", mode="fastest")(rows())


class TestInputs:
    @pytest.mark.compile_only("sizes have names there")
    def test_wrong_shape(self, compiled):
        call = compiled(network())
        with pytest.raises(Exception, match=r"\(4, 5\)|4x5"):
            call(torch.randn(4, 5))
        assert call(rows()).shape == (4, 3)

    @pytest.mark.compile_only("sizes have names there")
    def test_wrong_shape_after_a_good_step(self, compiled, assert_engine_ran):
        call = compiled(network())
        call(rows()).sum().backward()
        with pytest.raises(Exception, match=r"(?s)mat|size|shape"):
            call(torch.randn(4, 5))
        call(rows()).sum().backward()
        assert_engine_ran(backward=True)

    @pytest.mark.hands_over("PyTorch words the error")
    def test_wrong_dtype(self, compiled):
        call = compiled(network())
        with pytest.raises(Exception, match=r"(?s)dtype|Float|Double"):
            call(torch.randn(4, 6, dtype=torch.float64))
        assert call(rows()).shape == (4, 3)

    @pytest.mark.cuda
    @pytest.mark.hands_over("the recorder leaves the error to PyTorch")
    def test_model_and_input_on_different_devices(self, compiled):
        call = compiled(network().cuda())
        with pytest.raises(Exception, match=r"(?s)cuda.*cpu|cpu.*cuda"):
            call(rows())
        assert call(rows().detach().cuda()).shape == (4, 3)

    @pytest.mark.hands_over("PyTorch words the error")
    def test_model_on_meta_and_input_on_the_cpu(self, compiled):
        with pytest.raises(Exception, match=r"(?s)meta.*cpu|cpu.*meta"):
            compiled(network().to("meta"))(rows())

    def test_index_out_of_range(self, compiled):
        call = compiled(nn.Embedding(5, 3))
        call(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(IndexError, match="out of range"):
            call(torch.tensor([1, 7]))
        assert call(torch.tensor([1, 2])).shape == (2, 3)

    def test_label_out_of_range(self, compiled):
        call = compiled(lambda x, labels: F.cross_entropy(x, labels))
        x = rows()
        call(x, torch.tensor([0, 1, 2, 3])).backward()
        with pytest.raises(IndexError, match="Target 6 is out of bounds"):
            call(x, torch.tensor([0, 6, 2, 3]))
        call(x, torch.tensor([0, 1, 2, 3])).backward()

    def test_not_positive_definite(self, compiled):
        call = compiled(torch.linalg.cholesky)
        torch.testing.assert_close(call(torch.eye(3)), torch.eye(3))
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
            call(-torch.eye(3))


class TestAutograd:
    def test_backward_of_a_vector(self, compiled):
        with pytest.raises(RuntimeError, match="can be implicitly created only for scalar"):
            compiled(network())(rows()).backward()

    def test_backward_without_gradients(self, compiled):
        with torch.no_grad():
            output = compiled(network())(rows())
        with pytest.raises(RuntimeError, match="does not require grad"):
            output.sum().backward()

    def test_tangent_of_the_wrong_shape(self, compiled):
        output = compiled(network())(rows())
        with pytest.raises(RuntimeError, match="Mismatch in shape"):
            output.backward(torch.ones(3, 4))
        output.backward(torch.ones(4, 3))

    @pytest.mark.hands_over("PyTorch words the error")
    def test_in_place_on_a_leaf(self, compiled):
        def change(x):
            x.add_(1)
            return x * 2

        call = compiled(change)
        with pytest.raises(Exception, match="leaf Variable that requires grad"):
            call(rows())

    @pytest.mark.hands_over("PyTorch words the error")
    def test_inference_tensor_in_training(self, compiled):
        with torch.inference_mode():
            x = torch.ones(4, 6)
        call = compiled(network())
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            call(x).sum().backward()

    @pytest.mark.aot_eager_fails("AOTAutograd refuses it")
    def test_deterministic_algorithms_switched_on_before_backward(self, compare_training):
        @contextlib.contextmanager
        def deterministic():
            torch.use_deterministic_algorithms(True)
            yield
            torch.use_deterministic_algorithms(False)

        compare_training(network, lambda step: rows(), backward_context=deterministic)


class TestNumbers:
    def test_nan_loss_flows_as_in_eager(self, compiled, assert_engine_ran):
        gradients = []
        for wrap in (lambda m: m, compiled):
            model = network()
            x = rows().detach()
            x[0, 0] = float("nan")
            loss = wrap(model)(x).pow(2).mean()
            loss.backward()
            assert loss.isnan()
            gradients.append(model[0].weight.grad)
        assert torch.equal(gradients[0].isnan(), gradients[1].isnan())
        assert_engine_ran(backward=True)

    def test_infinite_values_flow_as_in_eager(self, compare_training):
        compare_training(
            lambda: lambda x: (x.exp() / x.exp().sum(), x.log(), 1 / x),
            lambda step: (torch.tensor([0.0, 1.0, 100.0, -1.0]) * (step + 1)).requires_grad_(),
        )

    def test_anomaly_mode_names_the_failing_backward(self, compiled):
        call = compiled(lambda x: x.sqrt().sum())
        x = torch.zeros(3, requires_grad=True)
        call(x)
        with (
            pytest.warns(UserWarning, match="Error detected in"),
            torch.autograd.detect_anomaly(),
            pytest.raises(RuntimeError, match="returned nan values"),
        ):
            (call(x) * 0).backward()

    def test_anomaly_mode_with_good_numbers(self, compiled):
        model = network()
        call = compiled(model)
        with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
            call(rows()).sum().backward()
        assert model[0].weight.grad is not None
