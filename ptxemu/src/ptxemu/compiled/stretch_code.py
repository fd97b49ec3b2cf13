"""Blocks, branches and plain accesses of a kernel as one function of machine code.

Lanes are kept apart as the interpreter keeps them: those with the smallest pc go first, and meet
others at their pc. As long as all are at one place, code runs on from node to node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ptxemu.compiled.emitter import (
    I64,
    Emitter,
    Layout,
    UnknownToMachineCodeError,
    lowering,
    require_plain,
)
from ptxemu.compiled.llvm_vectors import Vector, bits_of_type, integers, splat
from ptxemu.compiled.memory_code import CACHE_WORDS, TYPE, Context, Shape, accessor
from ptxemu.machine.blocks import Block
from ptxemu.machine.decoded import PlainAccess
from ptxemu.machine.lanes import WARP_SIZE
from ptxemu.machine.program import BranchNode, Program, StepNode
from ptxemu.syntax.ast import Guard, IntImmediate, Register, Scalar, Sink, Symbol

NOWHERE = 0x7FFFFFFF
"""The pc of lanes that do not take part."""
SPACES = ("global", "shared::cta", "local", "const", "generic")
_I32, _I8 = ir.IntType(32), ir.IntType(8)
_PCS = integers(32)
Node = Block | BranchNode | StepNode


def can_be_code(program: Program, node: object) -> bool:
    """Whether a node can be part of a stretch."""
    try:
        if isinstance(node, Block):
            for instruction, op in node.code:
                lowering(instruction, op)
                for operand in (*op.sources, *op.destinations):
                    if isinstance(operand, Register):
                        require_plain(operand)
            _try_block(node)
        elif isinstance(node, StepNode):
            _require_access(node.access)
            if node.access is not None and node.access.space == "param":
                _parameter_offset(program, node.access)
        else:
            return isinstance(node, BranchNode)
    except UnknownToMachineCodeError:
        return False
    return True


def _try_block(block: Block) -> None:
    """Write it somewhere, to see whether all its operands are known."""
    function = ir.Function(ir.Module(), ir.FunctionType(I64, [_I8.as_pointer()]), name="f")
    builder = ir.IRBuilder(function.append_basic_block())
    emitter = Emitter(Layout(), builder, function.args[0], None)
    for instruction, op in block.code:
        emitter.emit(instruction, op, lowering(instruction, op))


def _require_access(access: PlainAccess | None) -> None:
    if (
        access is None
        or access.space not in (*SPACES, "param")
        or access.address.coordinates is not None
    ):
        raise UnknownToMachineCodeError
    for operand in access.registers:
        if isinstance(operand, Register):
            require_plain(operand)
        elif not isinstance(operand, Sink) and not access.is_store:
            raise UnknownToMachineCodeError


def _parameter_offset(program: Program, access: PlainAccess) -> int:
    """Where a load of a kernel parameter begins in the parameter block."""
    base, parameters = access.address.base, program.function.parameters
    own = {variable.name for variable in program.function.variables}
    if access.is_store or not isinstance(base, Symbol) or base.name in own:
        raise UnknownToMachineCodeError
    starts = [p.offset for p in parameters if p.name == base.name]
    size = access.element * len(access.registers)
    offset = (starts or [-1])[0] + base.addend + access.address.offset
    if not starts or not 0 <= offset <= parameters[-1].offset + parameters[-1].size - size:
        raise UnknownToMachineCodeError
    return offset


class StretchCode:
    """The function `run(buffer, context, caches, scratch, pcs, budget)` of a stretch in the making.

    `budget`: how often lanes may be sorted by their pc, or go back, before it returns. It returns
    with every lane's pc, the counts of `Context` grown.
    """

    def __init__(self, program: Program, nodes: Sequence[int], layout: Layout) -> None:
        """`nodes`: the pcs of nodes that `can_be_code`."""
        self.module = ir.Module(name="stretch")
        self.num_accesses = 0
        self.written: set[int] = set()
        """Slots of the registers that change."""
        self.data_words = WARP_SIZE
        """Of 64 bits in the scratch memory: addresses, then data."""
        self._program = program
        self._layout = layout
        pointers = [_I8.as_pointer(), *(I64.as_pointer(),) * 3, _PCS.as_pointer()]
        type_ = ir.FunctionType(ir.VoidType(), [*pointers, I64])
        self._function = ir.Function(self.module, type_, name="run")
        self._buffer, self._context, self._caches, self._scratch, pcs, budget = self._function.args
        self._b = ir.IRBuilder(self._function.append_basic_block("entry"))
        self._pcs = pcs
        b = self._b
        self._left = b.alloca(I64)
        self._mask = b.alloca(_I32)
        self._is_together = b.alloca(ir.IntType(1))
        b.store(budget, self._left)
        self._dispatch = self._function.append_basic_block("dispatch")
        self._out = self._function.append_basic_block("out")
        self._starts = {pc: self._function.append_basic_block(f"pc{pc}") for pc in nodes}
        b.branch(self._dispatch)
        self._write_dispatch()
        for pc, start in self._starts.items():
            b.position_at_end(start)
            self._write_node(pc)
        b.position_at_end(self._out)
        b.ret_void()

    def _write_dispatch(self) -> None:
        """Choose the lanes with the smallest pc."""
        b = self._b
        b.position_at_end(self._dispatch)
        some = self._function.append_basic_block("some")
        left = b.sub(b.load(self._left), ir.Constant(I64, 1))
        b.store(left, self._left)
        pcs = b.load(self._pcs)
        name = f"llvm.vector.reduce.umin.v{WARP_SIZE}i32"
        reduce_ = ir.Function(self.module, ir.FunctionType(_I32, [_PCS]), name=name)
        least = b.call(reduce_, [pcs])
        here = self._number(b.icmp_unsigned("==", pcs, self._splat(least)))
        alive = self._number(b.icmp_unsigned("!=", pcs, splat(_PCS, NOWHERE)))
        b.store(here, self._mask)
        b.store(b.icmp_unsigned("==", here, alive), self._is_together)
        b.cbranch(b.icmp_signed(">", left, ir.Constant(I64, 0)), some, self._out)
        b.position_at_end(some)
        switch = b.switch(least, self._out)
        for pc, start in self._starts.items():
            switch.add_case(ir.Constant(_I32, pc), start)

    def _write_node(self, pc: int) -> None:
        node = self._program.nodes[pc]
        if isinstance(node, Block):
            emitter = self._emitter()
            for instruction, op in node.code:
                emitter.emit(instruction, op, lowering(instruction, op))
            emitter.flush(except_for=node.temporaries)
            self.written |= set(emitter.written) - node.temporaries
            self._count(Context.INSTRUCTIONS, node.count)
            self._go(node.end)
        elif isinstance(node, BranchNode):
            self._count(Context.INSTRUCTIONS, 1)
            self._write_branch(pc, node)
        else:
            assert isinstance(node, StepNode) and node.access is not None
            self._write_access(pc, node.access, node.guard)

    def _emitter(self) -> Emitter:
        mask = self._b.bitcast(self._b.load(self._mask), integers(1))
        return Emitter(self._layout, self._b, self._buffer, mask)

    def _write_branch(self, pc: int, node: BranchNode) -> None:
        b = self._b
        if node.guard is None:
            self._go(node.target, is_back=node.target <= pc)
            return
        emitter = self._emitter()
        mask = b.load(self._mask)
        taken = b.and_(mask, self._number(emitter.holds(node.guard)))
        none, some, all_, split = (
            self._function.append_basic_block(f"pc{pc}_{name}")
            for name in ("none", "some", "all", "split")
        )
        b.cbranch(b.icmp_unsigned("==", taken, ir.Constant(_I32, 0)), none, some)
        b.position_at_end(none)
        self._go(pc + 1)
        b.position_at_end(some)
        b.cbranch(b.icmp_unsigned("==", taken, mask), all_, split)
        b.position_at_end(all_)
        self._go(node.target, is_back=node.target <= pc)
        b.position_at_end(split)
        self._put_pcs(mask, pc + 1)
        self._put_pcs(taken, node.target)
        b.branch(self._dispatch)

    def _write_access(self, pc: int, access: PlainAccess, guard: Guard | None) -> None:
        b, emitter = self._b, self._emitter()
        mask = b.load(self._mask)
        if guard is not None:
            mask = b.and_(mask, self._number(emitter.holds(guard)))
            emitter.mask = b.bitcast(mask, integers(1))
        self._count(Context.INSTRUCTIONS, 1)
        execute, on = (self._function.append_basic_block(f"pc{pc}_{n}") for n in ("do", "on"))
        b.cbranch(b.icmp_unsigned("!=", mask, ir.Constant(_I32, 0)), execute, on)
        b.position_at_end(execute)
        if access.space == "param":
            self._load_parameters(access, emitter)
        else:
            self._call_accessor(pc, access, emitter, mask)
        b.branch(on)
        b.position_at_end(on)
        self._go(pc + 1)

    def _call_accessor(self, pc: int, access: PlainAccess, emitter: Emitter, mask: Any) -> None:
        b, count = self._b, len(access.registers)
        shape = Shape(access.space, access.element, count, access.is_store)
        name = accessor(shape)
        function = self.module.globals.get(name) or ir.Function(self.module, TYPE, name=name)
        at = b.bitcast(self._scratch, integers(64).as_pointer())
        b.store(self._addresses(access, emitter), at)
        data = b.bitcast(b.gep(self._scratch, [ir.Constant(I64, WARP_SIZE)]), _I8.as_pointer())
        self.data_words = max(self.data_words, WARP_SIZE * (1 + -(-shape.size // 8)))
        row = b.bitcast(data, integers(8 * access.element).as_pointer())
        rows = [b.gep(row, [ir.Constant(I64, number)]) for number in range(count)]
        if access.is_store:
            for operand, place in zip(access.registers, rows, strict=True):
                b.store(self._stored(operand, access, emitter), place)
        cache = b.gep(self._caches, [ir.Constant(I64, CACHE_WORDS * self.num_accesses)])
        self.num_accesses += 1
        done = b.call(function, [self._context, cache, self._scratch, mask, data])
        good, bad = (self._function.append_basic_block(f"pc{pc}_{n}") for n in ("good", "bad"))
        b.cbranch(b.icmp_unsigned("!=", done, ir.Constant(_I32, 0)), good, bad)
        b.position_at_end(bad)
        self._count(Context.INSTRUCTIONS, -1)
        self._put_pcs(b.load(self._mask), pc)
        b.branch(self._out)
        b.position_at_end(good)
        if access.is_store:
            self._count(Context.STORES, 1)
            return
        for operand, place in zip(access.registers, rows, strict=True):
            if isinstance(operand, Register):
                emitter.set(operand, self._loaded(b.load(place), operand, access))
        emitter.flush()
        self.written |= set(emitter.written)

    def _load_parameters(self, access: PlainAccess, emitter: Emitter) -> None:
        """Words of the parameter block, the same for every lane."""
        b, word = self._b, ir.IntType(8 * access.element)
        block = b.load(b.gep(self._context, [ir.Constant(I64, Context.PARAMETERS)]))
        offset = _parameter_offset(self._program, access)
        for number, operand in enumerate(access.registers):
            if isinstance(operand, Register):
                at = b.add(block, ir.Constant(I64, offset + number * access.element))
                value = b.load(b.inttoptr(at, word.as_pointer()), align=1)
                lanes = self._splat(value)
                emitter.set(operand, self._loaded(lanes, operand, access))
        emitter.flush()
        self.written |= set(emitter.written)

    def _addresses(self, access: PlainAccess, emitter: Emitter) -> Vector:
        b, base, offset = self._b, access.address.base, access.address.offset
        if isinstance(base, Register) and bits_of_type(base.type) == 32:
            narrow = b.add(emitter.bits(base), splat(integers(32), offset & 0xFFFFFFFF))
            return b.zext(narrow, integers(64))
        if not isinstance(base, Register | Symbol | IntImmediate):
            raise UnknownToMachineCodeError
        return b.add(emitter.source(base, "b64"), splat(integers(64), offset & (1 << 64) - 1))

    def _stored(self, operand: Scalar, access: PlainAccess, emitter: Emitter) -> Vector:
        bits = 8 * access.element
        if not isinstance(operand, Register):
            return emitter.source(operand, f"b{bits}")
        value = emitter.bits(operand)
        if value.type.element.width > bits:
            return self._b.trunc(value, integers(bits))
        return value if value.type == integers(bits) else self._b.zext(value, integers(bits))

    def _loaded(self, value: Vector, register: Register, access: PlainAccess) -> Vector:
        bits = bits_of_type(register.type)
        if value.type.element.width == bits:
            return value
        widen = self._b.sext if access.is_signed else self._b.zext
        return widen(value, integers(bits))

    def _go(self, target: int, *, is_back: bool = False) -> None:
        """The lanes that execute go to `target`: at once where all are together."""
        b = self._b
        start = self._starts.get(target)
        if start is None:
            self._put_pcs(b.load(self._mask), target)
            b.branch(self._dispatch)
            return
        apart = self._function.append_basic_block("apart")
        together = b.load(self._is_together)
        if is_back:
            left = b.sub(b.load(self._left), ir.Constant(I64, 1))
            b.store(left, self._left)
            together = b.and_(together, b.icmp_signed(">", left, ir.Constant(I64, 0)))
        b.cbranch(together, start, apart)
        b.position_at_end(apart)
        self._put_pcs(b.load(self._mask), target)
        b.branch(self._dispatch)

    def _put_pcs(self, lanes: Any, pc: int) -> None:
        b = self._b
        held = b.bitcast(lanes, integers(1))
        b.store(b.select(held, splat(_PCS, pc), b.load(self._pcs)), self._pcs)

    def _count(self, field: Context, more: int) -> None:
        b = self._b
        place = b.gep(self._context, [ir.Constant(I64, field)])
        b.store(b.add(b.load(place), ir.Constant(I64, more)), place)

    def _number(self, lanes: Vector) -> Any:
        """A predicate of 32 lanes as a number."""
        return self._b.bitcast(lanes, _I32)

    def _splat(self, value: Any) -> Vector:
        b = self._b
        type_ = ir.VectorType(value.type, WARP_SIZE)
        vector = b.insert_element(ir.Constant(type_, ir.Undefined), value, ir.Constant(_I32, 0))
        zero = ir.Constant(integers(32), [0] * WARP_SIZE)
        return b.shuffle_vector(vector, vector, zero)
