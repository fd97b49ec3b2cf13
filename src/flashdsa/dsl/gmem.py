"""Device memory: prefetches, several words, predicates, counters."""

from typing import Any

from cutlass import Float32, Int32, cute


def prefetch(pointer: Any) -> None:
    """Prefetch a cache line of device memory into the second-level cache."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[pointer])


def store1(pointer: Any, word: Int32) -> None:
    """A word, whatever the pointer is to."""
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[pointer, word])


@cute.jit
def store2(pointer: Any, first: Int32, second: Int32) -> None:
    """Two neighbouring words."""
    cute.arch.inline_ptx(
        "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[pointer, first, second]
    )


def store4(pointer: Any, words: Any) -> None:
    """Store four neighbouring words at a multiple of 16 bytes."""
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[pointer, *words],
    )


@cute.jit
def store8(pointer: Any, words: Any) -> None:
    """Store eight neighbouring words at a multiple of 32 bytes; Blackwell and later."""
    operands = ", ".join(f"{{$r{i + 1}}}" for i in range(8))
    cute.arch.inline_ptx(
        f"st.global.v8.b32 [{{$r0}}], {{{operands}}};", read_only_args=[pointer, *words]
    )


def store_if(taken: Int32, pointer: Any, value: Int32) -> None:
    """Store a word if `taken` is not 0, by a predicate and no branch."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; @p st.global.b32 [{$r1}], {$r2}; }",
        read_only_args=[taken, pointer, value],
    )


def load_if(taken: Int32, pointer: Any, kind: str = "b32", offset: int = 0) -> Int32:
    """Load a word, or a number of another kind, `offset` bytes after `pointer` if `taken` is not 0,
    else return 0; by a predicate and no branch."""
    at = f"[{{$r1}} + {offset}]" if offset else "[{$r1}]"
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, 0; "
        f"@p ld.global.{kind} {{$w0}}, {at}; }}",
        write_only_types=[Int32],
        read_only_args=[taken, pointer],
    )


def load_half(pointer: Any) -> Int32:
    """Load 16 bits."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 half; ld.global.u16 half, [{$r0}]; cvt.u32.u16 {$w0}, half; }",
        write_only_types=[Int32],
        read_only_args=[pointer],
    )


@cute.jit
def load2(pointer: Any) -> tuple[Int32, Int32]:
    """Load two neighbouring words that other SMs wrote, past the first-level cache."""
    return cute.arch.inline_ptx(
        "ld.global.cg.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Int32, Int32],
        read_only_args=[pointer],
    )


@cute.jit
def load4(pointer: Any) -> tuple[Int32, Int32, Int32, Int32]:
    """Load four neighbouring words that other SMs wrote, past the first-level cache."""
    return cute.arch.inline_ptx(
        "ld.global.cg.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[pointer],
    )


@cute.jit
def add_relaxed(pointer: Any, value: Int32) -> None:
    """Add to a counter that other SMs add to; orders nothing else."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.u32 [{$r0}], {$r1};", read_only_args=[pointer, value]
    )


@cute.jit
def draw(counter: Any, draws: Int32) -> Int32:
    """Draw the counter's next number. The last of so many draws leaves it at 0; orders nothing
    else."""
    return cute.arch.inline_ptx(
        "atom.relaxed.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[counter, draws - 1],
    )


@cute.jit
def load_relaxed(pointer: Any) -> Int32:
    """Load a counter that other SMs add to, as far as they have; orders nothing else."""
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[pointer],
    )


@cute.jit
def add_release(pointer: Any, value: Int32) -> None:
    """Add to a counter that other SMs add to: a release of what the caller did or has seen."""
    cute.arch.inline_ptx(
        "red.release.gpu.global.add.u32 [{$r0}], {$r1};", read_only_args=[pointer, value]
    )


@cute.jit
def load_acquire(pointer: Any) -> Int32:
    """Load a counter that other SMs add to: an acquire of what they released."""
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[pointer],
    )


@cute.jit
def add_float(pointer: Any, value: Float32) -> None:
    """Add to fp32 that other SMs add to; orders nothing else."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.f32 [{$r0}], {$r1};", read_only_args=[pointer, value]
    )


def add4_if(row: Any, pointer: Any, values: list[Any]) -> None:
    """Add to four neighbouring fp32, unless `row` is negative."""
    _four_floats("red.global.add", row, pointer, values)


def store4_if(row: Any, pointer: Any, values: list[Any]) -> None:
    """Store four neighbouring fp32, unless `row` is negative."""
    _four_floats("st.global", row, pointer, values)


def _four_floats(instruction: str, row: Any, pointer: Any, values: list[Any]) -> None:
    cute.arch.inline_ptx(
        "{ .reg .pred some; setp.ge.s32 some, {$r5}, 0; "
        f"@some {instruction}.v4.f32 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}}; }}",
        read_only_args=[pointer, *values, row],
    )
