"""Functions of machine code, written by hand: numbers with operators, variables, loops, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I1, I8, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))


def constant(value: int) -> Any:
    """A number of 64 bits."""
    return ir.Constant(I64, value)


def _operator(name: str, *how: str) -> Callable[[Any, Any], Any]:
    def write(self: Value, other: Any) -> Value:
        return Value(self.b, getattr(self.b, name)(*how, self.ir, self.other(other)))

    return write


class Value:
    """A number of the function: what is done with it is written there.

    Python's integers are constants of its type, order is signed. As an address it has 64-bit words
    (`value[index]`), which can be set.

    Attributes:
        b: the builder that writes; ir: the number in LLVM.
    """

    def __init__(self, b: Any, number: Any) -> None:
        self.b, self.ir = b, number

    def other(self, value: Any) -> Any:
        """LLVM's form of another operand."""
        return value.ir if isinstance(value, Value) else ir.Constant(self.ir.type, int(value))

    __add__, __sub__, __mul__ = _operator("add"), _operator("sub"), _operator("mul")
    __and__, __or__ = _operator("and_"), _operator("or_")
    __lshift__, __rshift__ = _operator("shl"), _operator("ashr")
    __lt__, __le__ = _operator("icmp_signed", "<"), _operator("icmp_signed", "<=")
    __gt__, __ge__ = _operator("icmp_signed", ">"), _operator("icmp_signed", ">=")
    __eq__ = _operator("icmp_signed", "==")
    __ne__ = _operator("icmp_signed", "!=")

    def __invert__(self) -> Value:
        return Value(self.b, self.b.not_(self.ir))

    def is_below(self, other: Any) -> Value:
        """Whether it is less, both without signs."""
        return Value(self.b, self.b.icmp_unsigned("<", self.ir, self.other(other)))

    def shifted_right(self, bits: int) -> Value:
        """Without its lowest bits, zeros for the highest."""
        return Value(self.b, self.b.lshr(self.ir, self.other(bits)))

    def choice(self, yes: Any, no: Any) -> Value:
        """`yes` where it is true, else `no`; one of them at least is no constant."""
        typed: Value = yes if isinstance(yes, Value) else no
        return Value(self.b, self.b.select(self.ir, typed.other(yes), typed.other(no)))

    def as_number(self) -> Value:
        """0 or 1, of 64 bits, for false or true."""
        return Value(self.b, self.b.zext(self.ir, I64))

    def pointer(self, type_: Any, index: Any = 0) -> Any:
        """LLVM's pointer to the element `index` of an array of `type_` at this address."""
        pointer = self.b.inttoptr(self.ir, type_.as_pointer())
        return self.b.gep(pointer, [index.ir if isinstance(index, Value) else constant(index)])

    def __getitem__(self, index: Any) -> Value:
        return Value(self.b, self.b.load(self.pointer(I64, index)))

    def __setitem__(self, index: Any, value: Any) -> None:
        word = value.ir if isinstance(value, Value) else constant(value)
        self.b.store(word, self.pointer(I64, index))


class Ints(Value):
    """The address of numbers of 32 bits, which are read and written as ones of 64."""

    def __getitem__(self, index: Any) -> Value:
        return Value(self.b, self.b.sext(self.b.load(self.pointer(I32, index)), I64))

    def __setitem__(self, index: Any, value: Any) -> None:
        short = self.b.trunc(value.ir if isinstance(value, Value) else constant(value), I32)
        self.b.store(short, self.pointer(I32, index))


class Variable:
    """A variable of the function; a loop around this makes no more of them."""

    def __init__(self, first: Value) -> None:
        self._b = first.b
        with self._b.goto_entry_block():
            self._place = self._b.alloca(first.ir.type)
        self.value = first

    @property
    def value(self) -> Any:
        """The value that it holds now."""
        return Value(self._b, self._b.load(self._place))

    @value.setter
    def value(self, value: Value) -> None:
        self._b.store(value.ir, self._place)


@contextmanager
def counted(b: Any, end: Any, step: int = 1) -> Iterator[Any]:
    """A loop over 0, step, 2 * step... below `end`, which is not 0; gives the counter."""
    before = b.block
    head, out = b.append_basic_block("head"), b.append_basic_block("out")
    b.branch(head)
    b.position_at_end(head)
    counter = b.phi(I64)
    counter.add_incoming(constant(0), before)
    yield Value(b, counter)
    following = Value(b, counter) + step
    counter.add_incoming(following.ir, b.block)
    b.cbranch((following < end).ir, head, out)
    b.position_at_end(out)


@contextmanager
def endless(b: Any) -> Iterator[Callable[[Value], None]]:
    """A loop that ends where the function that it gives is called with what is true."""
    head, out = b.append_basic_block("head"), b.append_basic_block("out")
    b.branch(head)
    b.position_at_end(head)
    yield lambda condition: require(~condition, out)
    b.branch(head)
    b.position_at_end(out)


def when(condition: Value, *, likely: bool | None = None) -> Any:
    """A block that is executed where the condition holds."""
    return condition.b.if_then(condition.ir, likely=likely)


def require(condition: Value, failed: Any) -> None:
    """Go to `failed` where the condition does not hold."""
    b = condition.b
    on = b.append_basic_block("on")
    b.cbranch(condition.ir, on, failed)
    b.position_at_end(on)
