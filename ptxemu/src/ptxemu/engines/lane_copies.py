"""The copies of a cp.async, one a lane, in machine code where that is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ptxemu import machine_code
from ptxemu.engines.shared_matrix import address_of_shared
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lanes import FULL, WARP_SIZE, bits_of
from ptxemu.machine.register_file import RegisterFile
from ptxemu.syntax.ast import Address, NegatedRegister, Operand, Register

if TYPE_CHECKING:
    from ptxemu.machine.lanes import Mask
    from ptxemu.machine.register_file import RegisterLayout
    from ptxemu.machine.state import Cta, Warp

_ROWS_AT_ONCE = 64
_NO_LIMIT, _PREDICATE, _NEGATED, _COUNT = range(4)
_WIDTHS = {"u32": 32, "b32": 32, "s32": 32, "u64": 64, "b64": 64, "s64": 64, "pred": 1}


@dataclass(slots=True, eq=False)
class LaneCopies:
    """Copies of the lanes of one instruction.

    Attributes:
        offsets: in the CTA's shared memory; sources: global addresses; counts: bytes to read of
            each, the rest is zero; None: all.
        address: address of 3 rows of 32 words with these, for machine code; 0: none.
    """

    offsets: NDArray[np.int64]
    sources: NDArray[np.int64]
    counts: NDArray[np.int64] | None
    address: int = 0


class _Rows:
    """Memory for what copies are told, 3 rows of 32 words each time, and where it is."""

    def __init__(self, cta: Cta) -> None:
        self._left: list[tuple[NDArray[np.int64], int]] = []

    def take(self) -> tuple[NDArray[np.int64], int]:
        """Three rows that nobody else has, and their address."""
        if not self._left:
            block = np.empty((_ROWS_AT_ONCE, 3, WARP_SIZE), np.int64)
            first = int(block.ctypes.data)
            each = block.nbytes // _ROWS_AT_ONCE
            self._left = [(rows, first + each * number) for number, rows in enumerate(block)]
        return self._left.pop()


_rows: EngineState[Cta, _Rows] = EngineState(_Rows)


class CopyOperands:
    """The operands of a cp.async whose registers machine code can read."""

    def __init__(self, target: Address, source: Address, limit: Operand | None, size: int) -> None:
        self._target, self._source = target, source
        negated = isinstance(limit, NegatedRegister)
        self._limit = limit.register if isinstance(limit, NegatedRegister) else limit
        is_predicate = isinstance(self._limit, Register) and self._limit.type == "pred"
        kind = _COUNT if limit is not None else _NO_LIMIT
        self._kind = (_NEGATED if negated else _PREDICATE) if is_predicate else kind
        self._size = size
        self.is_known = (
            _has_bits(target.base, 32)
            and _has_bits(source.base, 64)
            and (limit is None or is_predicate or _has_bits(limit, 32))
        )
        self._layout: RegisterLayout | None = None
        self._words = np.zeros(0, np.int64)

    def take(self, warp: Warp, mask: Mask) -> LaneCopies | None:
        """Return the copies of the lanes of `mask`; None if an address or a count is wrong, or if
        machine code is not to do it."""
        registers = warp.registers
        if not self.is_known or not isinstance(registers, RegisterFile):
            return None
        code = machine_code.lane_copies(warp.cta)
        if code is None:
            return None
        if self._layout is not registers.layout:
            self._bind(registers.layout)
        cta = warp.cta
        rows, address = _rows(cta).take()
        lanes = -1 if mask is FULL else bits_of(mask)
        count = code.lane_taker(self._size)(
            self._address, registers.address, lanes, cta.rank, len(cta.shared), address
        )
        if not count:
            return None
        offsets, sources, counts = rows[:, :count]
        return LaneCopies(offsets, sources, counts if self._kind else None, address)

    def _bind(self, layout: RegisterLayout) -> None:
        """Say where the registers are in the register files of a kernel."""
        target, source = (a.base for a in (self._target, self._source))
        assert isinstance(target, Register) and isinstance(source, Register)
        limit = self._limit if isinstance(self._limit, Register) else target
        self._words = np.array(
            [
                layout.offsets[target.slot],
                layout.offsets[source.slot],
                self._target.offset,
                self._source.offset,
                layout.offsets[limit.slot],
                self._kind,
            ],
            np.int64,
        )
        self._address = int(self._words.ctypes.data)
        self._layout = layout


def _has_bits(operand: Operand, bits: int) -> bool:
    return isinstance(operand, Register) and _WIDTHS.get(operand.type) == bits


def copy(cta: Cta, copies: LaneCopies, size: int) -> bool:
    """Copy; False where a source is in no allocation, or where machine code is not to do it."""
    code = machine_code.lane_copies(cta) if copies.address else None
    if code is None:
        return False
    table, entries = cta.machine.memory.table()
    lanes = len(copies.offsets)
    copier = code.lane_copier(size)
    return bool(copier(table, entries, copies.address, lanes, address_of_shared(cta)))
