"""Which models are watched, by which subscribers, and the step and name of each tensor."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ort.onnxruntime_training.convergence import probe
from torch_ort.ortmodule import ORTModule

_RUNNING = -1  # stands for the model whose call is running


class SubscriberBase:
    """Base class of subscribers, which get the activations of a model and their gradients.

    A subscriber sees the steps from `start_step` up to, and without, `end_step`; None is no limit.
    Steps of each model are counted from 0. Override the methods of interest. They get the tensors
    of the run itself, which must not be written into.
    """

    def __init__(self, start_step: int | None = None, end_step: int | None = None) -> None:
        self.start_step = start_step
        self.end_step = end_step

    def takes_step(self, step: int) -> bool:
        """Tell whether this subscriber wants to see a step."""
        is_early = self.start_step is not None and step < self.start_step
        is_late = self.end_step is not None and step >= self.end_step
        return not (is_early or is_late)

    def name_in_ort(self, name: str, ort_name: str) -> None:
        """Take the name of an activation in ONNX Runtime Training, before it is shown.

        It is `<Class>_<index>_<output>th_output`, of the module's class, its position among all
        modules of the model, and the position of the tensor among those that the module returns.
        """

    def forward_activation(self, name: str, tensor: torch.Tensor, step: int, depth: int) -> None:
        """Take an activation: the output of a module, or a tensor given to `inspect_activation`.

        `name` is the model's class with the path of the module; `depth` is the number of parts of
        that path, 0 for the model itself.
        """

    def backward_gradient(self, name: str, gradient: torch.Tensor, step: int, depth: int) -> None:
        """Take the gradient with respect to the activation of that name, step and depth."""


@dataclass
class _Subscription:
    """One watched model."""

    root: str  # the name of the model
    model: torch.nn.Module
    subscribers: list[SubscriberBase]
    first_index: int  # that of the model itself; its modules have those that follow
    handles: list[Any] = field(default_factory=list)
    step: int = 0
    is_open: bool = False  # whether a call runs
    calls: dict[str, int] = field(default_factory=dict)  # of this step, by name
    backward_step: int = 0
    repeated: dict[tuple[int, str], int] = field(default_factory=dict)  # by step and name

    @property
    def next_index(self) -> int:
        """The index after those of this model's modules."""
        return self.first_index + sum(1 for _ in self.model.modules())

    def next_numbers(self, name: str) -> tuple[int, int]:
        """Give the step of an activation, and how often its name was met before."""
        if self.is_open:
            count = self.calls.get(name, 0)
            self.calls[name] = count + 1
            return self.step, count
        # A checkpoint runs a part of forward again.
        place = (self.backward_step, name)
        count = self.repeated.get(place, 0)
        self.repeated[place] = count + 1
        return self.backward_step, count


class SubscriberManager:
    """Installs subscribers on models, and calls them when the operators in `probe` run."""

    def __init__(self) -> None:
        self._subscriptions: dict[int, _Subscription] = {}
        self._keys = itertools.count()
        self._running: list[int] = []
        self._last_backward = _RUNNING

    def subscribe(self, model: torch.nn.Module, subscribers: Sequence[SubscriberBase]) -> None:
        """Pass all activations of a model in training, and their gradients, to subscribers.

            GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber("run_ort")])
            model = torch_ort.ORTModule(model)

        Call it before the model is wrapped or compiled, so that captured graphs have nodes for it.
        Raises TypeError if `model` is no module or an entry of `subscribers` no SubscriberBase, and
        RuntimeError if the model is subscribed already.
        """
        model = _unwrapped(model)
        subscribers = _checked(subscribers)
        if any(known.model is model for known in self._subscriptions.values()):
            raise RuntimeError(
                f"subscribe: {type(model).__name__} is subscribed already; unsubscribe it first"
            )
        key = next(self._keys)
        together = self._with_any_of(subscribers)
        root = _root_name(model, together)
        first_index = max((other.next_index for other in together), default=0)
        subscription = _Subscription(root, model, subscribers, first_index)
        self._subscriptions[key] = subscription
        subscription.handles = _install(subscription, key)

    def unsubscribe(self, model: torch.nn.Module | None = None) -> None:
        """End the subscription of one model, or of all if `model` is None.

        Graphs that were captured before keep the nodes, which then only copy their input.
        """
        wanted = None if model is None else _unwrapped(model)
        for key, known in list(self._subscriptions.items()):
            if wanted is None or known.model is wanted:
                for handle in known.handles:
                    handle.remove()
                del self._subscriptions[key]
                self._running = [other for other in self._running if other != key]

    def has_models(self) -> bool:
        """Tell whether any model is subscribed."""
        return len(self._subscriptions) > 0

    def _with_any_of(self, subscribers: list[SubscriberBase]) -> list[_Subscription]:
        return [
            known
            for known in self._subscriptions.values()
            if any(one is other for one in known.subscribers for other in subscribers)
        ]

    # Called by the operators.

    def mark(self, key: int, starts: bool) -> None:
        """Open a step or close it; one that a failed call has left open is started anew."""
        subscription = self._subscriptions.get(key)
        if subscription is None:
            return
        self._running = [other for other in self._running if other != key]
        subscription.calls.clear()
        subscription.is_open = starts
        if starts:
            self._running.append(key)
        else:
            subscription.step += 1
            subscription.repeated.clear()

    def forward(
        self, key: int, name: str, ort_name: str, depth: int, tensor: torch.Tensor
    ) -> list[int]:
        """Show an activation; give subscription, step and number of the call."""
        if key == _RUNNING:
            key = self._running[-1] if self._running else self._last_backward
        subscription = self._subscriptions.get(key)
        if subscription is None:
            return [_RUNNING, 0, 0]
        step, count = subscription.next_numbers(name)
        if subscription.is_open:
            for subscriber in subscription.subscribers:
                if subscriber.takes_step(step):
                    numbered = _numbered(name, count)
                    subscriber.name_in_ort(numbered, _numbered(ort_name, count))
                    subscriber.forward_activation(numbered, tensor, step, depth)
        return [key, step, count]

    def backward(self, numbers: list[int], name: str, depth: int, gradient: torch.Tensor) -> None:
        """Show a gradient."""
        key, step, count = numbers
        subscription = self._subscriptions.get(key)
        if subscription is None:
            return
        self._last_backward = key
        subscription.backward_step = step
        for subscriber in subscription.subscribers:
            if subscriber.takes_step(step):
                subscriber.backward_gradient(_numbered(name, count), gradient, step, depth)


GlobalSubscriberManager = SubscriberManager()
probe.listen(GlobalSubscriberManager)


def inspect_activation(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Pass a tensor inside of a subscribed model's forward to its subscribers, under a name.

    Returns a copy of the tensor. Use the copy in the rest of forward: the gradient that subscribers
    get is that of the copy. If no model is subscribed, the tensor itself is returned. Raises
    TypeError if `tensor` is no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"inspect_activation: got {type(tensor).__name__}, want a tensor")
    if not GlobalSubscriberManager.has_models():
        return tensor
    return probe.probe_activation(tensor, _RUNNING, name, name, 0)[0]


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Give the module itself for one that is wrapped: hooks of a wrapper run outside of graphs."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"subscribe: got {type(model).__name__}, want a torch.nn.Module")
    return model.module if isinstance(model, ORTModule) else model


def _checked(subscribers: Sequence[SubscriberBase]) -> list[SubscriberBase]:
    if isinstance(subscribers, SubscriberBase):
        raise TypeError("subscribe: got one subscriber, want a list of them")
    for subscriber in subscribers:
        if not isinstance(subscriber, SubscriberBase):
            kind = type(subscriber).__name__
            raise TypeError(f"subscribe: got {kind} among the subscribers, want a SubscriberBase")
    return list(subscribers)


def _root_name(model: torch.nn.Module, others: Sequence[_Subscription]) -> str:
    """Name a model by its class; models of one subscriber are numbered to stay apart."""
    taken = {other.root for other in others}
    kind = type(model).__name__
    names = itertools.chain([kind], (f"{kind}_{i}" for i in itertools.count(1)))
    return next(name for name in names if name not in taken)


def _numbered(name: str, count: int) -> str:
    """Name a call of a module: later ones than the first have their number."""
    return f"{name}@{count}" if count else name


def _install(subscription: _Subscription, key: int) -> list[Any]:
    """Hang hooks into all modules: the start comes before all of them, the end after."""
    model, root = subscription.model, subscription.root
    handles = [model.register_forward_pre_hook(_CallMark(model, key, True), prepend=True)]
    # As ONNX Runtime Training numbers modules: a model before its parts, each one once.
    for index, (path, module) in enumerate(model.named_modules(), subscription.first_index):
        name = f"{root}.{path}" if path else root
        depth = len(path.split(".")) if path else 0
        ort_name = f"{type(module).__name__}_{index}"
        probe_outputs = _ProbeOutputs(model, key, name, ort_name, depth)
        handles.append(module.register_forward_hook(probe_outputs))
    handles.append(model.register_forward_hook(_CallMark(model, key, False)))
    return handles


# Objects rather than closures, so that subscribed models can be pickled.


@dataclass(frozen=True, eq=False)
class _CallMark:
    """Marks the start of a call as a pre-hook, its end as a hook."""

    model: torch.nn.Module
    key: int
    starts: bool

    def __call__(self, module: torch.nn.Module, args: Any, output: Any = None) -> None:
        if self.model.training and torch.is_grad_enabled():
            probe.mark_call(self.key, self.starts)


@dataclass(frozen=True, eq=False)
class _ProbeOutputs:
    model: torch.nn.Module
    key: int
    name: str
    ort_name: str
    depth: int

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not self.model.training:
            return None
        return self._probed(output, self.name, [])

    def _probed(self, value: Any, name: str, before: list[torch.Tensor]) -> Any:
        """Replace all tensors in a result by their copies; what else is in it stays.

        `before` are the tensors that came before in the result.
        """
        if isinstance(value, torch.Tensor):
            ort_name = f"{self.ort_name}_{len(before)}th_output"
            before.append(value)
            if value.layout != torch.strided:
                return value
            return probe.probe_activation(value, self.key, name, ort_name, self.depth)[0]
        if isinstance(value, Mapping):
            parts = {
                key: self._probed(part, f"{name}-{key}", before) for key, part in value.items()
            }
            return _mapping_like(value, parts)
        if isinstance(value, list | tuple):
            parts = [self._probed(part, f"{name}-{i}", before) for i, part in enumerate(value)]
            return _sequence_like(value, parts)
        return value


def _mapping_like(value: Mapping, parts: dict) -> Any:
    if type(value) in (dict, OrderedDict):
        return type(value)(parts)
    if dataclasses.is_dataclass(value):  # as the outputs of transformers are
        return type(value)(**parts)
    if not isinstance(value, MutableMapping):
        return value
    copied = copy.copy(value)
    copied.update(parts)
    return copied


def _sequence_like(value: list | tuple, parts: list) -> Any:
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    return type(value)(*parts) if is_named else type(value)(parts)
