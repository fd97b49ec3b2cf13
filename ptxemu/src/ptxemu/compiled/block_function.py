"""A block as one function of machine code on the lanes of a warp; loops of one block included.

The registers that a block needs are copied into a buffer, whose addresses are constants in the
code, and what it has written is copied out again: arrays of registers never change in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir

from ptxemu.compiled.emitter import I64, MASK, Emitter, Layout, UnknownToMachineCodeError, lowering
from ptxemu.compiled.native import machine_code
from ptxemu.machine.blocks import Block, FastFunction

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ALIGNMENT = 64


def compile_block(block: Block, *, masked: bool) -> FastFunction | None:
    """Machine code for a block; None where an instruction of it is not known here."""
    try:
        function = _Function(block, masked=masked)
    except UnknownToMachineCodeError:
        return None
    return function.finish()


class _Function:
    """The code of one block in the making."""

    def __init__(self, block: Block, *, masked: bool) -> None:
        steps = [(i, op, lowering(i, op)) for i, op in block.code]
        self._block = block
        self._layout = Layout()
        self._module = ir.Module(name="block")
        type_ = ir.FunctionType(I64, [ir.IntType(8).as_pointer(), I64])
        self._function = ir.Function(self._module, type_, name="run")
        buffer, self._rounds = self._function.args
        entry = self._function.append_basic_block("entry")
        self._body = self._function.append_basic_block("body")
        builder = ir.IRBuilder(entry)
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self._round = builder.phi(I64)
        self._round.add_incoming(ir.Constant(I64, 0), entry)
        self._emitter = Emitter(self._layout, builder, buffer, None)
        if masked:
            self._emitter.mask = self._emitter.load(MASK, "pred")
            self._layout.inputs[MASK] = "m"
        for instruction, op, lower in steps:
            self._emitter.emit(instruction, op, lower)
        self._end()

    def _end(self) -> None:
        """Store what was written; go round again while the loop's guard holds in all lanes."""
        builder, loop = self._emitter.builder, self._block.loop
        again = None if loop is None else self._emitter.all_hold(loop)
        self._emitter.flush(except_for=self._block.temporaries)
        done = builder.add(self._round, ir.Constant(I64, 1))
        if again is None:
            builder.ret(done)
            return
        more = builder.icmp_unsigned("<", done, self._rounds)
        out = self._function.append_basic_block("out")
        self._round.add_incoming(done, self._body)
        builder.cbranch(builder.and_(again, more), self._body, out)
        ir.IRBuilder(out).ret(done)

    def finish(self) -> FastFunction:
        """The function in Python that copies in, calls and copies out."""
        code, engine = machine_code(self._module, "run")
        buffer = np.zeros(self._layout.size + _ALIGNMENT, dtype=np.uint8)
        buffer = buffer[-buffer.ctypes.data % _ALIGNMENT :]
        names = self._layout.names
        names["call"] = _bound(code, buffer, engine)
        rows = {}
        for number, (key, row) in enumerate(self._layout.rows(buffer)):
            rows[key] = f"b{number}"
            names[f"b{number}"] = row
        lines = ["R = warp.registers"]
        lines += [f"{rows[key]}[:] = {value}" for key, value in self._layout.inputs.items()]
        lines.append("done = call(rounds)")
        lines += [
            f"R[{slot}] = {rows[slot]}.copy()"
            for slot in self._emitter.written
            if slot not in self._block.temporaries
        ]
        body = "\n    ".join([*lines, "return done"])
        source = f"def block(warp, m, rounds):\n    {body}\n"
        exec(compile(source, f"<compiled block {self._block.first}>", "exec"), names)
        function: FastFunction = names["block"]
        return function


def _bound(code: int, buffer: NDArray[np.uint8], engine: Any) -> Callable[[int], int]:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    function = prototype(code)
    address = int(buffer.ctypes.data)

    def call(rounds: int) -> int:
        done: int = function(address, rounds)
        return done

    call.keep = (engine, buffer)  # type: ignore[attr-defined]
    return call
