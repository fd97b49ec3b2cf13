"""The words of a launch's parameters that may be addresses of global memory."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from ptxemu.syntax.ast import Address, Function, Instruction, Operand, Symbol, Vector
from ptxemu.syntax.types import TYPES

_LOWEST_ADDRESS = 1 << 16
HIGHEST_ADDRESS = 1 << 47
_TENSOR_MAP_BYTES = 128
_WORD_BYTES = 8


def address_words(kernel: Function, values: Sequence[bytes]) -> Iterator[int]:
    """Words that the kernel reads whole, where they may be addresses.

    Two sizes in one word are read apart, and what pads a structure is not read at all, whatever
    the host's stack had there.
    """
    read = _read_offsets(kernel)
    for parameter, value in zip(kernel.parameters, values, strict=True):
        is_tensor_map = parameter.size == _TENSOR_MAP_BYTES and parameter.align >= 64
        end = _WORD_BYTES if is_tensor_map else len(value) - len(value) % _WORD_BYTES
        words = struct.unpack(f"<{end // _WORD_BYTES}Q", value[:end])
        yield from plausible(
            word
            for offset, word in zip(range(0, end, _WORD_BYTES), words, strict=True)
            if offset in read[parameter.name]
        )


def plausible(words: Iterable[int]) -> Iterator[int]:
    """Words that may be addresses of a process."""
    return (word for word in words if _LOWEST_ADDRESS <= word < HIGHEST_ADDRESS)


def _read_offsets(kernel: Function) -> dict[str, set[int] | range]:
    """Offsets in each parameter at which the kernel reads 64 bits or more at once.

    All of them where it takes the parameter's own address.
    """
    found: dict[str, set[int] | range] = {p.name: set() for p in kernel.parameters}
    whole = {p.name: range(0, p.size, _WORD_BYTES) for p in kernel.parameters}
    for instruction in kernel.instructions:
        for symbol, offset in _symbols(instruction.operands):
            offsets = found.get(symbol.name)
            if not isinstance(offsets, set):
                continue
            if instruction.modifiers[0] == "ld":
                offsets.update(_loaded(instruction, symbol.addend + offset))
            else:
                found[symbol.name] = whole[symbol.name]
    return found


def _symbols(operands: Iterable[Operand]) -> Iterator[tuple[Symbol, int]]:
    """The names among operands, each with the offset beside it."""
    for operand in operands:
        if isinstance(operand, Symbol):
            yield operand, 0
        elif isinstance(operand, Address) and isinstance(operand.base, Symbol):
            yield operand.base, operand.offset
        elif isinstance(operand, Vector):
            yield from _symbols(operand.elements)


def _loaded(load: Instruction, offset: int) -> range:
    """Offsets of the 64-bit words that an `ld` from a parameter reads; none of narrower values."""
    size = TYPES[load.modifiers[-1]].size
    counts = [int(m[1:]) for m in load.modifiers if m in ("v2", "v4", "v8")]
    if size < _WORD_BYTES:
        return range(0)
    return range(offset, offset + size * (counts[0] if counts else 1), _WORD_BYTES)
