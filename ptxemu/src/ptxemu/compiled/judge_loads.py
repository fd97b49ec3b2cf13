"""The check's judgement of a warp's loads in a row, one after another, in machine code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from ptxemu.compiled.builtins import make_builtin
from ptxemu.compiled.judge_code import ARGUMENTS, OBJECTS, write_judgement
from ptxemu.compiled.judge_rows import I32, Verdict
from ptxemu.compiled.loops import I64, at, constant, counted, require, word_at
from ptxemu.compiled.python_objects import data_of, is_layout_known
from ptxemu.machine.lanes import WARP_SIZE

_OWN = ("sizes", "numbers", "begin", "end")
_SHARED = tuple(name for name in ARGUMENTS if name not in ("pieces", "length", "event"))
VERDICT_SHIFT = 32


@cache
def judge_loads() -> Callable[..., int] | None:
    """The function; None if Python's objects are not laid out as it needs.

    Its arguments are those of `judge_code.judge` but for the pieces, their length and the event;
    then the address of the loads' sizes in bytes (64 bits), the array of their events' numbers (32
    bits), the first load and the one after the last. `starts` is an address too, of 32 words a
    load. It gives the first load that was not judged, and from bit VERDICT_SHIFT on its `Verdict`.
    """
    if not is_layout_known():
        return None
    names = (*_SHARED, *_OWN)
    objects = [names.index(name) for name in (*OBJECTS, "numbers")]
    return make_builtin("judge_loads", len(names), _write, objects=objects)


def _write(b: Any, arguments: Sequence[Any]) -> None:
    given = dict(zip((*_SHARED, *_OWN), arguments, strict=True))
    type_ = ir.FunctionType(I64, [I64] * len(ARGUMENTS))
    one = ir.Function(b.module, type_, name="judge_load")
    one.linkage = "internal"
    write_judgement(ir.IRBuilder(one.append_basic_block("entry")), one.args)
    left = b.append_basic_block("left")
    begin, end, numbers = given["begin"], given["end"], data_of(b, given["numbers"])
    with counted(b, b.sub(end, begin)) as number:
        load = b.add(begin, number)
        row = b.mul(load, constant(8 * WARP_SIZE))
        own = {
            "starts": b.add(given["starts"], row),
            "pieces": constant(WARP_SIZE),
            "length": b.ashr(word_at(b, given["sizes"], load), given["shift"]),
            "event": b.sext(b.load(at(b, numbers, I32, load)), I64),
        }
        verdict = b.call(one, [(given | own)[name] for name in ARGUMENTS])
        stopped = b.or_(load, b.shl(verdict, constant(VERDICT_SHIFT)))
        reached = b.block
        require(b, b.icmp_signed("==", verdict, constant(Verdict.DONE)), left)
    b.ret(end)
    b.position_at_end(left)
    result = b.phi(I64)
    result.add_incoming(stopped, reached)
    b.ret(result)
