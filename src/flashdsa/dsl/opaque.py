"""A value that the compiler cannot see through."""

from typing import Any

from cutlass import Int32, cute


def opaque(value: Any) -> Any:
    """The same 32-bit integer; the compiler does not know how it was computed.

    The compiler would otherwise compute what follows from the value once, keep the results in
    registers through a loop, and spill others; with `opaque` they are computed anew at each use.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )
