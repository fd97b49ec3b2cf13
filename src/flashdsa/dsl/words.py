"""Numbers of 64 bits as two words."""

from typing import Any

from cutlass import Int64, cute

from flashdsa.dsl import ptx


def words_of(value: Any) -> list[Any]:
    """The low word and the high one."""
    return ptx.words("mov.b64 {{$w0}, {$w1}}, {$r0};", 2, Int64(value))


def join_words(low: Any, high: Any) -> Any:
    """The number of these words."""
    return cute.arch.inline_ptx(
        "mov.b64 {$w0}, {{$r0}, {$r1}};", write_only_types=[Int64], read_only_args=[low, high]
    )
