"""What a driver refuses, the emulated one refuses with the driver's codes."""

import importlib

import pytest

from ptxemu import cutedsl

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("llvmlite", reason="llvmlite is not installed")
cute = pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")
kernels = pytest.importorskip("tests.cutedsl.small_kernels")

INVALID_VALUE = 1
INVALID_CONFIGURATION = 9
NO_BINARY_FOR_GPU = 209
COOPERATIVE_LAUNCH_TOO_LARGE = 720
INVALID_CLUSTER_SIZE = 912


def refused(function, *args):
    """The error code of calling `function`."""
    error = importlib.import_module("cutlass.base_dsl.common").DSLCudaRuntimeError
    with pytest.raises(error) as raised:
        function(*args)
    return raised.value._error_code, str(raised.value)


def dynamic(tensor):
    return cute.runtime.from_dlpack(tensor, assumed_align=4).mark_layout_dynamic()


@pytest.mark.parametrize(
    ("size", "fits"), [(227 * 1024, True), (227 * 1024 + 1024, False), (400 * 1024, False)]
)
def test_shared_memory_ends_at_227_kib(size, fits):
    b = torch.zeros(64)
    with cutedsl.emulate(arch="sm_90a", on_finding="collect"):
        function = cute.compile(kernels.large_shared, dynamic(b), size)
        if fits:
            function(dynamic(b))
            assert torch.equal(b, torch.arange(64.0))
        else:
            code, text = refused(function, dynamic(b))
            assert code == INVALID_VALUE and "shared memory" in text


@pytest.mark.parametrize("cluster", [3, 32])
def test_a_cluster_must_divide_the_grid_and_have_at_most_16_ctas(cluster):
    a = torch.zeros(32, 64)
    with cutedsl.emulate(on_finding="collect"):
        function = cute.compile(kernels.swap_ranks, dynamic(a), dynamic(a), cluster)
        assert refused(function, dynamic(a), dynamic(a))[0] == INVALID_CLUSTER_SIZE


def test_an_empty_grid_is_an_invalid_configuration():
    a = torch.zeros(8, dtype=torch.int32)
    with cutedsl.emulate(on_finding="collect"):
        function = cute.compile(kernels.reverse_twice, *[dynamic(a)] * 3, 1)
        assert refused(function, *[dynamic(a)] * 3, 1)[0] == INVALID_CONFIGURATION


def test_a_cooperative_grid_must_be_resident():
    a = torch.zeros(64)
    with cutedsl.emulate(on_finding="collect") as run:
        function = cute.compile(kernels.shift_cooperatively, dynamic(a), dynamic(a), 1)
        function(dynamic(a), dynamic(a), 2)
        code, _ = refused(function, dynamic(a), dynamic(a), 1_000_000)
    assert code == COOPERATIVE_LAUNCH_TOO_LARGE and len(run.launches) == 1


def test_a_misaligned_tensor_map_is_an_invalid_value():
    storage = torch.zeros(8 * 32 + 1)
    shape = (cute.sym_int(), 32)
    view = cute.runtime.make_fake_compact_tensor(
        cute.Float32, shape, stride_order=(1, 0), assumed_align=4
    )
    b = torch.zeros(64)
    with cutedsl.emulate(on_finding="collect"):
        function = cute.compile(kernels.load_encoded_box, view, dynamic(b))
        code, text = refused(function, dynamic(storage[1:].view(8, 32)), dynamic(b))
    assert code == INVALID_VALUE and "address" in text


def test_code_for_another_architecture_is_refused():
    a = torch.zeros(64, dtype=torch.int32)
    with cutedsl.emulate(arch="sm_90a"):
        function = cute.compile(kernels.reverse_twice, *[dynamic(a)] * 3, 1)
    with cutedsl.emulate(arch="sm_100a"):
        assert refused(function, *[dynamic(a)] * 3, 1)[0] == NO_BINARY_FOR_GPU
