"""Launches of compiled CuTe DSL functions under `emulate`, and what a driver refuses."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import ptxemu
from ptxemu import cutedsl
from ptxemu.driver.rules import Driver, Status
from ptxemu.errors import PtxEmuError

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


def dynamic(tensor, align=16):
    return cute.runtime.from_dlpack(tensor, assumed_align=align).mark_layout_dynamic()


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


# Functions compiled with --enable-tvm-ffi take torch tensors directly; they are emulated too.

needs_tvm_ffi = pytest.mark.skipif(
    importlib.util.find_spec("tvm_ffi") is None, reason="apache-tvm-ffi is not installed"
)


def compiled():
    shape = (cute.sym_int(),)
    fake = cute.runtime.make_fake_compact_tensor(cute.Int32, shape, assumed_align=16)
    one = cute.Int32(1)
    return cute.compile(kernels.reverse_twice, fake, fake, fake, one, options="--enable-tvm-ffi")


@needs_tvm_ffi
def test_torch_tensors_and_keywords_pass():
    a = torch.arange(128, dtype=torch.int32)
    b, c = torch.zeros_like(a), torch.zeros_like(a)
    with cutedsl.emulate() as run:
        function = compiled()
        function(a, b, c, 2)
        assert torch.equal(c, 4 * a)
        function(a, b=b, c=c, factor=3)
        assert torch.equal(c, 9 * a)
        with pytest.raises(ValueError, match="dtype"):
            function(a.float(), b, c, 2)
    assert len(run.launches) == 4


@needs_tvm_ffi
def test_exported_functions_are_emulated_wherever_the_file_is_moved(tmp_path, monkeypatch):
    monkeypatch.setenv("PTXEMU_CACHE", str(tmp_path / "cache"))
    a = torch.arange(64, dtype=torch.int32)
    b, c = torch.zeros_like(a), torch.zeros_like(a)
    with cutedsl.emulate() as run:
        compiled().export_to_c(str(tmp_path / "new.o"), function_name="twice")
        (tmp_path / "new.o").rename(tmp_path / "old.o")
        loaded = cute.runtime.load_module(str(tmp_path / "old.o"), enable_tvm_ffi=True)
        loaded["twice"](a, b, c, 2)
    assert torch.equal(c, 4 * a) and len(run.launches) == 2
    with cutedsl.emulate() as later:
        loaded.twice(a, b, c, 3)
    assert torch.equal(c, 9 * a) and len(later.launches) == len(run.launches) == 2
    with pytest.raises(PtxEmuError, match="twice: call it inside"):
        loaded.twice(a, b, c, 3)


@needs_tvm_ffi
def test_an_exported_function_without_ptx_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PTXEMU_CACHE", str(tmp_path / "cache"))
    (tmp_path / "k.o").write_bytes(b"compiled long ago")
    with cutedsl.emulate(), pytest.raises(cutedsl.MissingPtxError, match="delete it"):
        cute.runtime.load_module(str(tmp_path / "k.o"), enable_tvm_ffi=True)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def change(path):
    path.write_text(path.read_text().replace(".entry", ".func "))


def spoil(path):
    path.write_bytes(b"\xff" + path.read_bytes())


def open_to_all(path):
    path.chmod(0o666)


def open_the_cache_to_all(path):
    path.parents[1].chmod(0o777)


@needs_tvm_ffi
def test_kept_ptx_is_used_as_it_was_written_by_this_user_or_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PTXEMU_CACHE", str(tmp_path / "cache"))
    path = str(tmp_path / "k.o")
    with cutedsl.emulate():
        function = compiled()
        for damage in (cut, change, spoil, open_to_all, open_the_cache_to_all):
            function.export_to_c(path, function_name="twice")
            (kept,) = (tmp_path / "cache" / "exported").iterdir()
            cute.runtime.load_module(path, enable_tvm_ffi=True)
            damage(kept)
            with pytest.raises(cutedsl.MissingPtxError, match="delete it"):
                cute.runtime.load_module(path, enable_tvm_ffi=True)
        kept.unlink()
        function.export_to_c(path, function_name="twice")  # where nothing can be kept
        assert not list(kept.parent.iterdir())


@needs_tvm_ffi
def test_a_library_that_cannot_be_loaded_is_an_error_of_the_call(monkeypatch):
    """CuTe DSL's host code leaves no error for TVM-FFI then, which would end the process."""
    a = torch.arange(64, dtype=torch.int32)

    def refuse(*_):
        raise cutedsl.DriverError(Status.NO_BINARY_FOR_GPU, "compiled for sm_90a")

    with cutedsl.emulate():
        function = compiled()
        monkeypatch.setattr(Driver, "load_library", refuse)
        with pytest.raises(Exception, match="compiled for sm_90a"):
            function(a, a.clone(), a.clone(), 2)


@needs_tvm_ffi
def test_an_exported_function_of_another_architecture_is_refused(tmp_path, monkeypatch):
    """A cache whose names know no architecture then compiles it again, as quack's does."""
    monkeypatch.setenv("PTXEMU_CACHE", str(tmp_path / "cache"))
    path = str(tmp_path / "k.o")
    with cutedsl.emulate(arch="sm_90a"):
        compiled().export_to_c(path, function_name="twice")
        cute.runtime.load_module(path, enable_tvm_ffi=True)
    refused = pytest.raises(cutedsl.DriverError, match="for sm_90a, but emulated on sm_100a")
    with cutedsl.emulate(arch="sm_100a"), refused:
        cute.runtime.load_module(path, enable_tvm_ffi=True)


# What a driver refuses, the emulated one refuses with the driver's codes.


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
        code, text = refused(function, dynamic(storage[1:].view(8, 32), align=4), dynamic(b))
    assert code == INVALID_VALUE and "address" in text


def test_code_for_another_architecture_is_refused():
    a = torch.zeros(64, dtype=torch.int32)
    with cutedsl.emulate(arch="sm_90a"):
        function = cute.compile(kernels.reverse_twice, *[dynamic(a)] * 3, 1)
    with cutedsl.emulate(arch="sm_100a"):
        assert refused(function, *[dynamic(a)] * 3, 1)[0] == NO_BINARY_FOR_GPU
