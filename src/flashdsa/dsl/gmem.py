"""Device memory: prefetches, several words, predicates, counters."""

from typing import Any

from cutlass import Int32, cute

from flashdsa.dsl import ptx


def prefetch(pointer: Any) -> None:
    """Prefetch a cache line of device memory into the second-level cache."""
    ptx.run("prefetch.global.L2 [{$r0}];", pointer)


def store1(pointer: Any, word: Int32) -> None:
    """A word, whatever the pointer is to."""
    ptx.run("st.global.b32 [{$r0}], {$r1};", pointer, word)


@cute.jit
def store2(pointer: Any, first: Int32, second: Int32) -> None:
    """Two neighbouring words."""
    ptx.run("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", pointer, first, second)


def store4(pointer: Any, words: Any) -> None:
    """Store four neighbouring words at a multiple of 16 bytes."""
    ptx.run("st.global.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };", pointer, *words)


@cute.jit
def store8(pointer: Any, words: Any) -> None:
    """Store eight neighbouring words at a multiple of 32 bytes; Blackwell and later."""
    operands = ", ".join(f"{{$r{i + 1}}}" for i in range(8))
    ptx.run(f"st.global.v8.b32 [{{$r0}}], {{{operands}}};", pointer, *words)


def store_if(taken: Int32, pointer: Any, value: Int32) -> None:
    """Store a word if `taken` is not 0, by a predicate and no branch."""
    ptx.run(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; @p st.global.b32 [{$r1}], {$r2}; }",
        taken,
        pointer,
        value,
    )


def load_if(taken: Int32, pointer: Any, kind: str = "b32", offset: int = 0) -> Int32:
    """Load a word, or a number of another kind, `offset` bytes after `pointer` if `taken` is not 0,
    else return 0; by a predicate and no branch."""
    at = f"[{{$r1}} + {offset}]" if offset else "[{$r1}]"
    return ptx.word(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, 0; "
        f"@p ld.global.{kind} {{$w0}}, {at}; }}",
        taken,
        pointer,
    )


def load_half(pointer: Any) -> Int32:
    """Load 16 bits."""
    return ptx.word(
        "{ .reg .b16 half; ld.global.u16 half, [{$r0}]; cvt.u32.u16 {$w0}, half; }", pointer
    )


@cute.jit
def load2(pointer: Any) -> list[Int32]:
    """Load two neighbouring words that other SMs wrote, past the first-level cache."""
    return ptx.words("ld.global.cg.v2.b32 {{$w0}, {$w1}}, [{$r0}];", 2, pointer)


@cute.jit
def load4(pointer: Any) -> list[Int32]:
    """Load four neighbouring words that other SMs wrote, past the first-level cache."""
    return ptx.words("ld.global.cg.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", 4, pointer)


@cute.jit
def add_relaxed(pointer: Any, value: Int32) -> None:
    """Add to a counter that other SMs add to; orders nothing else."""
    ptx.run("red.relaxed.gpu.global.add.u32 [{$r0}], {$r1};", pointer, value)


@cute.jit
def draw(counter: Any, draws: Int32) -> Int32:
    """Draw the counter's next number. The last of so many draws leaves it at 0; orders nothing
    else."""
    return ptx.word("atom.relaxed.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};", counter, draws - 1)


@cute.jit
def load_relaxed(pointer: Any) -> Int32:
    """Load a counter that other SMs add to, as far as they have; orders nothing else."""
    return ptx.word("ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", pointer)


def add4_if(row: Any, pointer: Any, values: list[Any]) -> None:
    """Add to four neighbouring fp32, unless `row` is negative."""
    _four_floats("red.global.add", row, pointer, values)


def store4_if(row: Any, pointer: Any, values: list[Any]) -> None:
    """Store four neighbouring fp32, unless `row` is negative."""
    _four_floats("st.global", row, pointer, values)


def _four_floats(instruction: str, row: Any, pointer: Any, values: list[Any]) -> None:
    ptx.run(
        "{ .reg .pred some; setp.ge.s32 some, {$r5}, 0; "
        f"@some {instruction}.v4.f32 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}}; }}",
        pointer,
        *values,
        row,
    )
