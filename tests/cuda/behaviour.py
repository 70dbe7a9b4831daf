"""What devices promise besides right results: run in a process of its own, on simulated devices or real ones."""

import contextlib
import copy
import gc
import inspect
import operator
import pickle
import threading
import time

import modes
import numpy as np
import pytest

import sweepgrad as sg
from sweepgrad import arrays
from sweepgrad.kernels import gpu

modes.enter()

CUDA = "cuda:0"
SEVERAL = pytest.mark.skipif(len(sg.devices()) < 3, reason="needs two devices")


@pytest.fixture(autouse=True)
def flat_graph():
    """Each test leaves the graph, and the memory that arrays on devices have, as it found them."""
    sg.sweep(collect_cycles=True)
    before, (used, _) = sg.graph.stats().nodes, arrays.memory()
    yield
    sg.sweep(collect_cycles=True)
    sg.graph.audit()
    assert sg.graph.stats().nodes == before
    assert arrays.memory()[0] == used


@contextlib.contextmanager
def room_for(nbytes):
    """The device has room for so many bytes more than are in use."""
    gpu.driver().free_idle()
    used = arrays.memory()[0]
    if modes.SIMULATED:
        from sweepgrad.kernels.simulator import MEMORIES

        before, MEMORIES[0].capacity = MEMORIES[0].capacity, used + nbytes
        try:
            yield
        finally:
            MEMORIES[0].capacity = before
    else:
        import cupy

        pool = cupy.get_default_memory_pool()
        pool.set_limit(size=used + nbytes)
        try:
            yield
        finally:
            pool.set_limit(size=0)


def other_library(array):
    """An array of another library on the device; on the simulated one, NumPy's has the same protocols."""
    if modes.SIMULATED:
        return array.copy()
    import cupy

    return cupy.asarray(array)


def address(t):
    return t.__cuda_array_interface__["data"][0]


# --- devices ----------------------------------------------------------------------------------------------------------


def test_names():
    assert sg.devices()[:2] == ["cpu", CUDA]
    x = sg.asarray([1.0, 2.0], device="cuda", requires_grad=True)
    assert (x.device, (x * x).device, sg.sum(x).device) == (CUDA, CUDA, CUDA)
    assert sg.asarray([1.0]).device == "cpu"
    assert x.to_device("cuda") is x
    assert x.to_device(CUDA) is x
    assert isinstance(x, sg.Tensor)
    assert gpu.driver().describe(0)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", 0, b"cuda", "cuda:٣", "cuda:99999"])
def test_unknown_devices(device):
    with pytest.raises(sg.ArgumentError, match=r'`asarray` got device .*; accepted are "cpu", "cuda", and "cuda:0"'):
        sg.asarray([1.0], device=device)


def test_a_device_that_is_not_there():
    with pytest.raises(sg.DeviceError, match=r"`zeros` got device 'cuda:99'; those that are there: cpu, cuda:0"):
        sg.zeros((2,), device="cuda:99")


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("asarray", ([[1.0, 2.0], [3.0, 4.0]],)),
        ("zeros", ((2, 3),)),
        ("ones", ((2, 3),)),
        ("full", ((2, 3), 7)),
        ("full", ((0, 3), 7.5)),
        ("arange", (1, 7, 2)),
        ("linspace", (0.0, 1.0, 5)),
        ("eye", (3,)),
        ("zeros_like", (np.ones((2, 3), "float32"),)),
        ("ones_like", (np.ones((2, 3), "int8"),)),
        ("full_like", (np.ones((2, 3)), 5)),
        ("from_dlpack", (np.arange(3.0),)),
    ],
)
def test_creation(name, args):
    function = getattr(sg, name)
    there, here = function(*args, device="cuda"), function(*args)
    assert (there.device, there.shape, there.dtype) == (CUDA, here.shape, here.dtype)
    np.testing.assert_array_equal(there.numpy(), here.numpy())
    if "requires_grad" in inspect.signature(function).parameters and here.dtype.kind == "f":
        assert function(*args, device="cuda", requires_grad=True).is_variable


def test_like_follows_its_argument():
    x = sg.ones((2, 3), device="cuda", dtype="float32")
    for function in (sg.zeros_like, sg.ones_like, lambda x: sg.full_like(x, 3.0)):
        assert (function(x).device, function(x).dtype) == (CUDA, x.dtype)
    assert sg.zeros_like(x, device="cpu").device == "cpu"
    assert sg.asarray(x) is x
    assert sg.asarray(x, device="cpu").device == "cpu"


MIXED = {
    "add": operator.add,
    "multiply": lambda a, b: sg.multiply(b, a),
    "where": lambda a, b: sg.where(a > 0.0, a, b),
    "clip": lambda a, b: sg.clip(a, -1.0, b),
    "matmul": operator.matmul,
    "concat": lambda a, b: sg.concat([b, a]),
    "stack": lambda a, b: sg.stack([a, b]),
    "fuse": lambda a, b: sg.fuse(lambda x, y: sg.exp(x) * y)(a, b),
    "tensordot": lambda a, b: sg.tensordot(a, b, axes=1),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices(name):
    a = sg.asarray([1.0, 2.0], device="cuda", requires_grad=True)
    b = sg.asarray([3.0, 4.0], requires_grad=True)
    with pytest.raises(
        sg.DeviceError, match=r'on .*cuda:0.*; needed is one device.*`t.to_device\("cuda:0"\)`'
    ) as caught:
        MIXED[name](a, b)
    assert "cpu" in str(caught.value)
    sg.sum(a * a).backward()
    assert a.grad.tolist() == [2.0, 4.0]


def test_arrays_of_numpy_are_in_main_memory_and_numbers_are_nowhere():
    x = sg.asarray([1.0, 2.0], device="cuda")
    with pytest.raises(sg.DeviceError, match="`add` got tensors on"):
        x + np.ones(2)
    with pytest.raises(sg.DeviceError, match="`multiply` got tensors on"):
        np.ones(2) * x
    for number in (2, 2.0, True, np.float64(2), np.float32(2), np.int8(2)):
        assert (x * number).device == CUDA
        assert (x * number).tolist() == (np.array([1.0, 2.0]) * number).tolist()
    found = np.exp(x)  # NumPy's universal function is sweepgrad's
    assert type(found) is type(x)
    np.testing.assert_allclose(found.numpy(), np.exp([1.0, 2.0]), rtol=1e-15)


def test_what_belongs_to_a_tensor_is_where_it_is():
    x = sg.asarray([1.0, 2.0], device="cuda", requires_grad=True)
    with pytest.raises(sg.DeviceError, match="`grad` is on cpu; needed is the tensor's own device cuda:0"):
        x.grad = sg.ones((2,))
    with pytest.raises(sg.DeviceError, match="`gradient` is on cpu"):
        (x * x).backward(sg.ones((2,)))
    (x * x).backward(np.ones(2))  # an array goes where it is needed
    assert x.grad.device == CUDA
    with pytest.raises(sg.DeviceError, match="hook"), x.register_hook(lambda ct: ct.to_device("cpu")):
        sg.sum(x * x).backward()
    assert x.grad.tolist() == [2.0, 4.0]


def test_copy_stays_where_the_tensor_is():
    x = sg.zeros((2, 2), device="cuda", requires_grad=True)
    for source in (sg.asarray([1.0, 2.0]), np.array([1.0, 2.0]), sg.asarray([1.0, 2.0], device="cuda"), [1.0, 2.0]):
        x.copy_(0.0)
        x.copy_(source)
        assert x.device == CUDA
        assert x.tolist() == [[1.0, 2.0]] * 2
    here = sg.zeros((2, 2))
    here.copy_(x)
    assert (here.device, here.tolist()) == ("cpu", x.tolist())
    with sg.no_grad():
        x += 1.0
    assert x.is_variable
    assert x.tolist() == [[2.0, 3.0]] * 2


def test_moves_are_differentiated():
    x = sg.asarray([1.0, 2.0, 3.0], requires_grad=True)
    there = x.to_device("cuda") ** 3
    back = there.to_device("cpu") * 2.0
    assert (there.device, back.device) == (CUDA, "cpu")
    (first,) = sg.sum(back).backward(create_graph=True) or (x.grad,)
    assert (first.device, first.tolist()) == ("cpu", [6.0, 24.0, 54.0])
    x.grad = None
    sg.sum(first).backward()
    assert x.grad.tolist() == [12.0, 24.0, 36.0]
    value, slope = sg.value_and_grad(lambda t: sg.sum(sg.sin(t)))(sg.asarray([0.0, 1.0], device="cuda"))
    assert (value.device, slope.device) == (CUDA, CUDA)


@SEVERAL
def test_two_devices():
    a = sg.asarray([1.0, 2.0], device="cuda:1", requires_grad=True)
    b = sg.asarray([3.0, 4.0], device="cuda:0", requires_grad=True)
    loss = sg.sum(sg.exp(a) * b.to_device("cuda:1"))
    assert loss.device == "cuda:1"
    loss.backward()
    assert (a.grad.device, b.grad.device) == ("cuda:1", "cuda:0")
    np.testing.assert_allclose(b.grad.numpy(), np.exp([1.0, 2.0]), rtol=1e-14)
    fused = sg.fuse(lambda x: sg.softmax(x * 2.0))(a)
    assert fused.device == "cuda:1"
    assert (a @ a).device == sg.concat([a, a]).device == a[np.array([0])].device == "cuda:1"
    with pytest.raises(sg.DeviceError, match=r"cuda:1 and cuda:0"):
        a + b
    assert gpu.driver().current() == 0


# --- elements leave ---------------------------------------------------------------------------------------------------


def test_elements():
    x = sg.asarray([[1.5, 2.5]], device="cuda", dtype="float32")
    array = x.numpy()
    assert type(array) is np.ndarray
    assert not array.flags.writeable
    assert array.tolist() == x.tolist() == [[1.5, 2.5]]
    assert repr(x) == 'Tensor([[1.5, 2.5]], dtype=float32, device="cuda:0")'
    one = sg.sum(x)
    assert (one.item(), float(one), int(one), bool(one), f"{one:.1f}") == (4.0, 4.0, 4, True, "4.0")
    assert len(x) == 1
    assert range(5)[sg.asarray(2, device="cuda")] == 2
    with pytest.raises(sg.DeviceError, match=r"`__array__` of a tensor on cuda:0: .*`t.numpy\(\)`"):
        np.asarray(x)
    with pytest.raises(sg.ImmutableError):
        x[0] = 1.0
    assert [row.tolist() for row in x] == [[1.5, 2.5]]


def test_a_step_fetches_nothing_from_the_device(monkeypatch):
    """Only what asks for elements waits for the device."""
    w = sg.asarray(np.ones((4, 3)), device="cuda", requires_grad=True)
    inputs = sg.asarray(np.ones((5, 4)), device="cuda")
    labels = np.array([0, 1, 2, 0, 1])
    optimiser = sg.optim.AdamW([w], lr=0.1)

    def step():
        optimiser.zero_grad()
        hidden = sg.relu(inputs @ w + 1.0) / sg.mean(w)
        loss = -sg.mean(sg.log_softmax(hidden)[np.arange(5), labels]) + sg.sum(hidden.T[0]) * sg.max(w)
        norms = sg.sqrt(sg.sum(w * w))
        loss.backward()
        optimiser.step()
        return norms

    def refuse(*args):
        raise AssertionError("the device was waited for")

    step()
    for name in ("download", "synchronize"):
        monkeypatch.setattr(type(gpu.driver()), name, refuse)
    step()
    monkeypatch.undo()
    assert np.isfinite(w.numpy()).all()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies_and_pickles(again):
    x = sg.asarray([[1.0, 2.0], [3.0, 4.0]], device="cuda", requires_grad=True)
    for tensor in (x, x.detach().T):
        found = again(tensor)
        assert found is not tensor
        assert (found.device, found.tolist(), found.is_variable) == (CUDA, tensor.tolist(), tensor.is_variable)
    with pytest.raises(sg.VariableError, match="`multiply`"):
        again(x * x)


def test_indices_are_looked_at_in_main_memory():
    x = sg.asarray(np.arange(12.0).reshape(4, 3), device="cuda", requires_grad=True)
    here = sg.asarray(np.arange(12.0).reshape(4, 3), requires_grad=True)
    there = sg.asarray([3, 0, 3], device="cuda")
    mask = sg.asarray([True, False, True, False], device="cuda")
    for key, same in ((there, [3, 0, 3]), (mask, [True, False, True, False]), ((there, 1), ([3, 0, 3], 1))):
        x.grad = here.grad = None
        found, expected = x[key], here[same]
        assert found.tolist() == expected.tolist()
        sg.sum(found * found).backward()
        sg.sum(expected * expected).backward()
        assert x.grad.tolist() == here.grad.tolist()
    assert sg.take(x, there, axis=0).tolist() == sg.take(here, [3, 0, 3], axis=0).tolist()
    for call in (lambda: x[np.array([0, 4])], lambda: x[:, [-4]], lambda: sg.take(x, [4], axis=0), lambda: x[7]):
        with pytest.raises(sg.AxisError):
            call()


# --- other parts of the library ---------------------------------------------------------------------------------------


def test_hooks_and_retained_gradients():
    x = sg.asarray([1.0, 2.0], device="cuda", requires_grad=True)
    y = x * x
    y.retain_grad()
    seen = []
    with x.register_hook(lambda ct: (seen.append(ct), ct * 10.0)[1]):
        sg.sum(y).backward()
    assert (seen.pop().device, y.grad.device, x.grad.tolist()) == (CUDA, CUDA, [20.0, 40.0])
    x.requires_grad_(False)
    assert not x.requires_grad


def test_anomalies():
    x = sg.asarray([0.0, 4.0], device="cuda", requires_grad=True)
    with pytest.raises(sg.AnomalyError, match=r"`sqrt` at .* made NaN in its derivative"), sg.detect_anomaly():
        sg.sum(sg.where(x > 0.0, sg.sqrt(x), 0.0)).backward()
    with pytest.raises(sg.AnomalyError, match=r"`log` at .* made NaN"), sg.detect_anomaly():
        sg.log(x - 5.0)
    with sg.detect_anomaly():
        sg.sum(sg.exp(x)).backward()
    np.testing.assert_allclose(x.grad.numpy(), np.exp([0.0, 4.0]), rtol=1e-14)


def test_counts():
    before = sg.graph.stats()
    x = sg.asarray(np.ones(1000), device="cuda", requires_grad=True)
    here = sg.asarray(np.ones(1000), requires_grad=True)
    y, z = sg.exp(x), sg.exp(here)
    now = sg.graph.stats()
    assert now.device_bytes - before.device_bytes == 8000
    assert now.saved_bytes - before.saved_bytes == 16_000
    assert "on devices" in str(now)
    assert sg.graph.nodes()[-1].shape == (1000,)
    sg.sum(y).backward()
    assert sg.graph.stats().device_bytes == before.device_bytes
    assert z.device == "cpu"
    del x, y
    sg.sweep()
    gc.collect()
    assert sg.graph.stats().device_pool_bytes > 0
    assert sg.pool.empty() > 0
    assert sg.graph.stats().device_pool_bytes == 0


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [True, False])
def test_an_orphan_loop_stays_flat(backward):
    """Tracked tensors are made and dropped; nobody asks for a sweep."""
    most = 0
    for k in range(600):
        sg.zeros((2, 2), device="cuda", requires_grad=True).T
        if backward:
            b = sg.zeros((2, 2), device="cuda", requires_grad=True)
            b.T.reshape((4,))[1:2].backward()
            del b
        if k >= 100:
            most = max(most, sum(arrays.memory()))
        elif k == 99:
            early = sum(arrays.memory())
    bound = 512 * (sg.graph.get_threshold().nodes + 300)
    assert most <= max(early, bound)


def test_saved_bytes_alone_make_a_sweep():
    old = sg.graph.get_threshold()
    sg.graph.set_threshold(bytes=100_000)
    try:
        x = sg.asarray(np.ones(64), device="cuda", requires_grad=True)
        used = arrays.memory()[0]
        for _ in range(300):
            sg.exp(x)
            assert arrays.memory()[0] - used <= 150_000
    finally:
        sg.graph.set_threshold(nodes=old.nodes, bytes=old.bytes)


def test_a_swept_node_gives_its_memory_to_the_pool_on_any_thread():
    x = sg.asarray(np.ones(500), device="cuda", requires_grad=True)
    used, idle = arrays.memory()
    y = sg.exp(sg.exp(x))
    assert arrays.memory()[0] > used
    del y
    thread = threading.Thread(target=sg.sweep)
    thread.start()
    thread.join(60)
    now = arrays.memory()
    assert now[0] == used
    assert now[1] >= idle


def test_the_daemon_frees_what_is_dropped():
    x = sg.asarray(np.ones(500), device="cuda", requires_grad=True)
    used = arrays.memory()[0]
    sg.sweeper.start("5ms")
    try:
        for _ in range(20):
            sg.exp(sg.exp(x))
        end = time.monotonic() + 60
        while arrays.memory()[0] != used:
            assert time.monotonic() < end, "the daemon did not sweep"
            time.sleep(0.01)
    finally:
        sg.sweeper.stop()


def test_where_there_is_no_room_orphans_make_some():
    x = sg.asarray(np.ones(1000), device="cuda", requires_grad=True)
    with room_for(40_000):
        kept = [sg.exp(x)]
        kept.append(sg.exp(sg.exp(x)))
        del kept[:]
        wide = sg.concat([x, x, x, x])  # has room only when the orphans are gone
        assert wide.size == 4000
        del wide
        orphans = [sg.exp(x) for _ in range(4)]
        del orphans
        found = sg.asarray(np.ones(4000), device="cuda")
        assert found.tolist() == [1.0] * 4000
        del found
        orphans = [sg.exp(x) for _ in range(4)]
        del orphans
        assert sg.zeros((4000,), device="cuda").tolist() == [0.0] * 4000


OPERATIONS = {
    "multiply": lambda x: x * 2.0,
    "sum": lambda x: sg.sum(sg.broadcast_to(x, (8, 4000)), axis=1),
    "cumulative": lambda x: sg.concat([x, x]),
    "fuse": lambda x: sg.fuse(lambda t: sg.exp(t) * 3.0)(x),
    "roll": lambda x: sg.roll(x, 1),
    "asarray": lambda x: sg.asarray(x.numpy(), device="cuda"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_error_where_there_is_no_room_at_all(name):
    x = sg.asarray(np.ones(4000), device="cuda", requires_grad=True)
    held = sg.exp(x)
    with room_for(4000), pytest.raises(sg.OutOfMemoryError, match=r"cannot get .*; most is saved by `exp`") as caught:
        OPERATIONS[name](x)
    assert "on devices" in str(caught.value)
    del caught
    sg.sum(held).backward()
    np.testing.assert_allclose(x.grad.numpy(), np.full(4000, np.e), rtol=1e-14)


def test_a_pass_that_finds_no_room_changes_nothing():
    x = sg.asarray(np.ones(4000), device="cuda", requires_grad=True)
    y = sg.sum(sg.sin(sg.exp(x)) * x)
    with room_for(40_000), pytest.raises(sg.OutOfMemoryError):
        y.backward()
    assert x.grad is None
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), np.sin(np.e) + np.cos(np.e) * np.e, rtol=1e-12)


# --- other libraries --------------------------------------------------------------------------------------------------


def test_the_array_interface_goes_out_without_a_copy():
    x = sg.asarray(np.arange(6.0).reshape(2, 3), device="cuda")
    for tensor in (x, x.T, x[:, 1]):
        found = tensor.__cuda_array_interface__
        assert (found["shape"], found["typestr"], found["version"] >= 2) == (tensor.shape, "<f8", True)
    assert address(x) == address(x.T) == address(x[:, 1]) - 8
    with pytest.raises(sg.VariableError, match=r"`__cuda_array_interface__` .*`t.detach\(\)`"):
        x.requires_grad_().__cuda_array_interface__
    with pytest.raises(AttributeError):
        sg.ones((2,)).__cuda_array_interface__


def test_dlpack_both_ways_without_a_copy():
    x = sg.asarray(np.arange(6.0).reshape(2, 3), device="cuda")
    if modes.SIMULATED:
        out = np.from_dlpack(x)
        assert out.ctypes.data == address(x)
    else:
        import cupy

        out = cupy.from_dlpack(x)
        assert out.data.ptr == address(x)
        back = sg.from_dlpack(out)
        assert (back.device, address(back)) == (CUDA, address(x))
        assert address(sg.asarray(out, copy=False)) == address(x)
        assert address(sg.asarray(out)) != address(x)
    assert out.tolist() == x.tolist()
    with pytest.raises(sg.VariableError, match="`__dlpack__`"):
        x.requires_grad_().__dlpack__()


def test_an_array_of_another_library_is_taken():
    x = sg.asarray(np.arange(6.0, dtype="float32").reshape(2, 3), device="cuda")
    shared, copied = sg.asarray(x.detach(), copy=False), sg.asarray(x, copy=True)
    assert address(shared) == address(x)
    assert address(copied) != address(x)

    class Foreign:
        """What CuPy, PyTorch and Numba have alike."""

        def __init__(self, owner):
            self.owner = owner

        __cuda_array_interface__ = property(lambda self: self.owner.__cuda_array_interface__)

        def __dlpack__(self, **options):
            return self.owner.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.owner.__dlpack_device__()

    for tensor in (x, x.T):
        foreign = Foreign(tensor)
        assert sg.asarray(foreign).tolist() == tensor.tolist()
        assert sg.from_dlpack(foreign).tolist() == tensor.tolist()
    assert address(sg.from_dlpack(Foreign(x))) == address(sg.asarray(Foreign(x), copy=False)) == address(x)
    with pytest.raises(sg.ArgumentError, match="copy=False"):
        sg.asarray(Foreign(x), dtype="float64", copy=False)
    with pytest.raises(sg.ArgumentError, match="copy=False"):
        sg.from_dlpack(Foreign(x.T), copy=False)
    variable = sg.asarray(Foreign(x), requires_grad=True)
    sg.sum(variable * variable).backward()
    assert variable.grad.tolist() == (2.0 * x).tolist()


def test_memory_that_is_shared_lives_as_long_as_both_need_it():
    x = sg.asarray(np.arange(1000.0), device="cuda")
    if modes.SIMULATED:
        out = np.from_dlpack(x)
    else:
        import cupy

        out = cupy.from_dlpack(x)
    del x
    gc.collect()
    filler = [sg.zeros((1000,), device="cuda") for _ in range(3)]
    assert out.tolist() == np.arange(1000.0).tolist()
    del out, filler
    gc.collect()


@pytest.mark.skipif(modes.SIMULATED, reason="PyTorch knows no simulated device")
def test_pytorch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch here has no CUDA")
    theirs = torch.arange(6.0, device="cuda").reshape(2, 3)
    ours = sg.from_dlpack(theirs)
    assert address(ours) == theirs.data_ptr()
    assert torch.from_dlpack(ours).data_ptr() == theirs.data_ptr()
    assert torch.as_tensor(ours, device="cuda").data_ptr() == theirs.data_ptr()
    assert ours.tolist() == theirs.tolist()


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_on_one_device():
    def work(seed):
        rng = np.random.default_rng(seed)
        array = rng.standard_normal((3, 5))
        for _ in range(5):
            x = sg.asarray(array, device="cuda", requires_grad=True)
            sg.sum(sg.softmax(x) * x).backward()
            sg.exp(x)
        here = sg.asarray(array, requires_grad=True)
        sg.sum(sg.softmax(here) * here).backward()
        np.testing.assert_allclose(x.grad.numpy(), here.grad.numpy(), rtol=1e-12, atol=1e-12)

    errors = []

    def guarded(seed):
        try:
            work(seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    assert not errors, errors


def test_the_command_line_names_the_devices():
    from sweepgrad.cli import info

    (line,) = [line for line in info().splitlines() if line.startswith("devices ")]
    assert f"cpu; {CUDA} ({gpu.driver().describe(0)})" in line
