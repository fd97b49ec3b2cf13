"""Compilation of every kernel's launch."""

from __future__ import annotations

from typing import Any

from cutlass import cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.hw import ArchSpec


def options_for(arch: ArchSpec) -> str:
    """Options that compile a TVM-FFI function for the architecture's target."""
    return f"--enable-tvm-ffi --gpu-arch {arch.target}"


def compile_launch(arch: ArchSpec, launch: Any, plan: Any, *arguments: Any) -> Any:
    """A TVM-FFI function of a launch's `arguments` on torch's current stream; needs no GPU.

    Args:
        launch: takes the plan, the stream and the arguments; its docstring tells of these.
        plan: None: `launch` takes none.
        arguments: without memory. Those that are no tensors or numbers are constants, which the
            function does not take.
    """
    constants = () if plan is None else (plan,)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, *constants, stream, *arguments, options=options_for(arch))
