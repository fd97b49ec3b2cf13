"""Functions of machine code with loops, written by hand: counted loops and words of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I64 = ir.IntType(64)


def constant(value: int) -> Any:
    """A number of 64 bits."""
    return ir.Constant(I64, value)


@contextmanager
def counted(b: Any, end: Any, step: int = 1) -> Iterator[Any]:
    """A loop over 0, step, 2 * step... below `end`, which is not 0; gives the counter."""
    before = b.block
    head, out = b.append_basic_block("head"), b.append_basic_block("out")
    b.branch(head)
    b.position_at_end(head)
    counter = b.phi(I64)
    counter.add_incoming(constant(0), before)
    yield counter
    following = b.add(counter, constant(step))
    counter.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, end), head, out)
    b.position_at_end(out)


def local(b: Any, type_: Any) -> Any:
    """A variable of the function; a loop around this makes no more of them."""
    with b.goto_entry_block():
        return b.alloca(type_)


def at(b: Any, address: Any, type_: Any, index: Any = 0) -> Any:
    """A pointer to the element `index` of an array of `type_` at `address`."""
    pointer = b.inttoptr(address, type_.as_pointer())
    return b.gep(pointer, [constant(index) if isinstance(index, int) else index])


def word_at(b: Any, address: Any, index: Any = 0) -> Any:
    """The 64-bit word `index` at `address`."""
    return b.load(at(b, address, I64, index))


def require(b: Any, condition: Any, failed: Any) -> None:
    """Go to `failed` where the condition does not hold."""
    on = b.append_basic_block("on")
    b.cbranch(condition, on, failed)
    b.position_at_end(on)
