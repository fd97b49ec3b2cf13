"""Runs of bytes that lanes can address: a CTA's shared memory, an allocation, a warp's local bytes.

A region's words are at the addresses that instructions use, generic windows and CTA ranks included.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import fault
from ptxemu.events import Access, AccessKind, Proxy, Space
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lanes import WARP_SIZE
from ptxemu.machine.state import AsyncOperation, Cta, Region, Warp
from ptxemu.memory.address import (
    CONST_WINDOW,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_BASE,
    SHARED_OFFSET_MASK,
    SHARED_RANK_SHIFT,
    SHARED_WINDOW,
    WINDOW_BYTES,
    in_window,
)
from ptxemu.memory.words import Words
from ptxemu.syntax.ast import Instruction

_WINDOW_BITS = WINDOW_BYTES.bit_length() - 1
SHARED_TOP = SHARED_WINDOW >> _WINDOW_BITS
LOCAL_TOP = LOCAL_WINDOW >> _WINDOW_BITS
LOW_BITS = WINDOW_BYTES - 1
_LOCAL_ALIGNMENT = 32


def _shared(cta: Cta, window: int) -> Region:
    origin = window + (cta.rank << SHARED_RANK_SHIFT)
    first = 0 if cta.machine.layout.uses_reserved_shared else SHARED_BASE
    return Region(Words(origin + first, cta.shared[first:]), Space.SHARED, cta, origin)


shared_region: EngineState[Cta, Region] = EngineState(lambda cta: _shared(cta, 0))
"""A CTA's shared memory at its 32-bit shared addresses."""
generic_shared_region: EngineState[Cta, Region] = EngineState(
    lambda cta: _shared(cta, SHARED_WINDOW)
)
"""A CTA's shared memory at its generic addresses."""


def local_stride(warp: Warp) -> int:
    """Bytes between the local memories of neighbouring lanes."""
    return -(-warp.cta.machine.layout.local_bytes // _LOCAL_ALIGNMENT) * _LOCAL_ALIGNMENT


def _local(warp: Warp) -> Region:
    data = np.zeros(WARP_SIZE * local_stride(warp), dtype=np.uint8)
    return Region(Words(0, data), Space.LOCAL, None, 0)


local_region = EngineState(_local)
"""Local memories of a warp's lanes, one after another, at lane * stride + offset."""


def global_region(warp: Warp, address: int, size: int) -> Region | None:
    """The allocation that holds [address, address + size), a parameter or a constant; or None."""
    words = warp.cta.machine.memory.words_at(address, size)
    if words is None:
        return None
    if in_window(address, PARAM_WINDOW):
        return Region(words, Space.PARAM, None, PARAM_WINDOW, is_writable=False)
    return Region(words, Space.GLOBAL, None, 0, is_writable=words.data.flags.writeable)


def describe_generic(address: int) -> str:
    """The state space that a generic address names."""
    windows = {
        "shared": SHARED_WINDOW,
        "local": LOCAL_WINDOW,
        "param": PARAM_WINDOW,
        "const": CONST_WINDOW,
    }
    return next((name for name, w in windows.items() if in_window(address, w)), "global")


# Reaching memory from steps and engines: shared addresses to CTAs, and reports to the observer.

TMEM_LANE_BYTES = 2048
"""Bytes of one TMEM lane: 512 columns of 32 bits. TMEM byte = lane * 2048 + column * 4."""


def report(
    agent: Warp | AsyncOperation,
    owner: Cta | None,
    starts: int | NDArray[np.int64],
    size: int,
    kind: AccessKind,
    instruction: Instruction | None = None,
    *,
    space: Space | None = None,
    proxy: Proxy = Proxy.GENERIC,
    is_silent: bool = False,
) -> None:
    """Tell the observer, if there is one, of an access.

    Args:
        owner: of shared memory, or of TMEM if `space` says so; None: global memory.
        starts: first byte of each piece (see `events.Access.starts`), or of the only one.
        size: bytes of each piece.
        instruction: that of a warp; an operation has its own.
        is_silent: a write of what was there already.
    """
    machine = agent.cta.machine
    if machine.observer is None:
        return
    if instruction is None:
        assert isinstance(agent, AsyncOperation)
        instruction = agent.instruction
    index = None if owner is None else owner.index
    space = space or (Space.GLOBAL if owner is None else Space.SHARED)
    if isinstance(starts, int):
        starts = np.array([starts], dtype=np.int64)
    machine.observer.accessed(
        Access(agent, space, index, starts, size, kind, proxy, instruction, is_silent=is_silent)
    )


def locate_shared(cta: Cta, address: int, size: int, instruction: Instruction) -> tuple[Cta, int]:
    """The CTA and the offset in its shared memory that a 32-bit shared address names.

    Args:
        cta: the CTA that executes; its own addresses carry its rank (`memory.address`).

    Raises:
        ExecutionError: no such CTA in the cluster, or not all bytes in its shared memory.
    """
    rank, offset = address >> SHARED_RANK_SHIFT, address & SHARED_OFFSET_MASK
    if not 0 <= rank < len(cta.cluster.ctas):
        fault(
            instruction,
            f"shared address 0x{address:x} names CTA "
            f"rank {rank} of a cluster of {len(cta.cluster.ctas)}",
        )
    target = cta.cluster.ctas[rank]
    if offset + size > len(target.shared):
        fault(
            instruction,
            f"shared address 0x{offset:x} + {size} bytes "
            f"is beyond the CTA's {len(target.shared)} bytes",
        )
    if target.exited:
        message = f"access to shared memory of cta {target.ctaid}, which has exited"
        cta.machine.complain("error", "exited-cta", message, None, instruction)
    return target, offset


# Bytes of parameters: the kernel's, and those that a function declares to pass to a call.


def frame_bytes(warp: Warp, name: str) -> NDArray[np.uint8] | None:
    """The bytes (32, size) of a .param variable of the function body; None for another name."""
    return _frames(warp).get(name)


def _empty_frames(warp: Warp) -> dict[str, NDArray[np.uint8]]:
    return {
        variable.name: np.zeros((WARP_SIZE, variable.size), dtype=np.uint8)
        for variable in warp.program.function.variables
        if variable.space == "param"
    }


_frames = EngineState(_empty_frames)


def parameter_bytes(
    warp: Warp, name: str, offset: int, size: int, instruction: Instruction
) -> bytes:
    """Bytes of a kernel parameter.

    Raises:
        ExecutionError: they are not all in the parameter block.
    """
    machine = warp.cta.machine
    start = machine.layout.symbol_address(name) - PARAM_WINDOW + offset
    block = machine.launch.parameters
    if not 0 <= start <= len(block) - size:
        message = f"{name}+{offset} ({size} bytes) is outside the {len(block)} bytes of parameters"
        fault(instruction, message)
    return block[start : start + size]
