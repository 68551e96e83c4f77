"""Reinforcement learning: targets, policies, distributions, returns."""

from __future__ import annotations

import copy
import random

import torch
from field.program import STEPS, program, update
from torch import nn
from torch.distributions import (
    Categorical,
    Independent,
    Normal,
    TransformedDistribution,
    kl_divergence,
)
from torch.distributions.transforms import TanhTransform
from torch.nn import functional as F


class Dueling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.value, self.advantage = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        x = self.body(state)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(-1, keepdim=True)


@program
def values_with_a_target_network(wrap):
    network = Dueling()
    target = copy.deepcopy(network).requires_grad_(False)
    q, q_target = wrap(network), wrap(target)
    optimizer = torch.optim.RMSprop(network.parameters(), lr=1e-3)
    for step in range(STEPS):
        state, after = torch.randn(8, 4), torch.randn(8, 4)
        action, reward, done = torch.randint(3, (8, 1)), torch.randn(8), torch.rand(8) < 0.1
        with torch.no_grad():
            best = q(after).argmax(-1, keepdim=True)
            value = reward + 0.99 * q_target(after).gather(1, best).squeeze(1) * ~done
        loss = F.huber_loss(q(state).gather(1, action).squeeze(1), value)
        update(optimizer, loss)
        if step % 4 == 3:
            target.load_state_dict(network.state_dict())
        yield loss
    return network, target


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.policy, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(state)
        return self.policy(x), self.value(x).squeeze(-1)


@program
def proximal_policy(wrap):
    """PPO: a rollout without gradients, then epochs over its shuffled halves."""
    model = ActorCritic()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)
    for _ in range(STEPS // 2):
        states, rewards = torch.randn(8, 4), torch.randn(8)
        with torch.no_grad():
            logits, values = compiled(states)
            policy = Categorical(logits=logits)
            actions = policy.sample()
            before = policy.log_prob(actions)
        gain = (rewards - values - (rewards - values).mean()) / ((rewards - values).std() + 1e-8)
        for part in torch.randperm(8).chunk(2):
            logits, value = compiled(states[part])
            policy = Categorical(logits=logits)
            ratio = (policy.log_prob(actions[part]) - before[part]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            surrogate = torch.min(ratio * gain[part], clipped * gain[part]).mean()
            of_values = F.mse_loss(value, rewards[part])
            loss = -surrogate + 0.5 * of_values - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            yield loss
    return model


class Squashed(nn.Module):
    """A policy of continuous actions, whose distribution is made inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.mean, self.log_std = nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(state).relu()
        normal = Normal(self.mean(x), self.log_std(x).clamp(-5, 2).exp())
        policy = Independent(TransformedDistribution(normal, TanhTransform(cache_size=1)), 1)
        action = policy.rsample()
        return action, policy.log_prob(action)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([state, action], -1)).squeeze(-1)


@program(quick=True)
def soft_actor_critic(wrap):
    actor, critic = Squashed(), Critic()
    target = copy.deepcopy(critic).requires_grad_(False)
    log_alpha = torch.zeros((), requires_grad=True)
    act, judge, judge_target = wrap(actor), wrap(critic), wrap(target)
    of_actor = torch.optim.SGD(actor.parameters(), lr=0.01)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
    of_alpha = torch.optim.SGD([log_alpha], lr=0.01)
    for _ in range(STEPS):
        state, after, reward = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8)
        with torch.no_grad():
            action, log_p = act(after)
            value = reward + 0.9 * (judge_target(after, action) - log_alpha.exp() * log_p)
        loss_q = F.mse_loss(judge(state, torch.rand(8, 2) * 2 - 1), value)
        update(of_critic, loss_q)
        action, log_p = act(state)
        critic.requires_grad_(False)
        loss_pi = (log_alpha.exp().detach() * log_p - judge(state, action)).mean()
        critic.requires_grad_(True)
        update(of_actor, loss_pi)
        loss_alpha = -(log_alpha * (log_p.detach() - 2)).mean()
        update(of_alpha, loss_alpha)
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                slow.mul_(0.95).add_(fast, alpha=0.05)
        yield loss_q, loss_pi, loss_alpha
    return actor, critic, target, log_alpha


@program
def returns_of_episodes(wrap):
    """REINFORCE: episodes differ in length; the policy is called once for each step of one."""
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    policy = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        state, log_p, rewards = torch.randn(1, 4), [], []
        for _ in range(random.randint(3, 6)):
            chosen = Categorical(logits=policy(state))
            action = chosen.sample()
            log_p.append(chosen.log_prob(action))
            rewards.append(float(action) + state[0, 0].item())
            state = 0.9 * state + 0.1 * torch.randn(1, 4)
        returns, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.insert(0, total)
        weights = torch.tensor(returns)
        loss = -(torch.cat(log_p) * (weights - weights.mean())).sum()
        update(optimizer, loss)
        yield loss
    return model


class WorldModel(nn.Module):
    """A recurrent model of hidden states, with a divergence between prior and posterior."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.prior, self.posterior = nn.Linear(8, 4), nn.Linear(12, 4)
        self.decoder = nn.Linear(10, 4)

    def forward(self, seen: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        h, z = seen.new_zeros(seen.shape[1], 8), seen.new_zeros(seen.shape[1], 2)
        loss = seen.new_zeros(())
        for x, action in zip(seen, actions, strict=True):
            h = self.cell(torch.cat([z, action], -1), h)
            prior = self.normal(self.prior(h))
            posterior = self.normal(self.posterior(torch.cat([h, x], -1)))
            z = posterior.rsample()
            restored = self.decoder(torch.cat([h, z], -1))
            loss = loss + F.mse_loss(restored, x)
            loss = loss + kl_divergence(posterior, prior).sum(-1).clamp(min=0.1).mean()
        return loss / len(seen)

    @staticmethod
    def normal(both: torch.Tensor) -> Normal:
        mean, scale = both.chunk(2, -1)
        return Normal(mean, F.softplus(scale) + 0.1)


@program
def world_model(wrap):
    model = WorldModel()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        loss = compiled(torch.randn(3, 4, 4), torch.randn(3, 4, 1))
        update(optimizer, loss)
        yield loss
    return model
