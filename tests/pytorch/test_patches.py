"""What stands in torch for the time of a capture, seen from this thread, others and autograd's."""

import inspect
import subprocess
import sys
import textwrap
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch

import torch_ort
from torch_ort.pytorch import patches, patching
from torch_ort.pytorch.versions import minor
from torch_ort.record.recorder import RecordedInputs, record

FUNCTIONS = [
    row
    for row in patches.TABLE
    if isinstance(row, patching.Function) and not row.stays and row is not patches.IS_COMPILING
]
HARDSHRINK = torch.ops.aten.hardshrink.default


def standing(row: patching.Patch) -> object:
    """Give what stands in torch where a row may put something."""
    if isinstance(row, patching.OperatorKernels):
        return HARDSHRINK.py_kernels
    if isinstance(row, patching.MethodOfC):
        return row.is_in_place()
    owner, name = row.place
    return getattr(owner, name) if name == "__code__" else vars(owner).get(name)


def by(row: patching.Patch):
    """Put something in the place of a row."""
    if isinstance(row, patching.OperatorKernels):
        return row.by({HARDSHRINK: {}})
    if isinstance(row, patching.Value):
        return row.by(lambda theirs: [theirs])
    return row.by(lambda theirs, *args, **kwargs: theirs(*args, **kwargs))


UNDONE = [
    row
    for row in patches.TABLE
    if isinstance(row, patching.Function | patching.Value | patching.OperatorKernels)
    and not row.stays
]


@pytest.fixture
def another():
    """Run calls in one other thread."""
    with ThreadPoolExecutor(1) as threads:
        yield lambda call, *args: threads.submit(call, *args).result(60)


def test_rows_say_what_why_and_for_whom():
    assert len({row.target for row in patches.TABLE}) == len(patches.TABLE) > 20
    for row in patches.TABLE:
        assert row.why
        assert not (row.since and row.until) or minor(row.since) < minor(row.until)
        assert isinstance(row, patching.Function) or not (row.since or row.until)
        assert isinstance(row.scope, patching.Scope)
        assert row.scope is not patching.Scope.PROCESS or row.stays


@pytest.mark.parametrize("row", patches.TABLE, ids=lambda row: row.target)
def test_torch_has_what_a_row_replaces(row):
    if not isinstance(row, patching.Addition | patching.OperatorKernels | patching.Elsewhere):
        assert row.exists or not row.applies


@pytest.mark.parametrize("row", UNDONE, ids=lambda row: row.target)
def test_the_last_thread_that_leaves_puts_back_what_was_there(row, another):
    before = standing(row)
    here, there = ExitStack(), ExitStack()
    here.enter_context(by(row))
    ours = standing(row)
    if isinstance(row, patching.OperatorKernels) or (row.exists and row.applies):
        assert ours is not before
    another(there.enter_context, by(row))
    here.close()
    assert standing(row) is ours
    another(there.close)
    assert standing(row) is before


class OfTheProcess(types.ModuleType):
    """A configuration of torch's as it is before torch 2.12: one for all threads."""

    def __init__(self) -> None:
        super().__init__("configuration_of_the_process")
        vars(self).update(_config={"setting": types.SimpleNamespace(user_override=False)})

    def __getattr__(self, name):
        try:
            return self._config[name].user_override
        except KeyError as error:
            raise AttributeError(name) from error

    def __setattr__(self, name, value):
        self._config[name].user_override = value

    @contextmanager
    def patch(self, **settings):
        ((name, value),) = settings.items()
        before = getattr(self, name)
        setattr(self, name, value)
        yield
        setattr(self, name, before)


OF_THE_PROCESS = patching.Setting("configuration_of_the_process:setting", "It is tested.")


@pytest.mark.parametrize(
    "row",
    [*(row for row in patches.TABLE if isinstance(row, patching.Setting)), OF_THE_PROCESS],
    ids=lambda row: row.target,
)
def test_a_setting_has_another_value_in_one_thread(row, another, monkeypatch):
    monkeypatch.setitem(sys.modules, "configuration_of_the_process", OfTheProcess())
    row = patching.Setting(row.target, row.why)
    owner, name = row.place
    before = getattr(owner, name)
    here, there = ExitStack(), ExitStack()
    here.enter_context(row.by("ours"))
    assert (getattr(owner, name), another(getattr, owner, name)) == ("ours", before)
    another(lambda: there.enter_context(row.by("another's")))
    with owner.patch(**{name: "inside"}):
        assert (getattr(owner, name), another(getattr, owner, name)) == ("inside", "another's")
    assert getattr(owner, name) == "ours"
    here.close()
    assert (getattr(owner, name), another(getattr, owner, name)) == (before, "another's")
    another(there.close)
    assert (getattr(owner, name), another(getattr, owner, name)) == (before, before)


def test_functions_are_torchs_own_for_other_threads(another):
    def refuse(theirs, *args, **kwargs):
        raise RuntimeError("refused")

    def compiled() -> int:
        return torch.compile(len)([1, 2])

    with patches.COMPILE.by(refuse):
        with pytest.raises(RuntimeError, match="refused"):
            torch.compile(len)
        assert another(compiled) == 2
        with patches.COMPILE.as_torch_has_it():
            assert torch.compile(len)([1, 2]) == 2
        with (
            patches.COMPILE.by(lambda theirs, function: lambda *args: theirs),
            pytest.raises(RuntimeError, match="refused"),
        ):
            torch.compile(len)()(len)  # what is around stands below
    assert compiled() == 2


def test_is_compiling_is_an_answer_to_one_thread(another):
    is_compiling = torch.compiler.is_compiling  # as a program may have bound it
    with patches.IS_COMPILING.by(lambda theirs: True):
        assert is_compiling() is True
        assert torch._utils.is_compiling() is True
        assert another(is_compiling) is False
    assert is_compiling() is False


def test_operators_have_other_kernels_in_one_thread(another):
    before = dict(HARDSHRINK.py_kernels)
    with patches.KERNELS.by({HARDSHRINK: {}}):
        assert dict(HARDSHRINK.py_kernels) == {}
        assert another(dict, HARDSHRINK.py_kernels) == before
        key = torch._C.DispatchKey.AutogradCPU
        ours, theirs = HARDSHRINK._get_dispatch(key), another(HARDSHRINK._get_dispatch, key)
        assert isinstance(ours, torch._C.DispatchKey)
        assert theirs in before.values()
        with patches.KERNELS.by({torch.ops.aten.dropout.default: {}}):
            assert dict(HARDSHRINK.py_kernels) == {}
    assert HARDSHRINK.py_kernels == before


def test_a_thread_inside_of_one_operator_is_not_inside_of_another(another):
    before = dict(HARDSHRINK.py_kernels)
    there = ExitStack()
    another(there.enter_context, patches.KERNELS.by({HARDSHRINK: {}}))
    with patches.KERNELS.by({torch.ops.aten.dropout.default: {}}):
        assert dict(HARDSHRINK.py_kernels) == before
    another(there.close)


class Nested(torch.autograd.Function):
    """Calls a backward inside of its own, as deep as makes autograd take another thread."""

    @staticmethod
    def forward(ctx, x, depth, seen):
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Nested.apply(x, ctx.depth - 1, ctx.seen).backward()
        else:
            ctx.seen.append((threading.get_ident(), torch.compiler.is_compiling()))
        return gradient, None, None


def test_threads_of_autograds_that_work_for_one_that_is_inside_are_inside():
    def run() -> tuple[int, bool]:
        seen: list[tuple[int, bool]] = []
        Nested.apply(torch.ones(1, requires_grad=True), 100, seen).backward()
        return seen[0]

    with patches.IS_COMPILING.by(lambda theirs: True):
        thread, is_compiling = run()
    assert thread != threading.get_ident()
    assert is_compiling
    assert run()[1] is False


def test_nothing_is_handed_on_after_a_capture():
    """The end of a thread that PyTorch has handed something to waits for Python's lock."""
    if not patching._CAN_TAKE_BACK:
        pytest.skip("this torch cannot take back what it hands on")
    model = torch.nn.Linear(4, 4)
    for module in (torch.compile(model, backend="ort"), torch_ort.ORTModule(model)):
        module(torch.ones(2, 4)).sum().backward()
        assert not torch._C._is_key_in_tls(patching._KEY)


def test_what_somebody_puts_on_top_stays(monkeypatch):
    own = torch.compile
    with patches.COMPILE.by(lambda theirs, *args: "ours"):
        below = torch.compile

        def on_top(*args):
            return below(*args)

        monkeypatch.setattr(torch, "compile", on_top)
        assert torch.compile(len) == "ours"
    assert torch.compile is on_top
    assert torch.compile(len)([1]) == 1
    with patches.COMPILE.by(lambda theirs, *args: "again"):
        assert torch.compile(len) == "again"
    monkeypatch.undo()  # which finds ours, and puts it there again
    assert torch.compile(len)([1]) == 1
    with patches.COMPILE.by(lambda theirs, *args: "at last"):
        assert torch.compile(len) == "at last"
    assert torch.compile is own


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Settings:
    """An object of the user's, whose fields a forward reads."""

    def __init__(self) -> None:
        self.scale = 2.0


class Model(torch.nn.Module):
    """What a capture replaces is used here: attributes, dropout, Functions, scripts, seeds."""

    def __init__(self, meet=None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.dropout = torch.nn.Dropout(0.0)
        self.settings = Settings()
        self.meet = meet

    def forward(self, x):
        if self.meet is not None:
            self.meet()
        x = Doubled.apply(self.linear(self.dropout(x)))
        x = torch.nn.functional.hardshrink(x) * self.settings.scale
        return torch.nn.functional.interpolate(x[None, None], scale_factor=2.0)[0, 0]


def graph_of(compile_model, x) -> tuple[str, list]:
    """Give the code that a backend is asked to compile, and the numbers that come of it."""
    codes = []

    def backend(module, inputs):
        codes.append(module.code)
        return module.forward

    model = compile_model()
    torch.compiler.reset()
    result = torch.compile(model, backend=backend, fullgraph=True)(x)
    return codes, result.tolist()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_another_backend_compiles_in_another_thread_while_a_capture_runs(backend):
    """The capture stands still in the middle of forward until the other thread is done."""
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    plain = Model()
    expected = plain(x)
    expected_code, _ = graph_of(lambda: plain, x)
    begun, done = threading.Event(), threading.Event()

    def meet() -> None:
        begun.set()
        assert done.wait(120)

    model = Model(meet)
    model.load_state_dict(plain.state_dict())
    wrapped = torch_ort.ORTModule(model)

    def compile_elsewhere() -> tuple:
        try:
            assert begun.wait(60)
            assert not torch.compiler.is_compiling()
            code, _ = graph_of(lambda: plain, x)
            torch.compiler.reset()
            compiled = torch.compile(plain, backend=backend, fullgraph=True)
            given = x.clone().requires_grad_()
            result = compiled(given)
            result.sum().backward()
            return code, result.detach(), given.grad
        finally:
            done.set()

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(compile_elsewhere)
        given = x.clone().requires_grad_()
        result = wrapped(given)
        code, compiled, gradient = other.result(120)
    result.sum().backward()
    assert code == expected_code
    torch.testing.assert_close(compiled, expected.detach())
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(gradient, given.grad)
    assert torch_ort.counters()["fallbacks"] == 0


def test_two_threads_record_at_once():
    """Each stands still in its function until the other one has come as far, twice."""
    barrier = threading.Barrier(2)

    def run(size: int) -> list[str]:
        inputs = RecordedInputs()

        def forward(x):
            barrier.wait(60)
            x = torch.nn.functional.dropout(torch.nn.functional.hardshrink(x), 0.5, False)
            x = x.reshape(-1, 2)
            barrier.wait(60)
            return [torch.nn.functional.pad(x, (0, size))]

        with inputs.tracing():
            x = inputs.tensor(torch.ones(size, 4), "x")
            recording = record(forward, [x], lambda: True)
        return [str(node.target) for node in recording.module.graph.nodes]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, (2, 3)))
    expected = ["primals_1", "aten.hardshrink.default", "aten.view.default",
                "aten.constant_pad_nd.default", "output"]  # fmt: skip
    assert found == [expected, expected]


def test_the_registry_of_backends_knows_names_before_and_after():
    from torch._dynamo.backends import registry

    parameters = inspect.signature(registry.register_backend).parameters
    assert [*parameters] == ["compiler_fn", "name", "tags"]
    assert registry.lookup_backend("ort") is registry._COMPILER_FNS["ort"]
    again = registry.register_backend(compiler_fn=registry._COMPILER_FNS["ort"], name="ort")
    assert again is registry._COMPILER_FNS["ort"]


def test_torch_is_as_it_was(tmp_path):
    """In a fresh process: after another backend, and after ours, but for what the table says."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import inspect, sys, types
            import torch

            def owners():
                for name, module in sorted(sys.modules.items()):
                    if name == "torch" or name.startswith("torch."):
                        yield name, module
                        for key, value in list(vars(module).items()):
                            if isinstance(value, type) and value.__module__ == name:
                                yield f"{name}:{key}", value

            def snapshot():
                kinds = (types.FunctionType, types.BuiltinFunctionType, classmethod, staticmethod,
                         property)
                found = {}
                for name, owner in owners():
                    for key, value in list(vars(owner).items()):
                        if key.startswith("__compiled_fn"):  # what Dynamo has made
                            continue
                        if isinstance(value, kinds) or type(value).__name__ == "instancemethod":
                            code = getattr(value, "__code__", None)
                            found[name, key] = (value, code)
                for name in ("hardshrink", "dropout"):
                    operator = getattr(torch.ops.aten, name).default
                    found[name, "py_kernels"] = (operator.py_kernels, None)
                generators = torch.random.default_generator, torch.cuda.default_generators
                found["generators"] = generators
                return found

            def is_another(a, b):
                return a[0] is not b[0] or a[1] is not b[1]

            def is_ours(value):
                return getattr(value, "__module__", "").startswith("torch_ort")

            def changed(before):
                now = snapshot()
                found = [key for key in before if key in now and is_another(before[key], now[key])]
                new = [key for key in now if key not in before and is_ours(now[key][0])]
                return sorted(map(str, found + new))

            def step(run, x):
                run(x).sum().backward()

            x = torch.randn(3, 4, requires_grad=True)
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Hardshrink())
            step(torch.compile(model, backend="aot_eager"), x)
            before = snapshot()
            import torch_ort
            assert changed(before) == [], changed(before)
            torch.compiler.reset()
            step(torch.compile(model, backend="aot_eager"), x)
            assert changed(before) == [], changed(before)
            step(torch_ort.ORTModule(model), x)
            assert changed(before) == [], changed(before)
            torch.compiler.reset()
            step(torch.compile(model, backend="ort"), x)
            from torch_ort.pytorch import patches
            stay = [row for row in patches.TABLE if row.stays and isinstance(row, patches.Function)]
            names = {row.place[1] for row in stay} | {"register_backend"}
            assert {eval(key)[1] for key in changed(before)} == names, changed(before)
            print("as it was")
            """
        )
    )
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300
    )
    assert run.stdout == "as it was\n", run.stderr
