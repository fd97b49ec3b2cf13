"""Routines of machine code, one for each kind of pure instruction, and what calls them in a row.

A routine does one instruction on the 32 lanes of its operands, which it gets as addresses; it is
made once a process and serves every kernel. A block is then a list of records (`RECORD_WORDS`): no
code has to be made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir

from ptxemu.compiled import access_records
from ptxemu.compiled.builtins import machine_code, make_builtin
from ptxemu.compiled.loops import Value
from ptxemu.compiled.lowering import FLOATS, Lower, Vector, bits_of_type, integers, lowered, splat
from ptxemu.machine.decoded import PureOp, identity
from ptxemu.machine.lanes import WARP_SIZE
from ptxemu.syntax.ast import Instruction, NegatedRegister

RECORD_WORDS = 8
"""Words of 64 bits in a record: routine, two destinations, three sources, the guard's register (0:
none), and -1 if the guard is negated. An odd address is one in the warp's register file, counted
from its start and 1 too large. The routine's address of a weak access (`access_records`) is 1 too
large, and only the first destination or source word counts: the access's descriptor."""
MOST_DESTINATIONS, MOST_SOURCES = 2, 3
_I1, _I8, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_OPERANDS = MOST_DESTINATIONS + MOST_SOURCES
_ROUTINE = ir.FunctionType(ir.VoidType(), [*[_I64] * _OPERANDS, _I32])
_ALIGNMENT = 64
_NAN_F32 = 0x7FFFFFFF


class Kind(NamedTuple):
    """Form of instruction that a routine is made for."""

    modifiers: tuple[str, ...]
    source_types: tuple[str, ...]
    result_types: tuple[str, ...]
    negated: tuple[bool, ...]
    """Whether each source is a negated predicate."""
    is_move: bool


def kind_of(instruction: Instruction, op: PureOp) -> Kind:
    """The kind of an instruction."""
    return Kind(
        instruction.modifiers,
        op.source_types,
        op.result_types,
        tuple(isinstance(operand, NegatedRegister) for operand in op.sources),
        op.function is identity,
    )


_addresses: dict[Kind, int | None] = {}
_engines: list[Any] = []


def make_routines(instructions: Iterable[tuple[Instruction, PureOp]]) -> None:
    """Make the routines that these need and that are not there yet, all at once."""
    missing: dict[Kind, Lower] = {}
    for instruction, op in instructions:
        kind = kind_of(instruction, op)
        if kind in _addresses or kind in missing:
            continue
        lower = lowered(instruction.modifiers, op)
        if (
            lower is None
            or len(op.sources) > MOST_SOURCES
            or len(op.destinations) > MOST_DESTINATIONS
        ):
            _addresses[kind] = None
        else:
            missing[kind] = lower
    if not missing:
        return
    module = ir.Module(name="routines")
    names = {}
    for number, (kind, lower) in enumerate(missing.items()):
        try:
            _write(module, f"r{number}", kind, lower)
            names[kind] = f"r{number}"
        except _WidthError:
            _addresses[kind] = None
            ir.IRBuilder(module.globals[f"r{number}"].entry_basic_block).ret_void()  # half written
    if names:
        _, engine = machine_code(module, next(iter(names.values())))
        _engines.append(engine)
        for kind, name in names.items():
            _addresses[kind] = int(engine.get_function_address(name))


def routine(kind: Kind) -> int | None:
    """The address of a routine; None where only the instruction's definition says what it does."""
    return _addresses[kind]


class _WidthError(Exception):
    """A result is not as wide as its type."""


def _write(module: Any, name: str, kind: Kind, lower: Lower) -> None:
    function = ir.Function(module, _ROUTINE, name=name)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    addresses, mask = function.args[:-1], function.args[-1]
    values = []
    for place, type_ in enumerate(kind.source_types):
        type_ = "b32" if kind.is_move and type_ == "f32" else type_  # a NaN keeps its payload
        value = _load(builder, addresses[MOST_DESTINATIONS + place], type_)
        values.append(builder.not_(value) if kind.negated[place] else value)
    results = lower(builder, values)
    if len(kind.result_types) == 1:
        results = (results,)
    results = [
        _bits(builder, result, type_)
        for result, type_ in zip(results, kind.result_types, strict=True)
    ]
    whole, part = (function.append_basic_block(name) for name in ("whole", "part"))
    builder.cbranch(builder.icmp_unsigned("==", mask, ir.Constant(_I32, -1)), whole, part)
    builder.position_at_end(whole)
    for result, address in zip(results, addresses, strict=False):
        _store(builder, result, address)
    builder.ret_void()
    builder.position_at_end(part)
    lanes = builder.bitcast(mask, integers(1))
    for result, address in zip(results, addresses, strict=False):
        old = builder.load(_pointer(builder, address, result.type), align=_ALIGNMENT)
        _store(builder, builder.select(lanes, result, old), address)
    builder.ret_void()


def _pointer(builder: Any, address: Any, type_: Any) -> Any:
    return builder.inttoptr(address, type_.as_pointer())


def _load(builder: Any, address: Any, type_: str) -> Vector:
    """An operand as an instruction sees it."""
    bits = bits_of_type(type_)
    stored = integers(max(bits, 8))
    value = builder.load(_pointer(builder, address, stored), align=_ALIGNMENT)
    if type_ == "pred":
        return builder.icmp_unsigned("!=", value, splat(stored, 0))
    return builder.bitcast(value, FLOATS) if type_ == "f32" else value


def _bits(builder: Any, result: Vector, type_: str) -> Vector:
    """A result as its register keeps it; a NaN of f32 is the canonical one."""
    if result.type == FLOATS:
        is_nan = builder.fcmp_unordered("uno", result, result)
        bits = builder.bitcast(result, integers(32))
        result = builder.select(is_nan, splat(integers(32), _NAN_F32), bits)
    if result.type.element.width != bits_of_type(type_):
        raise _WidthError
    return builder.zext(result, integers(8)) if type_ == "pred" else result


def _store(builder: Any, value: Vector, address: Any) -> None:
    builder.store(value, _pointer(builder, address, value.type), align=_ALIGNMENT)


Caller = Callable[[int, int, int, int, int], int]
"""(first record, how many, register file, lanes as bits, context of accesses): how many were done;
less where an access failed."""


@cache
def caller() -> Caller:
    """Return the function that executes the instructions of records one after another."""

    def write(b: Any, arguments: Sequence[Value]) -> None:
        first, count, registers, lanes, context = (argument.ir for argument in arguments)
        type_ = ir.FunctionType(_I64, [_I64, _I64, _I64, _I32, _I64])
        function = ir.Function(b.module, type_, name="records")
        function.linkage = "internal"
        _write_caller(function)
        b.ret(b.call(function, [first, count, registers, b.trunc(lanes, _I32), context]))

    return make_builtin("run_records", 5, write)


def _write_caller(function: Any) -> None:
    first, count, registers, lanes, context = function.args
    entry, head, guarded, execute, pure, access, after, out, failed = (
        function.append_basic_block(name)
        for name in (
            "entry", "head", "guarded", "execute", "pure", "access", "after", "out", "failed"
        )
    )  # fmt: skip
    b = ir.IRBuilder(entry)
    size = ir.Constant(_I64, 8 * RECORD_WORDS)
    end = b.add(first, b.mul(count, size))
    above = b.sub(registers, ir.Constant(_I64, 1))
    b.branch(head)
    b.position_at_end(head)
    at = b.phi(_I64)
    at.add_incoming(first, entry)
    record = b.inttoptr(at, _I64.as_pointer())
    words = [b.load(b.gep(record, [ir.Constant(_I64, k)])) for k in range(RECORD_WORDS)]
    routine_, *operands, guard, negated = words
    one, none = ir.Constant(_I64, 1), ir.Constant(_I32, 0)

    def absolute(word: Any) -> Any:
        is_register = b.sub(ir.Constant(_I64, 0), b.and_(word, one))
        return b.add(word, b.and_(is_register, above))

    b.cbranch(b.icmp_unsigned("!=", guard, ir.Constant(_I64, 0)), guarded, execute)
    b.position_at_end(guarded)
    flags = integers(8)
    held = b.load(b.inttoptr(absolute(guard), flags.as_pointer()), align=WARP_SIZE)
    holds = b.bitcast(b.icmp_unsigned("!=", held, splat(flags, 0)), _I32)
    some = b.and_(lanes, b.xor(holds, b.trunc(negated, _I32)))
    b.cbranch(b.icmp_unsigned("!=", some, none), execute, after)
    b.position_at_end(execute)
    mask = b.phi(_I32)
    mask.add_incoming(lanes, head)
    mask.add_incoming(some, guarded)
    is_access = b.icmp_unsigned("!=", b.and_(routine_, one), ir.Constant(_I64, 0))
    b.cbranch(is_access, access, pure)
    b.position_at_end(access)
    accessor = b.inttoptr(b.sub(routine_, one), access_records.ROUTINE.as_pointer())
    done = b.call(accessor, [operands[0], registers, mask, context])
    b.cbranch(b.icmp_unsigned("!=", done, none), after, failed)
    b.position_at_end(pure)
    target = b.inttoptr(routine_, _ROUTINE.as_pointer())
    b.call(target, [*(absolute(word) for word in operands), mask])
    b.branch(after)
    b.position_at_end(after)
    following = b.add(at, size)
    at.add_incoming(following, after)
    b.cbranch(b.icmp_unsigned("<", following, end), head, out)
    b.position_at_end(out)
    b.ret(count)
    b.position_at_end(failed)
    b.ret(b.udiv(b.sub(at, first), size))
