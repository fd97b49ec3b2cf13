"""Triton's kernels for the emulator: compiled for a GPU that is not here, as Triton would there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.runner import TRITON_ALIGNMENT
from flashdsa.errors import UnsupportedError
from flashdsa.hw import WARP_SIZE

if TYPE_CHECKING:
    from ptxemu import Module
    from ptxemu.check import Finding
    from ptxemu.launch_setup import LaunchSetup


def compiled(
    capability: tuple[int, int], kernel: Any, arguments: Sequence[Any], **options: Any
) -> tuple[Any, list[Any]]:
    """Compile a kernel for a GPU of this capability, and list the arguments that its code takes.

    Triton itself decides, as at a launch, which arguments become constants and what else the
    compiler is told about them.

    Args:
        options: num_warps, num_stages and the like, and the constants by name.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", capability[0] * 10 + capability[1], WARP_SIZE)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    values, specialization, _ = bind(*arguments, **options)
    parsed, signature, constants, known = kernel._pack_args(
        backend, options, values, specialization, None
    )
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=known)
    made = compile(source, target=target, options=parsed.__dict__)
    return made, [values[name] for name, kind in signature.items() if kind != "constexpr"]


def prepared(
    device: Device,
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    **options: Any,
) -> LaunchSetup:
    """A launch on CPU tensors, of a kernel that is compiled for the device.

    Raises:
        UnsupportedError: its tiles do not fit the device's shared memory.
    """
    from ptxemu.launch_setup import LaunchSetup
    from ptxemu.memory.global_memory import GlobalMemory

    made, taken = compiled(device.capability, kernel, arguments, **options)
    facts = made.metadata
    if facts.shared > device.smem_bytes:
        raise UnsupportedError(
            f"{facts.name}: expected at most {device.smem_bytes} bytes of shared memory; "
            f"takes {facts.shared}"
        )
    module = _loaded(made.asm["ptx"], "sm_100a" if device.capability[0] == 10 else "sm_90a")
    values = [_memory_of(value) if isinstance(value, Tensor) else value for value in taken]
    # Behind them Triton passes memory of its own, which these kernels do not ask for.
    spare = len(module.syntax.kernels[facts.name].parameters) - len(values)
    values += [torch.zeros(TRITON_ALIGNMENT, dtype=torch.uint8)] * spare
    block = facts.num_warps * WARP_SIZE
    return LaunchSetup(
        module, facts.name, grid, block, tuple(values), GlobalMemory(), smem=facts.shared
    )


@cache
def _loaded(ptx: str, arch: str) -> Module:
    """PTX on one of ptxemu's devices: it runs that of older and other GPUs, too."""
    import ptxemu

    return ptxemu.load(ptx, arch=arch)


def _memory_of(x: Tensor) -> Tensor:
    """All from the first to the last element of a tensor, gaps included."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1 if x.numel() else 0,), (1,))


def counts(finding: Finding) -> bool:
    """Whether it is an error of the kernel.

    Where a tile has fewer elements than a CTA has threads, several warps hold the same elements and
    write them to the same places of shared memory, by one instruction. Where these are equal to
    each other, too, such as zeros, ptxemu calls that a race of equal values; else it notes it.
    """
    first, second = finding.first, finding.second
    return not (
        finding.code == "race"
        and "of shared memory of cta" in finding.message
        and "the value was the same in this run" in finding.message
        and first is not None
        and second is not None
        and first.pc == second.pc
        and first.action == second.action == "generic write"
    )
