"""Functions compiled with --enable-tvm-ffi take torch tensors directly; they are emulated too."""

import pytest

from ptxemu import cutedsl
from ptxemu.driver.rules import Driver, Status
from ptxemu.errors import PtxEmuError

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("llvmlite", reason="llvmlite is not installed")
cute = pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
kernels = pytest.importorskip("tests.cutedsl.small_kernels")


def compiled():
    shape = (cute.sym_int(),)
    fake = cute.runtime.make_fake_compact_tensor(cute.Int32, shape, assumed_align=16)
    one = cute.Int32(1)
    return cute.compile(kernels.reverse_twice, fake, fake, fake, one, options="--enable-tvm-ffi")


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


def test_exported_functions_are_emulated_wherever_the_file_is_moved(tmp_path, monkeypatch):
    monkeypatch.setenv("PTXEMU_CACHE_DIR", str(tmp_path / "cache"))
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


def test_an_exported_function_without_ptx_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PTXEMU_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "k.o").write_bytes(b"compiled long ago")
    with cutedsl.emulate(), pytest.raises(cutedsl.MissingPtxError, match="delete it"):
        cute.runtime.load_module(str(tmp_path / "k.o"), enable_tvm_ffi=True)


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


def test_an_exported_function_of_another_architecture_is_refused(tmp_path, monkeypatch):
    """A cache whose names know no architecture then compiles it again, as quack's does."""
    monkeypatch.setenv("PTXEMU_CACHE_DIR", str(tmp_path / "cache"))
    path = str(tmp_path / "k.o")
    with cutedsl.emulate(arch="sm_90a"):
        compiled().export_to_c(path, function_name="twice")
        cute.runtime.load_module(path, enable_tvm_ffi=True)
    refused = pytest.raises(cutedsl.DriverError, match="for sm_90a, but emulated on sm_100a")
    with cutedsl.emulate(arch="sm_100a"), refused:
        cute.runtime.load_module(path, enable_tvm_ffi=True)
