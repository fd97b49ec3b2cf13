"""Addresses (PTX ISA, "Data Movement and Conversion Instructions": isspacep, cvta, mapa,
getctarank, prefetch, createpolicy and their kin).

Parameters, constants and local variables have generic addresses already (`machine.layout`); their
low 32 bits are their addresses within the state space. Instructions of these spaces take both.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxemu.isa.memory_operands import take_space
from ptxemu.isa.registry import Modifiers, pure, unsupported, visible
from ptxemu.machine.decoded import PureOp, Step
from ptxemu.machine.lane_memory import LaneMemory
from ptxemu.machine.lanes import WARP_SIZE, Lanes, Mask
from ptxemu.machine.state import Warp
from ptxemu.memory.address import (
    CONST_WINDOW,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_OFFSET_MASK,
    SHARED_RANK_SHIFT,
    SHARED_WINDOW,
)
from ptxemu.syntax.ast import Instruction, Operand, Scalar, SpecialRegister

_LOW = np.uint64(0xFFFF_FFFF)
_WINDOW_SHIFT = np.uint64(32)
_ALL_BITS = (1 << 64) - 1
_RANK_SHIFT = np.uint64(SHARED_RANK_SHIFT)
_RANK_MASK = np.uint64(0xFF)
_OFFSET_MASK = np.uint64(SHARED_OFFSET_MASK)
_POLICY = np.full(WARP_SIZE, 0x10F0_0000_0000_0000, dtype=np.uint64)
"""Result of createpolicy: cache policies have no effect and are opaque."""
_POLICY.flags.writeable = False

_WINDOWS = {"local": LOCAL_WINDOW, "param": PARAM_WINDOW, "const": CONST_WINDOW}


def _scalar(operand: Operand) -> Scalar:
    assert not hasattr(operand, "elements")
    return operand  # type: ignore[return-value]


def _in_window(addresses: Lanes, window: int) -> Lanes:
    inside: Lanes = addresses >> _WINDOW_SHIFT == np.uint64(window >> 32)
    return inside


def _is_shared_cta(addresses: Lanes, rank: Lanes) -> Lanes:
    own = (addresses >> _RANK_SHIFT) & _RANK_MASK == rank
    inside: Lanes = _in_window(addresses, SHARED_WINDOW) & own
    return inside


def _is_global(addresses: Lanes, rank: Lanes) -> Lanes:
    # NOTE: module-level .global variables share the constants' window.
    elsewhere = [window >> 32 for window in (SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW)]
    return ~np.isin(addresses >> _WINDOW_SHIFT, elsewhere)


_IS_SPACE = {
    "shared::cta": _is_shared_cta,
    "shared::cluster": lambda addresses, rank: _in_window(addresses, SHARED_WINDOW),
    "global": _is_global,
    "local": lambda addresses, rank: _in_window(addresses, LOCAL_WINDOW),
    "param": lambda addresses, rank: _in_window(addresses, PARAM_WINDOW),
    "const": lambda addresses, rank: _in_window(addresses, CONST_WINDOW),
}


@pure("isspacep")
def is_space(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """p = whether the generic address lies in the state space's window."""
    space = take_space(modifiers)
    if space not in _IS_SPACE:
        unsupported(instruction, "expected a state space")
    d, a = (_scalar(operand) for operand in instruction.operands)
    rank = SpecialRegister("%cluster_ctarank")
    return PureOp(_IS_SPACE[space], ("pred",), ("u64", "u32"), (d,), (a, rank))


def _into(window: int) -> Callable[[Lanes], Lanes]:
    """Addresses of a space's window, from ones within the space or generic ones."""
    base = np.uint64(window)
    return lambda addresses: (addresses & _LOW) | base


@pure("cvta")
def convert_address(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """An address of a state space to a generic one; `.to` the other way."""
    from_generic = modifiers.flag("to")
    space = take_space(modifiers)
    width = modifiers.one_of("u64")
    if space == "generic":
        unsupported(instruction, "expected a state space")
    function: Callable[[Lanes], Lanes] = lambda addresses: addresses
    if space.startswith("shared"):
        distance = np.uint64((-SHARED_WINDOW if from_generic else SHARED_WINDOW) & _ALL_BITS)
        function = lambda addresses: addresses + distance
    elif not from_generic and space != "global":
        function = _into(_WINDOWS[space])
    d, a = (_scalar(operand) for operand in instruction.operands)
    return PureOp(function, (width,), (width,), (d,), (a,))


def _map_shared(addresses: Lanes, rank: Lanes) -> Lanes:
    return (addresses & _OFFSET_MASK) | (rank.astype(np.uint64) << _RANK_SHIFT)


@pure("mapa")
def map_address(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The address in the cluster's CTA of rank b that corresponds to shared address a."""
    is_shared = modifiers.flag("shared::cluster")
    type_ = modifiers.one_of("u32", "u64")
    if type_ == "u32" and not is_shared:
        unsupported(instruction, "a generic address has 64 bits")
    d, a, b = (_scalar(operand) for operand in instruction.operands)
    window = np.uint64(0 if is_shared else SHARED_WINDOW)
    result = np.uint64 if type_ == "u64" else np.uint32
    function = lambda x, rank: (_map_shared(x, rank) + window).astype(result)
    return PureOp(function, (type_,), ("u64", "u32"), (d,), (a, b))


def _rank_of(addresses: Lanes) -> Lanes:
    return ((addresses >> _RANK_SHIFT) & _RANK_MASK).astype(np.uint32)


@pure("getctarank")
def get_cta_rank(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The rank of the CTA whose shared memory an address lies in."""
    modifiers.flag("shared::cluster")
    modifiers.one_of("u32", "u64")
    d, a = (_scalar(operand) for operand in instruction.operands)
    return PureOp(_rank_of, ("u32",), ("u64",), (d,), (a,))


@pure("createpolicy")
def create_policy(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """An opaque cache policy."""
    modifiers.one_of("fractional", "range", "cvt")
    modifiers.flag("global")
    modifiers.drop_hints()
    modifiers.flag("L2")
    modifiers.one_of("b64")
    return PureOp(lambda: _POLICY, ("b64",), (), (_scalar(instruction.operands[0]),), ())


@visible("prefetch", "prefetchu")
def prefetch(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Bring a line into a cache: no effect; an invalid address is no fault either."""
    modifiers.drop_hints()
    take_space(modifiers)
    modifiers.one_of("L1", "L2", "tensormap", default="L2")
    return lambda warp, mask: None


@visible("applypriority", "discard")
def cache_line(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Change the eviction priority of a line, or drop it unwritten: only the address is checked.

    `discard` makes the bytes undefined; they keep their values here.
    """
    space = take_space(modifiers)
    modifiers.drop_hints()
    modifiers.flag("L2")
    memory = LaneMemory(instruction, instruction.operands[0], space, 8, 16)

    def step(warp: Warp, mask: Mask) -> None:
        memory.check(warp, mask)

    return step
