# What an ORTModule shows of the module it wraps: errors, state, attributes, methods, modes, copies.
from __future__ import annotations

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from comparison import Options, assert_same_runs, train
from torch import nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.ortmodule import ORTModuleTorchModelException


class Net(nn.Module):
    """Has parameters, buffers, attributes and methods of its own."""

    kind = "net"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)
        self.register_buffer("offset", torch.ones(3))
        self.scale = 2.0

    def forward(self, x, *, shift=None, doubled=False):
        y = self.second(torch.relu(self.norm(self.first(x)))) * self.scale + self.offset
        y = y if shift is None else y + shift
        return 2 * y if doubled else y

    def loss(self, x):
        return self(x).pow(2).mean()

    def loss_by_forward(self, x):
        return self.forward(x).pow(2).mean()

    def set_scale(self, value):
        self.scale = value
        return self

    def _norm_of_weights(self):
        return self.first.weight.norm()

    @property
    def width(self):
        return self.first.out_features

    @staticmethod
    def doubled(value):
        return 2 * value

    @classmethod
    def made(cls):
        return cls()


def rows(count=5):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def pair(net):
    return copy.deepcopy(net), ORTModule(net)


def assert_same_steps(eager, ours, steps=2):
    options = Options(steps=steps)
    want = train(eager, eager, lambda step: rows(5 + step), "cpu", options)
    got = train(ours.module, ours, lambda step: rows(5 + step), "cpu", options)
    assert_same_runs(want, got, None, None, True)


# Construction.


@pytest.mark.parametrize("given", [None, 3, torch.relu, nn.Linear, torch.ones(2), [nn.ReLU()]])
def test_what_is_no_module_is_refused(given):
    with pytest.raises(ORTModuleTorchModelException, match=r"only supports torch\.nn\.Module") as e:
        ORTModule(given)
    assert isinstance(e.value.__cause__, TypeError)
    assert type(given).__name__ in str(e.value)


@pytest.mark.parametrize("method", ["add_module", "register_module"])
def test_adding_modules_is_refused(pair, method):
    _, ours = pair
    with pytest.raises(ORTModuleTorchModelException, match="not support adding modules") as error:
        getattr(ours, method)("third", nn.ReLU())
    assert isinstance(error.value.__cause__, NotImplementedError)
    assert "third" not in dict(ours.named_modules())


def test_is_a_module_that_gives_back_the_wrapped_one(net):
    ours = ORTModule(net)
    assert isinstance(ours, nn.Module)
    assert ours.module is net


# Names that both have.


def hang_attribute(net):
    net.recapture = 3


def hang_sub_module(net):
    net.module = nn.ReLU()


def hang_buffer(net):
    net.register_buffer("recapture", torch.ones(1))


@pytest.mark.parametrize(
    ("hang", "name"),
    [(hang_attribute, "recapture"), (hang_sub_module, "module"), (hang_buffer, "recapture")],
)
def test_colliding_attributes_are_warned_of(net, hang, name):
    hang(net)
    with pytest.warns(UserWarning, match=f"attribute '{name}' .*collides"):
        ours = ORTModule(net)
    assert ours.module is net
    assert callable(ours.recapture)


def test_colliding_methods_are_warned_of():
    class Colliding(Net):
        def recapture(self):
            return "theirs"

    with pytest.warns(UserWarning, match="attribute 'recapture' .*collides"):
        ours = ORTModule(Colliding())
    assert ours.recapture() is None
    assert ours.module.recapture() == "theirs"


def test_other_names_are_not_warned_of(net):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ORTModule(net)
        ORTModule(nn.TransformerEncoderLayer(8, 2))
    assert [str(warning.message) for warning in caught] == []


# State.


def test_state_dict_is_that_of_the_wrapped_module(pair):
    eager, ours = pair
    assert list(ours.state_dict()) == list(eager.state_dict())
    assert ours.state_dict(keep_vars=True)["first.weight"] is ours.module.first.weight
    assert set(ours.state_dict(prefix="p.")) == {f"p.{name}" for name in eager.state_dict()}


@pytest.mark.parametrize("is_used", [False, True])
def test_checkpoints_go_both_ways(pair, is_used):
    eager, ours = pair
    if is_used:
        ours(rows()).sum().backward()
    other = Net()
    assert str(ours.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    eager.load_state_dict(other.state_dict())
    assert_same_steps(eager, ours)
    back = Net()
    back.load_state_dict(ours.state_dict())
    torch.testing.assert_close(back.eval()(rows()), ours.eval()(rows()))


def test_strict_loading_names_what_is_missing(pair):
    _, ours = pair
    with pytest.raises(RuntimeError, match=r"Missing key.*second\.bias"):
        ours.load_state_dict({k: v for k, v in ours.state_dict().items() if k != "second.bias"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*more"):
        ours.load_state_dict(ours.state_dict() | {"more": torch.ones(1)})


def test_an_outer_module_saves_it(net):
    outer, same = nn.Sequential(nn.Tanh(), ORTModule(net)), nn.Sequential(nn.Tanh(), net)
    assert list(outer.state_dict()) == list(same.state_dict())
    assert [n for n, _ in outer.named_parameters()] == [n for n, _ in same.named_parameters()]


def test_an_outer_module_loads_it(pair):
    _, ours = pair
    outer, same = nn.Sequential(nn.Tanh(), ours), nn.Sequential(nn.Tanh(), Net())
    outer.load_state_dict(same.state_dict())
    assert torch.equal(ours.module.first.weight, same[1].first.weight)


@pytest.mark.parametrize(
    "method",
    [
        "named_parameters", "named_buffers", "named_modules", "named_children",
        "parameters", "buffers", "modules", "children",
    ],
)  # fmt: skip
def test_what_hangs_in_it_are_the_same_objects(net, method):
    want = list(getattr(net, method)())
    got = list(getattr(ORTModule(net), method)())
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        assert a is b or (a[0] == b[0] and a[1] is b[1])


def test_listing_takes_the_usual_arguments(net):
    ours = ORTModule(net)
    assert list(ours.parameters(recurse=False)) == []
    assert [name for name, _ in ours.named_buffers(recurse=False)] == ["offset"]
    prefixed = dict(ours.named_parameters(prefix="p", recurse=True))
    assert next(iter(prefixed)) == "p.first.weight"
    assert dict(ours.named_modules(prefix="p"))["p.norm"] is net.norm
    assert ours.get_parameter("first.bias") is net.first.bias
    assert ours.get_buffer("norm.running_mean") is net.norm.running_mean
    assert ours.get_submodule("second") is net.second


@pytest.mark.parametrize("is_before", [True, False])
def test_optimizers_made_before_or_after_move_the_parameters(net, is_before):
    eager = copy.deepcopy(net)
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    ours = ORTModule(net)
    optimizer = early if is_before else torch.optim.SGD(ours.parameters(), lr=0.1)
    reference = torch.optim.SGD(eager.parameters(), lr=0.1)
    for model, sgd in ((eager, reference), (ours, optimizer)):
        for _ in range(2):
            sgd.zero_grad()
            model.loss(rows()).backward()
            sgd.step()
    torch.testing.assert_close(net.state_dict(), eager.state_dict())


def test_zero_grad_and_requires_grad_reach_the_wrapped_module(pair):
    _, ours = pair
    ours.loss(rows()).backward()
    assert ours.module.first.weight.grad is not None
    ours.zero_grad()
    assert all(parameter.grad is None for parameter in ours.module.parameters())
    assert ours.requires_grad_(False) is ours
    assert not any(parameter.requires_grad for parameter in ours.module.parameters())


def test_registering_registers_in_the_wrapped_module(pair):
    _, ours = pair
    ours.register_buffer("counter", torch.zeros(1), persistent=False)
    ours.register_parameter("gain", nn.Parameter(torch.ones(1)))
    assert "counter" in dict(ours.module.named_buffers())
    assert "gain" in dict(ours.module.named_parameters())
    assert "counter" not in ours.state_dict()


# Attributes.


def test_attributes_are_read_from_the_wrapped_module(net):
    ours = ORTModule(net)
    assert ours.first is net.first
    assert ours.offset is net.offset
    assert (ours.scale, ours.kind, ours.width, ours.doubled(4)) == (2.0, "net", 6, 8)
    assert isinstance(ours.made(), Net)
    assert {"first", "scale", "loss", "module"} <= set(dir(ours))


def test_unknown_attributes_are_an_attribute_error(pair):
    _, ours = pair
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'missing'"):
        _ = ours.missing
    assert not hasattr(ours, "missing")
    assert getattr(ours, "missing", 7) == 7


def test_attributes_are_written_to_the_wrapped_module(net):
    ours = ORTModule(net)
    ours.tag = "new"
    ours.scale = 3.0
    ours.offset = torch.zeros(3)
    ours.second = nn.Linear(6, 3, bias=False)
    assert (net.tag, net.scale) == ("new", 3.0)
    assert "tag" not in vars(ours)
    assert torch.equal(dict(net.named_buffers())["offset"], torch.zeros(3))
    assert dict(net.named_modules())["second"] is ours.second
    assert "second.bias" not in ours.state_dict()


def test_attributes_are_deleted_from_the_wrapped_module(net):
    ours = ORTModule(net)
    del ours.scale, ours.second, ours.offset
    assert not hasattr(net, "scale")
    assert not hasattr(net, "second")
    assert list(net._buffers) == []
    with pytest.raises(AttributeError, match="missing"):
        del ours.missing


# Methods.


@pytest.mark.parametrize("method", ["loss", "loss_by_forward"])
def test_methods_that_call_self_run_in_the_engine(pair, method):
    eager, ours = pair
    want, got = getattr(eager, method)(rows()), getattr(ours, method)(rows())
    torch.testing.assert_close(got, want)
    got.backward()
    want.backward()
    torch.testing.assert_close(ours.first.weight.grad, eager.first.weight.grad)
    assert torch_ort.counters()["forward_runs"] == 1
    assert torch_ort.counters()["backward_runs"] == 1


def test_methods_that_set_attributes_set_those_of_the_wrapped_module(pair):
    eager, ours = pair
    assert_same_steps(eager, ours)
    assert ours.set_scale(0.5) is ours
    assert ours.module.scale == 0.5
    eager.scale = 0.5
    assert torch.equal(ours._norm_of_weights(), eager._norm_of_weights())
    assert_same_steps(eager, ours)


def test_methods_may_call_those_of_a_base_class():
    class Child(Net):
        def loss(self, x):
            return super().loss(x) + 1

    child = Child()
    want = copy.deepcopy(child).loss(rows())
    torch.testing.assert_close(ORTModule(child).loss(rows()), want)


class Frozen(Net):
    """Overrides methods that every module has."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def state_dict(self, *args, **kwargs):
        return {"only": torch.ones(1)}

    def zero_grad(self, set_to_none=True):
        self.asked = set_to_none


def test_overridden_methods_that_the_wrapper_hands_on_are_used():
    ours = ORTModule(Frozen())
    assert ours.train() is ours
    assert ours.training
    assert not ours.norm.training
    assert list(ours.state_dict()) == ["only"]


def test_other_overridden_methods_are_used():
    ours = ORTModule(Frozen())
    ours.zero_grad(set_to_none=False)
    assert ours.module.asked is False


def test_the_signature_of_forward_is_that_of_the_wrapped_module(net):
    ours = ORTModule(net)
    assert inspect.signature(ours.forward) == inspect.signature(net.forward)
    assert list(inspect.signature(ours.forward).parameters) == ["x", "shift", "doubled"]
    assert ours.forward.__name__ == "forward"


def test_calling_forward_runs_in_the_engine(pair):
    eager, ours = pair
    torch.testing.assert_close(ours.forward(rows(), doubled=True), eager(rows(), doubled=True))
    assert torch_ort.counters()["forward_runs"] == 1


@pytest.mark.hands_over("PyTorch words the error")
def test_errors_of_forward_are_those_of_pytorch(pair, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager, _ = pair
    ours = ORTModule(copy.deepcopy(eager))
    with pytest.raises(RuntimeError) as want:
        eager(torch.ones(5, 7))
    with pytest.raises(RuntimeError) as got:
        ours(torch.ones(5, 7))
    assert str(got.value) == str(want.value)
    # The program's own error is no reason to give up on the engine.
    assert_same_steps(eager, ours)
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["forward_runs"] > 0


@pytest.mark.hands_over("forward words the error")
def test_missing_arguments_are_the_type_error_of_pytorch(pair, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    ours = ORTModule(copy.deepcopy(pair[0]))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        ours()
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        ours(rows(), y=1)


def test_compiling_the_wrapper_leaves_the_wrapped_module_alone(pair):
    eager, ours = pair
    ours.compile(backend="eager")
    assert ours.module._compiled_call_impl is None
    torch.testing.assert_close(ours(rows()), eager(rows()))


# Modes and moves.


class Modes(nn.Module):
    """Differs between train and eval by dropout, statistics and its own flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)

    def forward(self, x):
        y = self.drop(self.norm(self.linear(x)))
        return y * 2 if self.training else y


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_alternate(mode, graphs_captured):
    eager = Modes()
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(3):
        for model in (eager, ours):
            assert model.train() is model
            assert model.training
        torch.manual_seed(step)
        want = eager(rows())
        torch.manual_seed(step)
        got = ours(rows())
        torch.testing.assert_close(got, want)
        assert got.requires_grad
        want.sum().backward()
        got.sum().backward()
        # Products add up in another order, and a norm's gradients cancel out.
        torch.testing.assert_close(
            ours.linear.weight.grad, eager.linear.weight.grad, rtol=1e-5, atol=1e-4
        )
        for model in (eager, ours):
            assert model.eval() is model
            assert not model.training
        with mode():
            got = ours(rows())
            torch.testing.assert_close(got, eager(rows()))
        assert not got.requires_grad
        torch.testing.assert_close(ours(rows()), eager(rows()))
        torch.testing.assert_close(ours.state_dict(), eager.state_dict())
    assert graphs_captured() == 3


def test_training_is_the_flag_of_the_wrapped_module(net):
    net.eval()
    ours = ORTModule(net)
    assert not ours.training
    ours.training = True
    assert net.training
    assert not net.norm.training


@pytest.mark.parametrize(
    ("move", "dtype"),
    [
        (lambda m: m.double(), torch.float64),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.half().float(), torch.float32),
        (lambda m: m.to(torch.float64), torch.float64),
        (lambda m: m.to("cpu"), torch.float32),
        (lambda m: m.cpu(), torch.float32),
        (lambda m: m._apply(torch.Tensor.double), torch.float64),
        (lambda m: m.type(torch.float64), torch.float64),
    ],
)
def test_moves_return_the_wrapper_and_are_noticed(pair, move, dtype):
    eager, ours = pair
    ours(rows())
    move(eager)
    eager.norm.reset_running_stats()
    assert move(ours) is ours
    ours.norm.reset_running_stats()
    assert {p.dtype for p in ours.parameters()} == {dtype}
    want, got = eager(rows().to(dtype)), ours(rows().to(dtype))
    assert got.dtype == dtype
    close = {"rtol": 0.05, "atol": 0.02} if dtype.itemsize == 2 else {"rtol": None, "atol": None}
    torch.testing.assert_close(got, want, **close)
    want.sum().backward()
    got.sum().backward()
    torch.testing.assert_close(ours.second.weight.grad, eager.second.weight.grad, **close)


def test_apply_visits_the_wrapped_module_and_returns_the_wrapper(net):
    seen = []
    ours = ORTModule(net)
    assert ours.apply(seen.append) is ours
    assert seen == [net.first, net.norm, net.second, net]


def test_repr_shows_the_wrapped_module(net):
    lines = repr(ORTModule(net)).splitlines()
    assert lines[0] == "ORTModule("
    assert lines[1] == "  (module): Net("
    assert "    (first): Linear(in_features=4, out_features=6, bias=True)" in lines
    assert lines[-1] == ")"


# Copies.


def by_pickle(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("is_used", [False, True])
def test_copies_train_on_their_own(pair, duplicate, is_used, graphs_captured):
    eager, ours = pair
    if is_used:
        assert_same_steps(eager, ours)
    used = graphs_captured()
    other = duplicate(ours)
    assert type(other) is ORTModule
    assert other.module is not ours.module
    assert inspect.signature(other.forward) == inspect.signature(eager.forward)
    before = copy.deepcopy(ours.state_dict())
    assert_same_steps(copy.deepcopy(eager), other, steps=3)
    assert graphs_captured() == used + 1
    torch.testing.assert_close(ours.state_dict(), before, rtol=0, atol=0)
    assert_same_steps(eager, ours)
    assert graphs_captured() == used + (1 if is_used else 2)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_copies_have_methods_bound_to_themselves(pair, duplicate):
    eager, ours = pair
    ours.loss(rows())
    other = duplicate(ours)
    other.scale = 7.0
    assert ours.scale == 2.0
    eager.scale = 7.0
    torch.testing.assert_close(other.loss(rows()), eager.loss(rows()))
    assert other.set_scale(1.0) is other


def test_copies_keep_what_two_modules_share(net):
    ours = ORTModule(net)
    holder, inner = copy.deepcopy((ours, net))
    assert holder.module is inner


def test_a_copied_wrapper_inside_a_module_trains(pair):
    _, ours = pair
    outer = nn.Sequential(nn.Linear(4, 4), ours)
    outer(rows())
    eager = copy.deepcopy(nn.Sequential(outer[0], ours.module))
    other = copy.deepcopy(outer)
    want, got = eager(rows()), other(rows())
    torch.testing.assert_close(got, want)
    want.sum().backward()
    got.sum().backward()
    torch.testing.assert_close(other[0].weight.grad, eager[0].weight.grad)


def test_saving_whole_wrappers(pair, tmp_path):
    eager, ours = pair
    ours(rows())
    eager(rows())
    torch.save(ours, tmp_path / "module.pt")
    assert_same_steps(eager, torch.load(tmp_path / "module.pt", weights_only=False))


# Hooks.


def test_hooks_on_the_wrapper_fire_around_each_call(pair):
    eager, ours = pair
    for model in (eager, ours):
        model.seen = []
        model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model.register_forward_hook(lambda m, args, out: m.seen.append(out.detach()) or out + 1)
    for _ in range(3):
        torch.testing.assert_close(ours(rows()), eager(rows()))
    assert len(ours.seen) == 3
    torch.testing.assert_close(ours.seen, eager.seen)
    assert torch_ort.counters()["forward_runs"] == 3


def test_hooks_on_the_wrapper_take_keyword_arguments(pair):
    eager, ours = pair
    hook = lambda m, args, kwargs: (args, kwargs | {"doubled": True})  # noqa: E731
    handle = ours.register_forward_pre_hook(hook, with_kwargs=True)
    torch.testing.assert_close(ours(rows()), eager(rows(), doubled=True))
    handle.remove()
    torch.testing.assert_close(ours(rows()), eager(rows()))


def test_backward_hooks_on_the_wrapper_see_the_gradients(pair):
    eager, ours = pair
    seen = {}
    for name, model in (("want", eager), ("got", ours)):
        model.register_full_backward_hook(
            lambda m, inputs, outputs, name=name: seen.update({name: (inputs, outputs)})
        )
        model(rows().requires_grad_()).pow(2).sum().backward()
    torch.testing.assert_close(seen["got"], seen["want"])


@pytest.mark.parametrize("where", ["", "norm"])
def test_hooks_inside_are_part_of_the_graph_and_noticed(pair, where, graphs_captured):
    eager, ours = pair
    assert_same_steps(eager, ours)
    models = (eager, ours.module)
    handles = [
        m.get_submodule(where).register_forward_hook(lambda m, args, out: out * 3) for m in models
    ]
    assert_same_steps(eager, ours)
    assert graphs_captured() == 2
    for handle in handles:
        handle.remove()
    assert_same_steps(eager, ours)
    assert graphs_captured() == 2


def test_a_wrapper_inside_a_wrapper_is_one_graph(pair, graphs_captured):
    eager, ours = pair
    outer = ORTModule(nn.Sequential(ours, nn.Tanh()))
    assert_same_steps(nn.Sequential(eager, nn.Tanh()), outer)
    assert graphs_captured() == 1


@pytest.mark.filterwarnings("ignore:.*collides")
def test_keys_of_a_wrapper_inside_a_wrapper_have_no_prefix(net):
    assert list(ORTModule(ORTModule(net)).state_dict()) == list(net.state_dict())


def test_another_class_is_the_wrappers():
    """As `fully_shard` gives it one."""
    ours = ORTModule(Modes())
    ours.__class__ = type("Sharded", (ORTModule,), {"of_shards": lambda self: 7})
    assert type(ours).__name__ == "Sharded"
    assert type(ours.module) is Modes
    assert ours.of_shards() == 7
    assert ours.eval()(rows()).shape == ours.module(rows()).shape


@pytest.fixture
def library_model():
    """A model of transformers', made from a configuration."""
    hf = pytest.importorskip("transformers")
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=32, bos_token_id=0,
            eos_token_id=0,
        )
    )  # fmt: skip


def test_a_wrapper_of_a_librarys_model_passes_for_it(library_model, tmp_path):
    hf = pytest.importorskip("transformers")
    ours = ORTModule(library_model)
    assert isinstance(ours, hf.PreTrainedModel)
    assert isinstance(ours, ORTModule)
    assert type(ours) is ORTModule
    assert ours.__class__ is hf.GPT2LMHeadModel
    assert isinstance(ORTModule(Modes()), Modes) is False
    assert ORTModule(Modes()).__class__ is ORTModule
    ours.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is hf.GPT2LMHeadModel
    torch.testing.assert_close(loaded.state_dict(), library_model.state_dict(), rtol=0, atol=0)


def test_a_librarys_own_methods_run_on_the_wrapped_model(library_model):
    ids = torch.arange(1, 6).reshape(1, -1)
    expected = library_model.eval().generate(ids, max_new_tokens=3, do_sample=False)
    ours = ORTModule(library_model)
    torch.testing.assert_close(ours.generate(ids, max_new_tokens=3, do_sample=False), expected)
    assert ours.resize_token_embeddings(40) is library_model.get_input_embeddings()
    assert library_model.config.vocab_size == 40


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_copies_of_a_wrapper_of_a_librarys_model_are_wrappers(library_model, duplicate):
    copied = duplicate(ORTModule(library_model))
    assert type(copied) is ORTModule
    assert type(copied.module) is type(library_model)
    torch.testing.assert_close(copied.state_dict(), library_model.state_dict())


def test_a_class_derived_of_a_librarys_model_is_derived_of_the_wrapper(library_model):
    """`fully_shard` derives one of `__class__`, and sets it; the library still finds its own."""
    ours = ORTModule(library_model)
    for name in ("Sharded", "ShardedTwice"):
        kind = ours.__class__
        ours.__class__ = derived = type(name, (kind,), {name: lambda self: 7})
        assert isinstance(ours, ORTModule)
        assert not issubclass(type(ours), kind)
        assert getattr(ours, name)() == 7
        assert type(ours).__name__ == name
        assert ours.__class__ is derived
        assert isinstance(ours, type(library_model))
        assert ours.module is library_model
