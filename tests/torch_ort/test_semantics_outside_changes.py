# What users change from outside between steps: parameters, hooks and global switches.
from __future__ import annotations

import functools

import pytest
import torch
from models import module_with
from torch import nn

pytestmark = pytest.mark.both_roads


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 8)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def double(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    return output * 2


class TestParametersChangedFromOutside:
    def test_by_data(self, compare_training):
        def change(model, step):
            model[0].weight.data = torch.full_like(model[0].weight, 0.1 * (step + 1))
            model[3].bias.data.add_(1.0)

        # Equal weights make equal features, whose variance is nothing but rounding.
        compare_training(mlp, rows, before_step=change, rtol=1e-4, atol=1e-4)

    def test_by_copy_under_no_grad(self, compare_training):
        def change(model, step):
            with torch.no_grad():
                model[0].weight.mul_(0.5)

        compare_training(mlp, rows, before_step=change)

    def test_by_to(self, compare_training):
        def change(model, step):
            model.to(torch.float64 if step >= 2 else torch.float32)

        compare_training(
            mlp,
            lambda step: torch.randn(6, 8).to(torch.float64 if step >= 2 else torch.float32),
            before_step=change,
            # Momentum of one dtype does not add to gradients of another.
            optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
            steps=4,
        )

    @pytest.mark.cuda
    def test_by_moving_to_another_device(self, compiled, assert_engine_ran):
        torch.manual_seed(0)
        model = mlp()
        call = compiled(model)
        x = torch.randn(6, 8)
        for device in ("cpu", "cuda", "cpu"):
            model.to(device)
            torch.testing.assert_close(call(x.to(device)), model(x.to(device)))
        assert_engine_ran()

    @pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
    def test_by_load_state_dict(self, compare_training, assign):
        def change(model, step):
            if step == 1:
                state = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
                model.load_state_dict(state, assign=assign)

        compare_training(
            lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), rows, before_step=change
        )

    def test_by_a_new_parameter_object(self, compare_training):
        def change(model, step):
            if step == 1:
                model[0].weight = nn.Parameter(model[0].weight.detach() * 2)

        compare_training(mlp, rows, before_step=change)

    def test_by_swapping_storages(self, compare_training):
        def change(model, step):
            a, b = model[0].weight, model[2].weight
            a.data, b.data = b.data, a.data

        compare_training(
            lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
            rows,
            before_step=change,
        )


class TestHooks:
    def test_forward_hooks(self, compare_training):
        def hooked():
            model = mlp()
            model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
            model[1].register_forward_hook(lambda module, args, output: output + args[0])
            return model

        compare_training(hooked, rows)

    @pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
    def test_tensor_hook_inside_the_module(self, compare_training):
        class Hooked(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(8, 4)

            def forward(self, x):
                y = self.linear(x)
                y.register_hook(lambda gradient: gradient * 3)
                return y.exp()

        # Torch runs such hooks eagerly, between two graphs.
        compare_training(Hooked, rows, compile_settings={"fullgraph": False})

    def test_tensor_hook_on_a_parameter(self, compare_training):
        def hooked():
            model = mlp()
            model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            return model

        compare_training(hooked, rows)

    def test_tensor_hook_on_an_output(self, compare_training):
        def loss(output):
            output.register_hook(lambda gradient: gradient * 0.5)
            return output.pow(2).sum()

        compare_training(mlp, rows, loss=loss)

    def test_hook_after_accumulation(self, compare_training):
        def hooked():
            model = mlp()

            def halve(parameter):
                parameter.grad.mul_(0.5)

            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(halve)
            return model

        compare_training(hooked, rows)

    def test_optimizer_step_inside_backward(self, compare_training):
        def stepping():
            model = mlp()

            def update(parameter):
                with torch.no_grad():
                    parameter.sub_(0.01 * parameter.grad)
                parameter.grad = None

            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(update)
            return model

        compare_training(stepping, rows, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))

    @pytest.mark.parametrize("where", ["root", "child"])
    @pytest.mark.compile_only("runs in PyTorch")
    def test_full_backward_hook(self, device, compiled, where):
        seen, gradients = [], []
        for wrap in (lambda m: m, functools.partial(compiled, fullgraph=False)):
            torch.manual_seed(0)
            model = module_with(
                lambda self, x: torch.tanh(self.linear(x)), linear=nn.Linear(8, 8)
            ).to(device)
            hooked = model if where == "root" else model.linear
            hooked.register_full_backward_hook(
                lambda module, inputs, outputs: seen.append(outputs[0].sum())
            )
            x = torch.linspace(-1, 1, 16, device=device).reshape(2, 8).requires_grad_()
            wrap(model)(x).pow(2).sum().backward()
            gradients.append([x.grad, *(p.grad for p in model.parameters())])
        torch.testing.assert_close(gradients[1], gradients[0])
        torch.testing.assert_close(seen[1], seen[0])

    @torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
    def test_hooks_added_and_removed_between_steps(self, compare_training):
        handles = {}

        def switch(model, step):
            if step == 1:
                handles[id(model)] = model[0].register_forward_hook(double)
            elif step == 2:
                handles.pop(id(model)).remove()

        compare_training(mlp, rows, before_step=switch, steps=4)


class TestGlobalSwitches:
    def test_deterministic_algorithms_between_steps(self, compare_training, graphs_captured):
        def switch(model, step):
            torch.use_deterministic_algorithms(step % 2 == 1)

        try:
            compare_training(mlp, rows, before_step=switch, steps=4)
        finally:
            torch.use_deterministic_algorithms(False)
        assert graphs_captured() == 2

    def test_thread_count_between_steps(self, compare_training):
        before = torch.get_num_threads()

        def switch(model, step):
            torch.set_num_threads(1 + step % 2)

        try:
            compare_training(mlp, rows, before_step=switch, steps=4)
        finally:
            torch.set_num_threads(before)

    def test_float32_matmul_precision_between_steps(self, compare_training):
        before = torch.get_float32_matmul_precision()

        def switch(model, step):
            torch.set_float32_matmul_precision("high" if step == 1 else "highest")

        try:
            compare_training(mlp, rows, before_step=switch, rtol=1e-3, atol=1e-4)
        finally:
            torch.set_float32_matmul_precision(before)

    def test_default_dtype_between_steps(self, compare_training):
        class Constants(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(8, 4, dtype=torch.float32)

            def forward(self, x):
                return self.linear(x) + torch.ones(4, device=x.device)

        def switch(model, step):
            torch.set_default_dtype(torch.float64 if step == 1 else torch.float32)

        try:
            # What is float64 was float32 before.
            compare_training(
                Constants, lambda step: torch.randn(6, 8, dtype=torch.float32), before_step=switch,
                rtol=2e-6, atol=1e-6,
            )  # fmt: skip
        finally:
            torch.set_default_dtype(torch.float32)
