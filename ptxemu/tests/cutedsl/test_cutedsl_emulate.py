"""What `emulate` promises about launches of compiled CuTe DSL functions."""

from pathlib import Path

import numpy as np
import pytest

import ptxemu
from ptxemu import cutedsl

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("llvmlite", reason="llvmlite is not installed")
cute = pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")
kernels = pytest.importorskip("tests.cutedsl.small_kernels")


@pytest.fixture(scope="module")
def double():
    """A compiled kernel whose host code writes tensor maps; n is dynamic."""
    matrix = fake(cute.Float32, (cute.sym_int(), 32))
    with cutedsl.emulate(arch="sm_90a"):
        return cute.compile(kernels.tma_double, matrix, matrix)


def fake(dtype, shape):
    order = tuple(range(len(shape)))[::-1]
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)


def dynamic(tensor):
    return cute.runtime.from_dlpack(tensor, assumed_align=16).mark_layout_dynamic()


def tensors(*arrays):
    return [dynamic(array) for array in arrays]


def test_two_launches_of_one_host_call_run_in_order():
    a = torch.arange(192, dtype=torch.int32)
    b, c = torch.zeros_like(a), torch.zeros_like(a)
    with cutedsl.emulate(arch="sm_100a") as run:
        cute.compile(kernels.reverse_twice, *tensors(a, b, c), 3)(*tensors(a, b, c), 3)
    assert torch.equal(b, (a * 3).view(-1, 64).flip(1).reshape(-1))
    assert torch.equal(c, a * 9)
    assert [result.launch.grid for result in run.launches] == [(3, 1, 1)] * 2
    assert run.launches[0].kernel != run.launches[1].kernel
    assert run.findings == [] and run.notes == []


def test_direct_calls_of_jit_functions_are_emulated():
    a = torch.arange(64, dtype=torch.int32)
    b, c = torch.zeros_like(a), torch.zeros_like(a)
    with cutedsl.emulate() as run:
        kernels.reverse_twice(*tensors(a, b, c), 2)
    assert torch.equal(c, a * 4)
    assert len(run.launches) == 2


def test_clusters_have_the_shape_that_the_host_asks_for():
    a = torch.randn(4, 64)
    b = torch.zeros_like(a)
    with cutedsl.emulate(arch="sm_90a") as run:
        cute.compile(kernels.swap_ranks, *tensors(a, b), 2)(*tensors(a, b))
    assert torch.equal(b, a.view(2, 2, 64).flip(1).reshape(4, 64))
    assert run.launches[0].launch.cluster == (2, 1, 1)
    assert run.findings == []


@pytest.mark.parametrize("rows", [32, 80])
def test_tensor_maps_of_the_host_code_work(double, rows):
    a = torch.randn(rows, 32)
    b = torch.full_like(a, torch.nan)
    with cutedsl.emulate(arch="sm_90a") as run:
        double(*tensors(a, b))
    assert torch.equal(b, 2 * a)
    assert run.findings == []


def test_source_lines_are_those_of_the_kernel(double):
    files = {line.split('"')[1] for line in double.__ptx__.splitlines() if ".file" in line}
    assert {Path(name).name for name in files} == {"small_kernels.py"}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("asynchronous", ["eager", "late"])
def test_the_policy_is_used(double, seed, asynchronous):
    a = torch.randn(64, 32)
    b = torch.zeros_like(a)
    policy = ptxemu.Policy(asynchronous=asynchronous, seed=seed)
    with cutedsl.emulate(arch="sm_90a", policy=policy):
        double(*tensors(a, b))
    assert torch.equal(b, 2 * a)


def test_numpy_arrays_are_arguments_too(double):
    a = np.random.default_rng(0).standard_normal((32, 32), dtype=np.float32)
    b = np.zeros_like(a)
    with cutedsl.emulate(arch="sm_90a"):
        double(*tensors(a, b))
    assert np.array_equal(b, 2 * a)


def test_arch_none_runs_what_the_function_was_compiled_for(double):
    a = torch.randn(32, 32)
    b = torch.zeros_like(a)
    with cutedsl.emulate(arch=None):
        double(*tensors(a, b))
    assert torch.equal(b, 2 * a)


def test_tensor_maps_encoded_by_the_driver_work():
    a = torch.arange(8.0 * 32).view(8, 32)
    b = torch.zeros(64)
    view = fake(cute.Float32, (cute.sym_int(), 32))
    with cutedsl.emulate() as run:
        cute.compile(kernels.load_encoded_box, view, *tensors(b))(*tensors(a, b))
    assert torch.equal(b, a[2:6, 16:32].reshape(-1))
    assert run.findings == []


def race(**options):
    """A kernel that lacks its barrier, emulated."""
    a = torch.arange(64, dtype=torch.int32)
    both = tensors(a, torch.zeros_like(a))
    with cutedsl.emulate(**options) as run:
        cute.compile(kernels.reverse, *both, cute.runtime.make_fake_stream(), False)(*both, 0)
    return run


def test_a_race_is_raised_on_leaving():
    with pytest.raises(ptxemu.HazardError, match=r"small_kernels\.py") as raised:
        race()
    assert {finding.level for finding in raised.value.findings} == {"error"}


def test_a_race_is_only_collected_if_so_asked():
    run = race(on_finding="collect")
    assert run.findings and run.findings == run.launches[0].findings


def test_without_check_nothing_is_found():
    assert race(check=False).findings == []


def test_the_end_of_a_tensor_is_known():
    a, b = torch.zeros(64), torch.zeros(64)
    with cutedsl.emulate(on_finding="collect") as run:
        shift = cute.compile(kernels.shift_left, *tensors(a, b), 0)
        with pytest.raises(ptxemu.ExecutionError, match="behind the end of a"):
            shift(*tensors(a, b), 1)
    assert len(run.failures) == 1 and run.launches == []


def test_a_dlpack_view_ends_at_its_last_element():
    whole, b = torch.arange(68.0), torch.zeros(64)
    with cutedsl.emulate(on_finding="collect"):
        shift = cute.compile(kernels.shift_left, *tensors(whole[:64], b), 0)
        shift(*tensors(whole[4:], b), 0)
        assert torch.equal(b, whole[4:])
        with pytest.raises(ptxemu.ExecutionError):
            shift(*tensors(whole[:64], b), 1)


def test_overlapping_views_of_one_storage_are_one_region():
    whole = torch.arange(128.0)
    with cutedsl.emulate(on_finding="collect") as run:
        shift = cute.compile(kernels.shift_left, *tensors(whole[:64], whole[32:]), 0)
        shift(*tensors(whole[:64], whole[32:96]), 0)
    assert len(run.launches) == 1


def test_bare_pointers_of_tensors_have_bounds():
    a, b = torch.arange(64.0), torch.zeros(64)

    @cute.jit
    def shift_pointers(x: cute.Pointer, y: cute.Pointer, shift: cute.Int32):
        layout = cute.make_layout(64)
        kernels.shift_left(cute.make_tensor(x, layout), cute.make_tensor(y, layout), shift)

    def pointers():
        return [
            cute.runtime.make_ptr(
                cute.Float32, t.data_ptr(), cute.AddressSpace.gmem, assumed_align=4
            )
            for t in (a, b)
        ]

    with cutedsl.emulate(on_finding="collect") as run:
        shift = cute.compile(shift_pointers, *pointers(), 0)
        shift(*pointers(), 0)
        with pytest.raises(ptxemu.ExecutionError, match="that is no argument"):
            shift(*pointers(), 1)
    assert torch.equal(a, b)
    assert run.notes == []


def test_memory_of_nobody_known_is_used_with_a_note():
    a, b = torch.arange(64.0), np.zeros(64, dtype=np.float32)

    @cute.jit
    def copy_pointers(x: cute.Tensor, y: cute.Pointer):
        kernels.shift_left(x, cute.make_tensor(y, cute.make_layout(64)), cute.Int32(0))

    target = cute.runtime.make_ptr(
        cute.Float32, b.ctypes.data, cute.AddressSpace.gmem, assumed_align=4
    )
    with cutedsl.emulate() as run:
        cute.compile(copy_pointers, *tensors(a), target)(*tensors(a), target)
    assert np.array_equal(a.numpy(), b)
    assert len(run.notes) == 1 and "bounds" in run.notes[0]


def test_emulations_do_not_nest_and_leave_nothing_behind():
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction as Compiled

    before = dict(vars(Compiled))
    with cutedsl.emulate(), pytest.raises(ptxemu.PtxEmuError, match="nest"):  # noqa: SIM117
        with cutedsl.emulate():
            pass
    assert dict(vars(Compiled)) == before


@pytest.mark.parametrize("option", [{"on_finding": "ignore"}, {"arch": "sm_75"}])
def test_unknown_options_are_refused(option):
    with pytest.raises(ValueError, match=r"expected one of|ptxemu emulates"):
        cutedsl.emulate(**option)


def test_a_cuda_graph_runs_when_it_is_replayed():
    with cutedsl.emulate() as run, cutedsl.pretend_gpu("sm_100a"):
        a = torch.arange(64, dtype=torch.int32, device="cuda")
        b, c = torch.zeros_like(a), torch.zeros_like(a)
        function = cute.compile(kernels.reverse_twice, *tensors(a, b, c), 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            function(*tensors(a, b, c), 2)
        assert run.launches == [] and c.sum() == 0
        a += 1
        graph.replay()
        graph.replay()
    assert len(run.launches) == 4
    assert torch.equal(c, 4 * a)
