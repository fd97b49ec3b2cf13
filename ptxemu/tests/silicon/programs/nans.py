"""Which NaN comes out where several go in, of infinities, and through conversions."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from tests.silicon.programs.build import kernel, operation
from tests.silicon.programs.case import Array, Bytes, Program

WORDS = {
    # quiet, quiet and negative, signalling, 1, infinity, -infinity, 0, negative and signalling
    "f64": (0x7FF800000000000A, 0xFFF800000000B000, 0x7FF00000000C0000, 0x3FF0000000000000,
            0x7FF0000000000000, 0xFFF0000000000000, 0, 0xFFF000000D000000),
    "f32": (0x7FC0000A, 0xFFC0B000, 0x7F80000C, 0x3F800000, 0x7F800000, 0xFF800000, 0, 0xFF8D0000),
    "f16": (0x7E0A, 0xFE0B, 0x7C0C, 0x3C00, 0x7C00, 0xFC00, 0, 0xFC0D),
    "bf16": (0x7FC2, 0xFFC3, 0x7F84, 0x3F80, 0x7F80, 0xFF80, 0, 0xFF85),
}  # fmt: skip
PAYLOADS = {
    "f64": (0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0xFFF4000000000000,
            0x7FF0000020000000, 0x7FF003FFFFFFFFFF, 0x7FF00400FFFFFFFF, 0xFFF8123456789ABC),
    "f32": (0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFA00000, 0x7F801FFF, 0x7F801000, 0x7F803000,
            0xFFC12345),
    "f16": (0x7C01, 0x7FFF, 0xFFFF, 0xFD00, 0x7C3F, 0x7C40, 0x7E55, 0xFE55),
    "bf16": (0x7F81, 0x7FFF, 0xFFFF, 0xFFA0, 0x7F90, 0x7FC1, 0x7FD5, 0xFFD5),
}  # fmt: skip
CONVERSIONS = (
    *(f"cvt.{r}.tf32.f32" for r in ("rna", "rn", "rna.satfinite")),
    *(f"cvt{m}.f32.f32" for m in ("", ".ftz")),
    *(f"cvt{m}.f32.{t}" for m in ("", ".ftz") for t in ("f16", "bf16")),
    *(f"cvt.{r}.{t}.f64" for r in ("rn", "rm") for t in ("f32", "f16", "bf16")),
    *(f"cvt.f64.{t}" for t in ("f32", "f16", "bf16")),
    *(f"cvt.{r}.f64.f64" for r in ("rni", "rmi")),
)


def _operands(kind: str, count: int) -> list[Bytes]:
    """64 combinations: all pairs, or all triples of the first four words."""
    words = WORDS[kind] if count == 2 else WORDS[kind][:4]
    columns = np.array(list(product(words, repeat=count)), np.uint64).T
    size = {"f64": 8, "f32": 4}.get(kind, 2)
    return [np.ascontiguousarray(c.astype(f"u{size}")).view(np.uint8) for c in columns]


def _op(
    opcode: str, ins: list[str], out: str, count: int, data: list[Bytes], **rest: Any
) -> Program:
    return operation("nans", opcode, ins, [out], count=count, data=data, **rest)


def _combinations() -> Iterator[Program]:
    for kind in WORDS:
        half = kind.endswith("16")
        rounded = [f"{op}.rn" for op in ("add", "sub", "mul")]
        if not half:
            rounded += ["add.rz", "mul.rp", "div.rn", "div.rz"]
        for op in (*rounded, "min", "max", *(() if kind == "f64" else ("min.xorsign.abs",))):
            yield _op(f"{op}.{kind}", [kind] * 2, kind, 64, _operands(kind, 2))
        for op in ("fma.rn",) if half else ("fma.rn", "fma.rp"):
            yield _op(f"{op}.{kind}", [kind] * 3, kind, 64, _operands(kind, 3))


def _conversions() -> Iterator[Program]:
    for full in CONVERSIONS:
        to, source = full.split(".")[-2:]
        size = {"f64": 8, "f32": 4}.get(source, 2)
        data = np.array(PAYLOADS[source], f"u{size}").view(np.uint8)
        out = "b32" if to == "tf32" else to
        yield _op(full, [source], out, 8, [data], version="8.6")


def _atomics() -> Iterator[Program]:
    held, arriving = _operands("f64", 2)
    for opcode in ("atom", "red"):
        for space in ("global", "shared"):
            to = "%x2, " if opcode == "atom" else ""
            address = "%x0" if space == "global" else "%r1"
            body = f"""mad.wide.u32 %x0, %t, 8, %mem; mad.wide.u32 %x1, %t, 8, %in;
                mad.lo.u32 %r1, %t, 8, %s; ld.global.b64 %x3, [%x0]; st.shared.b64 [%r1], %x3;
                ld.global.b64 %x3, [%x1]; {opcode}.{space}.add.f64 {to}[{address}], %x3;"""
            if space == "shared":
                body += "ld.shared.b64 %x3, [%r1]; st.global.b64 [%x0], %x3;"
            args = [("mem", Array(held, recorded=True)), ("in", Array(arriving))]
            name = f"nans/{opcode}.{space}.add.f64"
            yield kernel(name, body, args, block=64, smem=512)


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _combinations()
    yield from _conversions()
    yield from _atomics()
