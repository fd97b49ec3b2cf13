"""Options of `cute.compile`, the same for all kernels."""

from __future__ import annotations

from flashdsa.hw import ArchSpec


def options_for(arch: ArchSpec) -> str:
    """Options that compile a TVM-FFI function for the architecture's target."""
    return f"--enable-tvm-ffi --gpu-arch {arch.target}"
