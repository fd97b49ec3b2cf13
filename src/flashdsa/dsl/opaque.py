"""A value that the compiler cannot see through."""

from typing import Any

from flashdsa.dsl import ptx


def opaque(value: Any) -> Any:
    """The same 32-bit integer; the compiler does not know how it was computed.

    The compiler would otherwise compute what follows from the value once, keep the results in
    registers through a loop, and spill others; with `opaque` they are computed anew at each use.
    """
    return ptx.word("mov.b32 {$w0}, {$r0};", value)
