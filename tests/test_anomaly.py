"""`detect_anomaly`: it finds what makes a NaN, names it and the line that called it, and changes nothing else."""

import functools
import gc
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import sweepgrad as sg
from launch import quiet
from sweepgrad import anomaly
from sweepgrad.graph import process
from sweepgrad.ops.op import OPS, Elementwise
from sweepgrad.tensor import WATCHERS

INF, NAN = float("inf"), float("nan")
TIMEOUT = 60


def t(*values, dtype="float64", grad=True):
    return sg.asarray(list(values), dtype=dtype, requires_grad=grad)


def at(function, text=""):
    """The file and line of the first line of `function` that has `text`."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(k for k, line in enumerate(lines) if text in line)}"


def message(function, **settings):
    """What the error says that `function` raises; HERE stands for the line on which `function`, a lambda, is."""
    with pytest.raises(sg.AnomalyError) as caught, sg.detect_anomaly(**settings):
        function()
    return str(caught.value).replace(at(function), "HERE")


def state():
    gc.collect()
    while sg.sweep().remaining:
        pass
    now = sg.graph.stats()
    return now.nodes, now.variables, now.saved_bytes, now.consumed


@pytest.fixture(autouse=True)
def _off_afterwards():
    yield
    assert WATCHERS == []
    assert not anomaly.is_watching()
    sg.log(t(-1.0))
    sg.sweep(collect_cycles=True)
    sg.graph.audit()


# --- forward --------------------------------------------------------------------------------------------------------

LOG_OF_ROWS = sg.fuse(lambda x: sg.sum(sg.log(x), axis=-1))
DATA = np.array([[2.0, -1.0], [0.0, 3.0]])
DATA.flags.writeable = False
BIG = np.ones((300, 400))
BIG[7, 11] = -1.0

# (operation, where it is called, what the message says of the elements)
FORWARD = [
    ("log", lambda: sg.log(t(1.0, -1.0)), "1 of 2 elements of its result (shape (2,), float64), the first at"),
    ("log", lambda: sg.log(t(1.0, -2.0, grad=False)), "the first at index (1,), from -2.0;"),
    ("log", lambda: t(-2.0, dtype="float32").log(), "1 of 1 elements of its result (shape (1,), float32)"),
    ("log", lambda: sg.log(-1.0), "(shape (), float64), the first at index (), from -1.0;"),
    ("log", lambda: sg.log(DATA), "(shape (2, 2), float64), the first at index (0, 1), from -1.0;"),
    ("log", lambda: np.log(t(-1.0)), "from -1.0;"),
    ("log", lambda: sg.log(sg.asarray(BIG)), "(shape (300, 400), float64), the first at index (7, 11)"),
    ("log", lambda: sg.log(sg.asarray(DATA.T)), "the first at index (1, 0), from -1.0;"),
    ("sqrt", lambda: t(-4.0) ** 0.5, "from -4.0;"),
    ("pow", lambda: t(-4.0) ** 1.5, "from -4.0 and 1.5;"),
    ("asin", lambda: sg.asin(t(2.0)), "from 2.0;"),
    ("sin", lambda: sg.sin(t(INF)), "from inf;"),
    ("divide", lambda: t(1.0, 0.0) / t(0.0, 0.0), "the first at index (1,), from 0.0 and 0.0;"),
    ("divide", lambda: 0 / t(1.0, 0.0), "the first at index (1,), from 0.0 and 0.0;"),
    ("divide", lambda: sg.asarray([1, 0]) / sg.asarray([2, 0]), "the first at index (1,), from 0.0 and 0.0;"),
    ("remainder", lambda: t(1.0, 2.0) % 0.0, "2 of 2 elements"),
    ("subtract", lambda: t(INF) - INF, "from inf and inf; change its inputs"),
    ("add", lambda: t(INF, 0.0) + t(-INF, 1.0), "the first at index (0,), from inf and -inf;"),
    ("multiply", lambda: t(0.0, 1.0) * t(INF), "the first at index (0,), from 0.0 and inf;"),
    ("multiply", lambda: sg.asarray(DATA) * np.array([[INF], [INF]]), "the first at index (1, 0), from 0.0 and inf;"),
    ("multiply", lambda: sg.asarray(DATA).T * t(INF, INF), "the first at index (0, 1), from 0.0 and inf;"),
    ("sum", lambda: sg.sum(t(INF, 1.0, -INF)), "shape (3,) with 2 infinite elements;"),
    ("mean", lambda: sg.mean(sg.zeros((0, 3)), axis=0), "3 of 3 elements of its result (shape (3,), float64)"),
    ("prod", lambda: sg.prod(t(INF, 0.0)), "shape (2,) with 1 infinite element;"),
    ("divide", lambda: sg.var(t(3.0), correction=1), "from 0.0 and 0.0;"),
    ("divide", lambda: sg.std(sg.asarray(DATA), axis=0, correction=2), "(shape (2,), float64)"),
    ("matmul", lambda: sg.asarray(DATA) @ t(INF, 0.0), "with no infinite elements and an input of shape (2,) with 1 "),
    ("matmul", lambda: sg.tensordot(t(0.0), t(INF), axes=1), "(shape (1, 1), float64)"),
    ("multiply", lambda: sg.vecdot(t(0.0), t(INF)), "from 0.0 and inf;"),
    ("multiply", lambda: sg.softmax(t(-INF, -INF)), "from 0.0 and inf;"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function", "part"), FORWARD, ids=[f"{k}-{row[0]}" for k, row in enumerate(FORWARD)])
def test_operation_that_first_made_it(name, function, part):
    function()  # off, it raises nothing
    before = state()
    said = message(function)
    assert said.startswith(f"`{name}` at HERE made NaN (forward): ")
    assert part in said
    assert len(said) < 500
    values = said.partition(", from ")[2].partition(";")[0].replace("no infinite", "")
    assert ("`detect_anomaly(infinities=True)` says which operation made the infinity" in said) == ("inf" in values)
    assert state() == before
    with sg.no_grad():
        assert message(function) == said


def test_site_is_the_innermost_line_outside_of_the_package():
    def helper(x):
        return sg.var(x, correction=1)

    assert f" at {at(helper, 'var')} made NaN" in message(lambda: helper(t(1.0)))
    namespace = {"sg": sg, "__name__": "sweepgradual"}  # a module whose name begins alike
    exec(compile("def f(x):\n    y = 2.0 * x\n    return sg.log(y)", "their file.py", "exec"), namespace)
    assert message(lambda: namespace["f"](t(-1.0))).startswith("`log` at their file.py:3 made NaN")


def test_each_element_is_judged_by_itself_in_elementwise_operations():
    assert "1 of 3 elements" in message(lambda: sg.log(t(NAN, 1.0, -1.0)))
    x = sg.asarray([[NAN], [0.0]])
    assert "1 of 4 elements of its result (shape (2, 2), float64), the first at index (1, 0)" in message(
        lambda: x / sg.asarray([0.0, 1.0])
    )


def test_what_is_handed_a_nan_is_not_at_fault():
    x, mask = t(NAN, 1.0, 4.0), sg.asarray([False, True, True])
    with sg.detect_anomaly():
        y = sg.where(mask, sg.sqrt(x), 0.0) * sg.exp(x * NAN)
        assert np.isnan((x @ x).item())
        assert np.isnan(sg.sum(y).item())
        assert np.isnan(LOG_OF_ROWS(x).item())
        assert np.isnan(sg.softmax(x).numpy()).all()
        assert np.isnan(sg.astype(x, "float32").numpy()[0])
        assert np.isnan(sg.full((2,), NAN).numpy()).all()
        assert finds(lambda: sg.zeros(1) / sg.zeros(1))


def test_operations_that_make_no_floats_are_not_looked_at():
    x = sg.asarray([0, 1])
    with sg.detect_anomaly():
        assert (x // 1).tolist() == [0, 1]
        assert sg.isnan(t(NAN)).item()
        assert not (t(NAN) == t(NAN)).item()
        assert sg.argmax(t(NAN, 1.0)).item() == 0


@pytest.mark.parametrize("grad", [False, True])
def test_fused_function_names_the_operation_within(grad):
    fused = sg.fuse(lambda x, k: (sg.log(x) * k, sg.exp(x)))
    x = t(1.0, -1.0, grad=grad)
    before = state()
    call = lambda: fused(x, 2.0)  # noqa: E731
    with pytest.raises(sg.AnomalyError) as caught, sg.detect_anomaly():
        call()
    assert str(caught.value).startswith(f"`log` at {at(fused.plain)} made NaN (forward): 1 of 2 elements")
    outer = str(caught.value.__context__)
    assert outer.startswith(f"`<lambda>` at {at(call)} made NaN (forward): 1 of 2 elements of its result (shape (2,)")
    assert "an input of shape (2,) with no infinite elements and the number 2.0;" in outer
    del caught
    assert state() == before


def test_fused_function_that_is_at_fault_only_as_a_whole():
    """One that runs as it is makes none: the fused one is named."""
    calls = []

    def f(x):
        calls.append(type(x) is sg.Tensor)
        return sg.log(x) if not calls[-1] else sg.exp(x)

    fused = sg.fuse(f)
    assert message(lambda: fused(t(-1.0))).startswith("`f` at HERE made NaN (forward)")
    assert calls == [False, True]


# --- backward -------------------------------------------------------------------------------------------------------


def masked_sqrt(x):
    return sg.where(x > 0.0, sg.sqrt(x), 0.0)


def norm(x):
    return sg.sqrt(sg.sum(x * x))


def masked_product(x):
    y = (x + 1.0) @ t(INF, 1.0, grad=False)
    return sg.where(sg.isfinite(y), y, 0.0)


# (operation, function of a variable that is zero, what the line on which it calls the operation has)
BACKWARD = [
    ("sqrt", lambda x: sg.sqrt(x) * 0.0, "lambda"),
    ("sqrt", masked_sqrt, "sg.sqrt"),
    ("multiply", norm, "x * x"),
    ("log", lambda x: sg.where(x > 0.0, sg.log(x), 0.0), "lambda"),
    ("divide", lambda x: sg.where(x > 0.0, 1.0 / x, 0.0), "lambda"),
    ("reciprocal", lambda x: sg.where(x > 0.0, sg.reciprocal(x), 0.0), "lambda"),
    ("pow", lambda x: x**0.25 * 0.0, "lambda"),
    ("divide", lambda x: sg.where(x > 0.0, sg.asarray([[1.0], [2.0]]) / x, 0.0), "lambda"),
    ("matmul", masked_product, "@"),
    ("masked_sqrt", sg.fuse(masked_sqrt), None),
]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("case", range(len(BACKWARD)), ids=[f"{k}-{row[0]}" for k, row in enumerate(BACKWARD)])
def test_operation_whose_derivative_first_made_it(case, create_graph):
    name, function, line = BACKWARD[case]
    x = sg.zeros((2,), requires_grad=True)
    function(x).sum().backward()
    assert np.isnan(x.grad.numpy()).any()
    x.grad = kept = t(1.0, 2.0, grad=False)

    def run():
        function(x).sum().backward(create_graph=create_graph)

    before = state()
    said = message(run)
    place = at(run, "function(x)") if line is None else at(function, line)
    assert said.startswith(f"`{name}` at {place} made NaN in its derivative (backward): "), said
    assert "of the cotangent of an input (shape (" in said
    assert x.grad is kept
    assert state() == before


def test_message_of_a_derivative():
    x = sg.asarray([[4.0, 0.0]], dtype="float32", requires_grad=True)
    said = message(lambda: (sg.sqrt(x) * 0.0).sum().backward())
    assert said == (
        "`sqrt` at HERE made NaN in its derivative (backward): 1 of 2 elements of the cotangent of an input "
        "(shape (1, 2), float32), the first at index (0, 1), from cotangent and saved values 0.0, 0.0; put another "
        "input in this one's place with `where` before it, as a mask after it comes too late"
    )
    said = message(lambda: norm(x * 0.0).backward())
    assert "from cotangent and saved values inf, 0.0" in said
    assert "`detect_anomaly(infinities=True)` says which operation made the infinity" in said
    said = message(lambda: norm(x * 0.0).backward(), infinities=True)
    assert said.startswith("`sqrt` at ")
    assert "made an infinity in its derivative (backward): 1 of 1 elements" in said


@pytest.mark.parametrize("create_graph", [False, True])
def test_operations_from_outside_have_no_site(create_graph):
    x = sg.zeros((2,), requires_grad=True)
    y = (sg.sqrt(x) * 0.0).sum()
    said = message(lambda: y.backward(create_graph=create_graph))
    assert said.startswith(
        "`sqrt` called outside of `detect_anomaly` (compute it within to see the line) made NaN in its"
    )
    assert x.grad is None
    y.backward()  # the graph is as it was
    assert np.isnan(x.grad.numpy()).all()


def test_operations_from_within_are_not_looked_at_outside():
    x = sg.zeros((2,), requires_grad=True)
    with sg.detect_anomaly():
        y = (sg.sqrt(x) * 0.0).sum()
    y.backward(retain_graph=True)
    assert np.isnan(x.grad.numpy()).all()
    assert str(y).endswith("op=sum)")
    place = at(test_operations_from_within_are_not_looked_at_outside, "sqrt(x)")
    assert message(lambda: y.backward()).startswith(f"`sqrt` at {place} made NaN in its derivative")


def test_second_derivative():
    x = t(1.0, 0.0)
    with sg.detect_anomaly():
        y = x**1.5
        y.sum().backward(create_graph=True)
    assert x.grad.tolist() == [1.5, 0.0]
    slope, x.grad = x.grad, None
    place = at(test_second_derivative, "x**1.5")
    said = message(lambda: (slope * 0.0).sum().backward())
    assert said.startswith(f"`pow`, in the derivative of `pow`, at {place} made NaN in its derivative (backward)"), said
    assert x.grad is None
    said = message(lambda: sg.grad(lambda v: sg.grad(lambda u: sg.sum(u**1.5) * 0.0)(v).sum())(t(0.0, grad=False)))
    assert said.startswith("`pow`, in the derivative of `pow`, at HERE made NaN in its derivative (backward)")


def test_third_derivative():
    """What a derivative of a derivative computes is told by the operation that was called, too."""
    x = t(0.0)
    with sg.detect_anomaly():
        y = sg.asinh(x)
        y.sum().backward(create_graph=True)
        second, x.grad = x.grad, None
        second.sum().backward(create_graph=True)
    third = x.grad
    said = message(lambda: third.backward(sg.asarray([INF])))
    place = at(test_third_derivative, "asinh")
    assert said.startswith(
        f"`multiply`, in the derivative of `asinh`, at {place} made NaN in its derivative (backward)"
    )


@pytest.mark.parametrize("transform", [sg.grad, sg.value_and_grad])
def test_functional_gradients(transform):
    function = lambda x: sg.sum(sg.where(x > 0.0, sg.sqrt(x), 0.0))  # noqa: E731
    said = message(lambda: transform(function)(np.zeros(2)))
    assert said.startswith(f"`sqrt` at {at(function)} made NaN in its derivative (backward): 2 of 2 elements")
    fused = sg.fuse(function)
    said = message(lambda: transform(fused)(np.zeros(2)))
    assert said.startswith("`<lambda>` at HERE made NaN in its derivative (backward): 2 of 2 elements")
    fused = sg.fuse(lambda x: sg.sum(sg.log(x)))
    assert message(lambda: transform(fused)(-np.ones(2))).startswith(f"`log` at {at(fused.plain)} made NaN (forward)")
    with sg.detect_anomaly():
        found = transform(fused)(np.array([1.0, 2.0]))
    assert (found if transform is sg.grad else found[1]).tolist() == [1.0, 0.5]


SUMS = {
    "added by a kernel": lambda y: sg.sqrt(y) - sg.sqrt(y),
    "two added": lambda y: sg.reshape(sg.sqrt(sg.reshape(y, (-1,))), (2, 1)) - sg.sqrt(sg.reshape(y, (2, 1))),
    "a third added": lambda y: (
        sg.sqrt(sg.reshape(y, (2, 1))) + sg.exp(sg.reshape(y, (2, 1))) - sg.sqrt(sg.reshape(y, (2, 1)))
    ),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("uses", SUMS)
@pytest.mark.parametrize("variable", [False, True])
def test_sum_of_cotangents(uses, create_graph, variable):
    x = sg.zeros((2,), requires_grad=True)

    def run():
        y = x if variable else sg.negative(x)
        SUMS[uses](y).sum().backward(create_graph=create_graph)

    before = state()
    said = message(run)
    what = "a variable of shape (2,)" if variable else f"the result of `negative` at {at(run, 'negative')}"
    assert said.startswith(
        f"adding the cotangents of {what} made NaN (backward): 2 of 2 elements of the sum (shape (2,)"
    )
    assert x.grad is None
    assert state() == before


@pytest.mark.parametrize("create_graph", [False, True])
def test_sum_with_an_earlier_gradient(create_graph):
    x = sg.zeros((1,), requires_grad=True)
    with sg.detect_anomaly():
        sg.sqrt(x).sum().backward(create_graph=create_graph)
    x.grad = kept = x.grad.detach()
    said = message(lambda: (-sg.sqrt(x)).sum().backward(create_graph=create_graph))
    assert said.startswith("`add` at HERE made NaN where a pass adds to a `grad` (backward): 1 of 1 elements")
    assert "from inf and -inf" in said
    assert x.grad is kept


@pytest.mark.parametrize("create_graph", [False, True])
def test_hooks(create_graph):
    x = t(1.0, 2.0)

    def run(hook):
        y = x * 2.0
        y.register_hook(hook)
        (y + x).sum().backward(create_graph=create_graph)

    def made(ct):
        return sg.log(ct - 2.0)

    said = message(lambda: run(lambda ct: t(0.0, NAN, grad=False)))
    assert said.startswith(
        f"a hook of the result of `multiply` at {at(run, 'x * 2.0')} returned NaN (backward): 1 of 2 elements"
    )
    said = message(lambda: run(made))
    assert said.startswith(f"`log` at {at(made, 'log')} made NaN (forward): 2 of 2 elements")
    x.register_hook(lambda ct: ct * NAN)
    assert message(lambda: run(lambda ct: None)).startswith(
        "a hook of a variable of shape (2,) returned NaN (backward)"
    )
    assert x.grad is None
    sg.sweep(collect_cycles=True)


def test_pass_within_a_hook_is_looked_at_by_itself():
    x, inner = t(1.0), sg.zeros((1,), requires_grad=True)
    outcomes = []

    def hook(ct):
        with sg.enable_grad():
            bad, good = masked_sqrt(inner).sum(), (inner * 3.0).sum()
        assert finds(bad.backward)
        good.backward()
        outcomes.append(inner.grad.item())

    with sg.detect_anomaly():
        y = x * 2.0
        y.register_hook(hook)
        (y * y).sum().backward()
    assert outcomes == [3.0]
    assert x.grad.item() == 8.0


def test_nan_that_came_in_as_data():
    """Is nobody's fault, and may be masked; a pass says where it met it."""
    data, w = sg.asarray([NAN, 1.0]), t(2.0, 3.0)
    with sg.detect_anomaly():
        kept = sg.where(sg.isnan(data), 0.0, data)
        (kept * w).sum().backward()
    assert w.grad.tolist() == [0.0, 1.0]
    w.grad = None
    said = message(lambda: sg.where(sg.isnan(data), 0.0, data * w).sum().backward())
    assert said.startswith("`multiply` at HERE has a derivative with NaN (backward): 1 of 2 elements")
    assert "no operation made it within `detect_anomaly`: it came in as data, or was computed before" in said
    said = message(lambda: (data + w).sum().backward())
    assert said.startswith(
        "`backward` at HERE begins at NaN: 1 of 1 elements of the result of `sum` at HERE (shape (), float64)"
    )
    assert "no operation made it within `detect_anomaly`" in said
    with sg.detect_anomaly():
        (data + w).backward(t(0.0, 1.0, grad=False))  # what is NaN is not asked for
    assert w.grad.tolist() == [0.0, 1.0]
    said = message(lambda: (w * 1.0).backward(t(NAN, 1.0, grad=False)))
    assert said.startswith("`backward` at HERE was given NaN: 1 of 2 elements of `gradient` (shape (2,), float64)")
    assert w.grad.tolist() == [0.0, 1.0]
    assert message(lambda: sg.grad(lambda u: sg.sum(u + NAN))(1.0)).startswith("`backward` at HERE begins at NaN")


def test_nan_from_before():
    x = t(-1.0)
    y = sg.log(x)
    with sg.detect_anomaly():
        z = y * 2.0
    assert message(lambda: z.sum().backward()).startswith("`backward` at HERE begins at NaN")
    assert x.grad is None


def test_structural_rules_tell_of_what_they_saved():
    data, w = sg.asarray([[NAN, 1.0]]), t(2.0, 3.0)
    said = message(lambda: sg.where(False, data @ w, 0.0).sum().backward())
    assert said.startswith("`matmul` at HERE has a derivative with NaN (backward): 1 of 2 elements")


# --- infinities -----------------------------------------------------------------------------------------------------


def test_infinities():
    x = t(1000.0, 1.0)
    with sg.detect_anomaly():
        assert sg.exp(x).tolist()[0] == INF
    said = message(lambda: sg.exp(x), infinities=True)
    assert said.startswith("`exp` at HERE made an infinity (forward): 1 of 2 elements")
    assert "the first at index (0,), from 1000.0; change its inputs" in said
    said = message(lambda: sg.sqrt(x * 0.0).sum().backward(), infinities=True)
    assert said.startswith("`sqrt` at HERE made an infinity in its derivative (backward): 2 of 2 elements")
    assert message(lambda: sg.log(-x), infinities=True).startswith("`log` at HERE made NaN (forward)")
    said = message(lambda: sg.sin(sg.asarray([INF])), infinities=True)
    assert said.startswith("`sin` at HERE made NaN (forward)")
    assert "says which operation made the infinity" not in said  # none did
    assert message(lambda: sg.matmul(x * 1e305, x), infinities=True).startswith("`matmul` at HERE made an infinity")
    with sg.detect_anomaly(infinities=True):  # that came in as data
        y = sg.maximum(sg.asarray([-INF, 0.0]), x)
        sg.clip(sg.asarray([INF, NAN]) * 2.0 + y, None, 5.0)
        assert sg.logsumexp(sg.asarray([-INF, 0.0])).item() == 0.0
        assert sg.max(sg.asarray([INF, 0.0])).item() == INF
        y.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
    steep = t(1e-200)
    said = message(lambda: (steep * 1e200 * 1e200).sum().backward(sg.asarray(1e200)), infinities=True)
    assert said.startswith("`multiply` at HERE made an infinity in its derivative (backward)")


def test_sum_of_large_cotangents():
    x = t(1.0)
    y = x * 1.0
    said = message(lambda: (y.reshape(1, 1) + y.reshape(1, 1)).backward(sg.full((1, 1), 1.5e308)), infinities=True)
    assert said.startswith(
        "adding the cotangents of the result of `multiply` called outside of `detect_anomaly` (compute"
    )
    assert "made an infinity (backward): 1 of 1 elements of the sum (shape (1,), float64)" in said
    assert x.grad is None


# --- the mode -------------------------------------------------------------------------------------------------------


def finds(function=lambda: sg.log(t(-1.0))):
    try:
        function()
    except sg.AnomalyError:
        return True
    return False


def overflow():
    return sg.exp(t(1000.0))


def test_nesting_and_what_is_put_back():
    assert not finds()
    with sg.detect_anomaly():
        with sg.detect_anomaly(infinities=True):
            assert finds()
            assert finds(overflow)
        assert finds()
        assert not finds(overflow)
        with pytest.raises(ZeroDivisionError), sg.detect_anomaly(infinities=True):
            raise ZeroDivisionError
        assert finds()
        assert not finds(overflow)
    assert not finds()
    once = sg.detect_anomaly()
    with once, once:
        assert finds()
    assert not finds()


def test_it_is_put_back_after_it_has_raised():
    for _ in range(3):
        with pytest.raises(sg.AnomalyError), sg.detect_anomaly():
            sg.log(t(-1.0))
        assert not finds()
        x = sg.zeros((1,), requires_grad=True)
        with sg.detect_anomaly():
            with pytest.raises(sg.AnomalyError):
                masked_sqrt(x).sum().backward(create_graph=True)
            assert finds()  # operations are looked at again, not the rule as a whole
        assert sg.is_grad_enabled()


def test_decorator():
    @sg.detect_anomaly()
    def only_nan(function):
        """What it says."""
        return finds(function)

    @sg.detect_anomaly(infinities=True)
    def both(function):
        return finds(function)

    assert only_nan.__doc__ == "What it says."
    assert only_nan(lambda: sg.log(-1.0))
    assert not only_nan(overflow)
    assert both(overflow)
    assert not finds()


def test_what_it_refuses():
    with pytest.raises(
        sg.DTypeError, match=r"`detect_anomaly` takes no arguments; found function: decorate with `@detect_"
    ):

        @sg.detect_anomaly
        def function():
            pass

    with pytest.raises(sg.DTypeError, match=r"`detect_anomaly` cannot decorate .* generator"):

        @sg.detect_anomaly()
        def generator():
            yield


def test_functions_take_the_short_way_before_and_after():
    """Off, nothing is looked at, as plans are found in the tables; on, the tables are empty."""
    x = t(1.0)
    counts = []
    for _ in range(2):
        sg.exp(x) * x
        counts.append(sum(map(bool, anomaly._tables)))
        with sg.detect_anomaly():
            sg.exp(x) * x
            assert not any(anomaly._tables)
    assert counts[0] >= counts[1] > 0


@pytest.mark.parametrize("row", [row for row in OPS.values() if isinstance(row, Elementwise)], ids=lambda row: row.name)
def test_bits_are_the_same(row):
    rng = np.random.default_rng(len(row.name))
    if row.accepts == "bits":
        arrays = [rng.integers(0, 9, (3, 2)) for _ in range(row.arity)]
    else:
        arrays = [rng.uniform(low, high, (3, 2)).astype("float32") for low, high in row.domain]

    def compute():
        inputs = [
            sg.asarray(a, requires_grad=row.differentiable and not (row.condition and k == 0))
            for k, a in enumerate(arrays)
        ]
        y = row.function(*inputs)
        if not row.differentiable:
            return [y.numpy()]
        (y * y + y).sum().backward()
        return [y.numpy(), *(x.grad.numpy() for x in inputs if x.requires_grad)]

    plain = compute()
    with sg.detect_anomaly():
        watched = compute()
    for one, other in zip(plain, watched, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def test_names_in_reports_are_the_operations():
    x = t(1.0)
    with sg.detect_anomaly():
        y = sg.exp(x)
        names = [node.op for node in sg.graph.nodes() if node.shape == (1,)]
    assert names[-1] == "exp"
    assert "op=exp" in repr(y)
    assert y.requires_grad
    assert not y.is_variable
    with pytest.raises(sg.VariableError, match="`exp`"):
        y.requires_grad_(False)
    y.sum().backward()
    with pytest.raises(sg.GraphConsumedError, match="`exp`"):
        y.sum().backward()


# --- threads, sweeps, memory ----------------------------------------------------------------------------------------


def on_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(TIMEOUT)


def test_other_threads_are_not_looked_at():
    with sg.detect_anomaly():
        assert not on_a_thread(finds)
        assert not on_a_thread(
            functools.partial(finds, lambda: masked_sqrt(sg.zeros(2, requires_grad=True)).sum().backward())
        )
        shared = masked_sqrt(x := sg.zeros(2, requires_grad=True)).sum()
        on_a_thread(shared.backward)
        assert np.isnan(x.grad.numpy()).all()
        assert finds()


def test_each_thread_has_its_own():
    entered, checked = threading.Event(), threading.Event()

    def other():
        with sg.detect_anomaly(infinities=True):
            entered.set()
            assert checked.wait(TIMEOUT)
            return finds(overflow), finds()

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(other)
        assert entered.wait(TIMEOUT)
        assert not finds()
        with sg.detect_anomaly():
            assert finds()
            assert not finds(overflow)
        assert len(WATCHERS) == 1
        checked.set()
        assert result.result(TIMEOUT) == (True, True)


def test_another_threads_first_call_opens_no_short_way():
    """A thread that is not looked at finds a plan; if it were put into the table, those that are would find it, too."""
    x = t(-1.0, dtype="float32")
    with sg.detect_anomaly():
        on_a_thread(lambda: sg.log(x))
        assert not any(anomaly._tables)
        assert finds(lambda: sg.log(x))


def test_plans_are_entered_and_tables_emptied_one_after_the_other(monkeypatch):
    """Else a thread could begin, and empty a table, after another saw that there is none and before it enters."""
    seen = []

    def lock_is_free():
        if free := anomaly._lock.acquire(blocking=False):
            anomaly._lock.release()
        return free

    class Table(dict):
        def __setitem__(self, key, value):
            seen.append(("entered", on_a_thread(lock_is_free), len(WATCHERS)))
            super().__setitem__(key, value)

        def clear(self):
            seen.append(("emptied", on_a_thread(lock_is_free), len(WATCHERS)))
            super().clear()

    table = Table()
    monkeypatch.setattr(anomaly, "_tables", [table])
    anomaly.enter(table, np.dtype("float32"), "plan")
    with sg.detect_anomaly():
        anomaly.enter(table, np.dtype("float32"), "plan")
    assert seen == [("entered", False, 0), ("emptied", False, 1)]
    assert table == {}


def test_sweeps_while_on():
    x = t(1.0, 2.0)
    with sg.detect_anomaly():
        before = state()[0]
        stop = threading.Event()

        def sweep():
            while not stop.is_set():
                sg.sweep()

        with ThreadPoolExecutor(1) as pool:
            sweeping = pool.submit(sweep)
            try:
                for _ in range(30):
                    sg.exp(x) * x  # an orphan
                    (sg.exp(x) * x).sum().backward()
            finally:
                stop.set()
            sweeping.result(TIMEOUT)
        assert state()[0] == before
    np.testing.assert_allclose(x.grad.numpy(), 30 * np.exp(x.numpy()) * (x.numpy() + 1), rtol=1e-12)


@pytest.mark.parametrize("create_graph", [False, True])
def test_nothing_grows(create_graph):
    w = t(0.5, -0.5)

    def step():
        w.grad = None
        loss = sg.mean(sg.square(sg.tanh(w * 3.0) - 0.25)) + sg.logsumexp(w)
        loss.backward(create_graph=create_graph)
        w.grad = None
        with pytest.raises(sg.AnomalyError):
            masked_sqrt(w * 0.0).sum().backward(create_graph=create_graph)

    with sg.detect_anomaly():
        step()
        before = state()[:3]
        objects = len(gc.get_objects())
        for _ in range(20):
            step()
        assert state()[:3] == before
        assert len(gc.get_objects()) - objects < 50
    assert w._node.id in process.registry.nodes


def test_a_pass_keeps_nothing_alive():
    with sg.detect_anomaly():
        x = t(1.0, 2.0)
        y = sg.exp(x)
        node = y._node
        y.sum().backward()
        del y
        sg.sweep()
        holders = [one for one in gc.get_referrers(node) if not inspect.isframe(one)]
        assert holders == []


def test_forked_child():
    """It has nothing of other threads' modes, and its own goes on."""
    said = quiet("""
        import os, threading
        import sweepgrad as sg
        from sweepgrad import anomaly
        from sweepgrad.tensor import WATCHERS

        entered, done = threading.Event(), threading.Event()

        def other():
            with sg.detect_anomaly():
                entered.set()
                done.wait()

        thread = threading.Thread(target=other)
        thread.start()
        entered.wait()

        def child(f):
            if not (pid := os.fork()):
                f()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0

        def plain():
            assert WATCHERS == []
            sg.log(sg.asarray([-1.0]))
            assert any(anomaly._tables)

        def watched():
            assert len(WATCHERS) == 1
            try:
                sg.log(sg.asarray([-1.0]))
            except sg.AnomalyError:
                return
            os._exit(1)

        child(plain)
        with sg.detect_anomaly():
            child(watched)
        done.set()
        thread.join()
        assert WATCHERS == []
        print("done")
    """)
    assert said == "done\n"
