"""Functions compiled with --enable-tvm-ffi take torch tensors directly; they are emulated too."""

import pytest

from ptxemu import cutedsl

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("llvmlite", reason="llvmlite is not installed")
cute = pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
kernels = pytest.importorskip("tests.ptxemu.cutedsl.small_kernels")


def test_torch_tensors_and_keywords_pass():
    shape = (cute.sym_int(),)
    fake = cute.runtime.make_fake_compact_tensor(cute.Int32, shape, assumed_align=16)
    a = torch.arange(128, dtype=torch.int32)
    b, c = torch.zeros_like(a), torch.zeros_like(a)
    with cutedsl.emulate() as run:
        function = cute.compile(
            kernels.reverse_twice, fake, fake, fake, cute.Int32(1), options="--enable-tvm-ffi"
        )
        function(a, b, c, 2)
        assert torch.equal(c, 4 * a)
        function(a, b=b, c=c, factor=3)
        assert torch.equal(c, 9 * a)
        with pytest.raises(ValueError, match="dtype"):
            function(a.float(), b, c, 2)
    assert len(run.launches) == 4
