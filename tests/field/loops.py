"""Loops: what people put around forward, backward and the optimizer."""

from __future__ import annotations

import copy
import io

import torch
from field.program import STEPS, program, update
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Classifier(nn.Module):
    def __init__(self, features: int = 16, classes: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(features, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(32, 32), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(32, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def batch(size: int = 8, features: int = 16, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, features), torch.randint(classes, (size,))


@program(quick=True)
def warmup_and_clipping(wrap):
    model = Classifier(dropout=0.1)
    compiled = wrap(model)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4))
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(compiled(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        yield loss, norm
    return model


@program
def gradient_accumulation(wrap):
    model = Classifier()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(STEPS):
        total = torch.zeros(())
        for size in (4, 4, 2):  # the last micro batch is smaller
            x, y = batch(size)
            loss = F.cross_entropy(compiled(x), y, reduction="sum") / 10
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield total
    return model


@program
def evaluation_in_between(wrap):
    model = nn.Sequential(
        nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(32, 5),
    )  # fmt: skip
    compiled = wrap(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    held_out = batch(16)
    for step in range(STEPS):
        compiled.train()
        x, y = batch()
        loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        validation = torch.zeros(())
        if step % 3 == 2:
            compiled.eval()
            with torch.no_grad():
                validation = F.cross_entropy(compiled(held_out[0]), held_out[1])
        yield loss, validation
    return model


@program(rtol=3e-2, atol=1e-2)
def bfloat16_autocast(wrap):
    model = Classifier()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        x, y = batch()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    return model


class MixedPrecision(nn.Module):
    """Computes its norm in float32 inside of a model under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 5)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            x = self.scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return self.second(x.relu())


@program(rtol=2e-2, atol=1e-2)
def mixed_autocast_with_a_scaler(wrap):
    model = MixedPrecision()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(STEPS):
        x, y = batch()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(compiled(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss
    return model


@program(quick=True)
def ema_teacher(wrap):
    """Trains a student to agree with the moving average of itself (mean teacher)."""
    student = Classifier(dropout=0.2)
    teacher = copy.deepcopy(student).requires_grad_(False)
    of_student, of_teacher = wrap(student), wrap(teacher)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = batch()
        with torch.no_grad():
            target = of_teacher(x).softmax(-1)
        logits = of_student(x)
        consistency = F.mse_loss(logits.softmax(-1), target)
        loss = F.cross_entropy(logits, y) + 5 * consistency
        update(optimizer, loss)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        yield loss, consistency
    return student, teacher


@program
def distillation(wrap):
    teacher, student = Classifier().eval(), nn.Linear(16, 5)
    of_teacher, of_student = wrap(teacher), wrap(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    temperature = 2.0
    for _ in range(STEPS):
        x, y = batch()
        with torch.no_grad():
            soft = F.log_softmax(of_teacher(x) / temperature, -1)
        logits = of_student(x)
        ours = F.log_softmax(logits / temperature, -1)
        distilled = F.kl_div(ours, soft, reduction="batchmean", log_target=True) * temperature**2
        loss = 0.7 * distilled + 0.3 * F.cross_entropy(logits, y)
        update(optimizer, loss)
        yield loss
    return student


class LoRA(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up) * 2.0


@program
def lora_on_a_trained_model(wrap):
    model = Classifier()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if step == 4:  # from here on, adapters alone are trained
            model.requires_grad_(False)
            model.body[0], model.body[4] = LoRA(model.body[0]), LoRA(model.body[4])
            optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
        x, y = batch()
        loss = F.cross_entropy(compiled(x), y)
        update(optimizer, loss)
        yield loss
    return model


@program
def gradual_unfreezing(wrap):
    model = Classifier()
    model.body.requires_grad_(False)
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if step == 3:
            model.body[4].requires_grad_(True)
        if step == 6:
            model.body.requires_grad_(True)
        x, y = batch()
        loss = F.cross_entropy(compiled(x), y)
        update(optimizer, loss)
        yield loss
    return model


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@program
def activation_checkpointing(wrap):
    model = Checkpointed()
    compiled = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(compiled(x), y)
        update(optimizer, loss)
        yield loss
    return model


@program
def resume_from_a_file(wrap):
    def start():
        model = Classifier()
        return model, wrap(model), torch.optim.Adam(model.parameters(), lr=1e-2)

    model, compiled, optimizer = start()
    for step in range(STEPS):
        if step == 5:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file)
            model, compiled, optimizer = start()
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        x, y = batch()
        loss = F.cross_entropy(compiled(x), y)
        update(optimizer, loss)
        yield loss
    return model


@program
def lbfgs(wrap):
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    compiled = wrap(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x, y = torch.randn(32, 16), torch.randn(32, 1)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(compiled(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        yield optimizer.step(closure)
    return model


@program
def sharpness_aware(wrap):
    """Takes the gradient at the worst point near by (SAM)."""
    model = Classifier()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * (0.05 / norm) for p in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(compiled(x), y).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    return model


@program
def weight_averaging(wrap):
    model = nn.Sequential(
        nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)
    )
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    for step in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(compiled(x), y)
        update(optimizer, loss)
        if step >= 5:
            averaged.update_parameters(model)
            schedule.step()
        yield loss
    return model, averaged


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.SiLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(32, 5), "amount": nn.Linear(32, 1)})
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor, kind: torch.Tensor, amount: torch.Tensor) -> dict:
        features = self.trunk(x)
        losses = torch.stack([
            F.cross_entropy(self.heads["kind"](features), kind),
            F.smooth_l1_loss(self.heads["amount"](features).squeeze(-1), amount),
        ])  # fmt: skip
        total = (losses * torch.exp(-self.log_variances) + self.log_variances).sum()
        return {"loss": total, "parts": losses}


@program
def multi_task_with_learned_weights(wrap):
    model = Tasks()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x, kind = batch()
        result = compiled(x, kind=kind, amount=torch.rand(8))
        optimizer.zero_grad()
        result["loss"].backward()
        optimizer.step()
        yield [result["loss"], *result["parts"]]
    return model


@program
def sizes_that_change(wrap):
    model = Classifier()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(3 + step % 4 * 2)
        loss = F.cross_entropy(compiled(x), y)
        update(optimizer, loss)
        yield loss
    return model


@program
def two_optimizers_of_one_model(wrap):
    model = Classifier()
    compiled = wrap(model)
    of_body = torch.optim.Adam(model.body.parameters(), lr=1e-3)
    of_head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        of_head.step()
        if step % 2:
            of_body.step()
            of_body.zero_grad()
        of_head.zero_grad()
        yield loss
    return model


class Schedules(nn.Module):
    """Counts its own calls and lets the loop set the strength of its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 32), nn.Linear(32, 5)
        self.noise = 0.5
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.layer(x).relu()
        if self.training:
            hidden = hidden + self.noise * torch.randn_like(hidden)
        return self.head(hidden)


@program
def noise_that_is_annealed_and_a_counter(wrap):
    model = Schedules()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        model.noise = 0.5 * (1 - step / STEPS)
        x, y = batch()
        loss = F.cross_entropy(compiled(x), y)
        update(optimizer, loss)
        yield loss, torch.tensor(float(model.calls))
    return model
