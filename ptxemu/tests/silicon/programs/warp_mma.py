"""mma.sync and mma.sp: every shape and type, registers loaded and stored raw; wmma.

Operands are small integers, so that a value from a wrong place gives a wrong sum and sums are
exact. `random` programs bound the real rounding.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from tests.silicon.programs.build import kernel, result
from tests.silicon.programs.case import EXACT, Array, Bytes, Check, Program
from tests.silicon.programs.values import below, encode, factors, sums

BITS = {"f64": 64, "tf32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
BITS |= {"s4": 4, "u4": 4, "b1": 1}
SPREAD = {"f64": 9, "f16": 4, "bf16": 8, "tf32": 100, "e4m3": 4, "e5m2": 2}
FP8 = ("e4m3", "e5m2")
NIBBLES = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)
"""Metadata of four elements of which two are kept."""
BOUNDS = {"f16": 1.6e-2, "f32": 4.3e-3, "f64": 1e-15}
"""Absolute differences on random data in (-1, 1)."""


@dataclass(frozen=True)
class Product:
    """One mma of shape m8n8kK or m16n8kK.

    Attributes:
        types: of D, A, B and C; extra: modifiers behind the layouts.
        behind: modifiers behind the types; selector: of an mma.sp, whose opcode is `sparse`.
    """

    m: int
    k: int
    types: tuple[str, str, str, str]
    layouts: str = "row.col"
    extra: str = ""
    behind: str = ""
    sparse: str = ""
    selector: int = 0
    random: bool = False

    @property
    def registers(self) -> tuple[int, int, int, int]:
        """Registers of D, A, B and C, of 32 bits or of 64."""
        d, a, b, c = self.types
        if self.layouts != "row.col" or (self.m, self.k, a) == (8, 4, "f16"):
            return (4 if d == "f16" else 8), 2, 2, (4 if c == "f16" else 8)
        width = max(BITS[a], 32)
        kept = self.k // 2 if self.sparse else self.k
        cells = [self.m * 8 // 32 // (2 if t == "f16" else 1) for t in (d, c)]
        return (
            cells[0],
            self.m * kept * BITS[a] // width // 32,
            8 * self.k * BITS[b] // width // 32,
            cells[1],
        )

    @property
    def name(self) -> str:
        """Of the program."""
        d, a, b, c = self.types
        parts = [self.sparse or "mma", f"m{self.m}n8k{self.k}", *dict.fromkeys((d, a, b, c))]
        if a != b:
            parts.append("mixed")
        if a == b and {a, d} == {"f16", "f32"}:
            parts.append(f"from_{c}")
        if self.layouts != "row.col":
            parts.append(self.layouts)
        parts += [p.strip(".") for p in (self.extra, self.behind) if p]
        if self.sparse:
            parts.append(f"selector{self.selector}")
        return ".".join(parts + ["random"] * self.random)


def _values(label: str, kind: str, registers: int, random: bool) -> Bytes:
    """Operand registers of 32 lanes."""
    size = 32 * registers * (8 if kind == "f64" else 4)
    return factors(label, kind, size, SPREAD, random=random)


def _accumulators(label: str, p: Product, registers: int) -> Bytes:
    kind = p.types[3]
    size = 32 * registers * (8 if kind == "f64" else 4)
    return sums(label, kind, size, saturate="satfinite" in p.extra, random=p.random)


def metadata(label: str, kind: str, words: int) -> Bytes:
    """Words of valid sparsity metadata."""
    choices = (0b0100, 0b1110) if kind == "tf32" else NIBBLES
    nibbles = np.array(choices, dtype=np.uint32)[below(label, 8 * words, len(choices))]
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(nibbles.reshape(-1, 8) << shifts, axis=1).view(np.uint8)


def _program(p: Product) -> Program:
    d, a, b, c = p.types
    nd, na, nb, nc = p.registers
    size = 8 if d == "f64" else 4
    word, register = (64, "v") if size == 8 else (32, "w")
    label = f"warp_mma/{p.name}"
    lines, at, operands = [], 0, []
    for argument, count in (("a", na), ("b", nb), ("c", nc)):
        lines.append(f"mad.wide.u32 %x0, %t, {size * count}, %{argument};")
        lines += [f"ld.global.b{word} %{register}{at + i}, [%x0+{size * i}];" for i in range(count)]
        operands.append(", ".join(f"%{register}{at + i}" for i in range(count)))
        at += count
    results = ", ".join(f"%{register}{40 + i}" for i in range(nd))
    opcode = f"{p.sparse or 'mma'}.sync.aligned.m{p.m}n8k{p.k}.{p.layouts}{p.extra}"
    text = f"{opcode}.{d}.{a}.{b}.{c}{p.behind} {{{results}}}, "
    text += ", ".join(f"{{{o}}}" for o in operands)
    args = [
        ("out", result(32 * nd * size)),
        ("a", Array(_values(f"{label}/a", a, na, p.random))),
        ("b", Array(_values(f"{label}/b", b, nb, p.random))),
        ("c", Array(_accumulators(f"{label}/c", p, nc))),
    ]
    if p.sparse:
        lines.append("mad.wide.u32 %x0, %t, 4, %e; ld.global.b32 %w39, [%x0];")
        text += f", %w39, {p.selector}"
        args.append(("e", Array(metadata(f"{label}/e", a, 32))))
    lines += [text + ";", f"mad.wide.u32 %x0, %t, {nd * size}, %out;"]
    lines += [f"st.global.b{word} [%x0+{size * i}], %{register}{40 + i};" for i in range(nd)]
    check = Check(d, absolute=BOUNDS[d]) if p.random else EXACT
    registers = ".reg .b32 %w<64>; .reg .b64 %v<64>;"
    version = "8.7"
    return kernel(
        label, "\n".join(lines), args, declarations=registers, version=version, check=check
    )


def _dense() -> Iterator[Product]:
    for m, k in ((8, 4), (16, 4), (16, 8), (16, 16)):
        double = Product(m, k, ("f64",) * 4)
        yield double
        yield replace(double, random=True)
    for mode in ("rz", "rm", "rp"):
        yield replace(Product(16, 8, ("f64",) * 4), extra=f".{mode}", random=True)
    for layouts in ("row.col", "row.row", "col.row", "col.col"):
        for d, c in (("f16", "f16"), ("f32", "f32"), ("f32", "f16")):
            yield Product(8, 4, (d, "f16", "f16", c), layouts)
    for k, kinds in ((8, ("f16", "bf16", "tf32")), (16, ("f16", "bf16")), (4, ("tf32",))):
        for kind in kinds:
            yield Product(16, k, ("f32", kind, kind, "f32"))
        if "f16" in kinds:
            yield Product(16, k, ("f16",) * 4)
    for k, a, b in product((16, 32), FP8, FP8):
        for d in ("f16", "f32"):
            yield Product(16, k, (d, a, b, d))
    for kinds, shapes in (
        (("s8", "u8"), ((8, 16), (16, 16), (16, 32))),
        (("s4", "u4"), ((8, 32), (16, 32), (16, 64))),
    ):
        for (m, k), a, b in product(shapes, kinds, kinds):
            yield Product(m, k, ("s32", a, b, "s32"))
            if a != b:
                yield Product(m, k, ("s32", a, b, "s32"), extra=".satfinite")
    for (m, k), operation in product(((8, 128), (16, 128), (16, 256)), ("xor", "and")):
        yield Product(m, k, ("s32", "b1", "b1", "s32"), behind=f".{operation}.popc")
    for kind, k in (("f16", 16), ("bf16", 16), ("tf32", 8), ("e4m3", 32)):
        yield Product(16, k, ("f32", kind, kind, "f32"), random=True)
    yield Product(16, 16, ("f16",) * 4, random=True)


def _sparse() -> Iterator[Product]:
    halves = (("f16",) * 4, ("f32", "f16", "f16", "f32"), ("f32", "bf16", "bf16", "f32"))
    ordered = "mma.sp::ordered_metadata"
    for types in halves:
        for selector in range(4):
            yield Product(16, 16, types, sparse=ordered, selector=selector)
        for selector in range(2):
            yield Product(16, 32, types, sparse=ordered, selector=selector)
    tf32 = ("f32", "tf32", "tf32", "f32")
    for k, selectors in ((8, 4), (16, 2)):
        for selector in range(selectors):
            yield Product(16, k, tf32, sparse=ordered, selector=selector)
    for kinds, few, many in ((("s8", "u8"), 32, 64), (("s4", "u4"), 64, 128)):
        for a, b in product(kinds, kinds):
            types = ("s32", a, b, "s32")
            extra = ".satfinite" if kinds[0] == "s4" else ""
            for selector in range(2):
                yield Product(16, few, types, extra=extra, sparse=ordered, selector=selector)
            yield Product(16, many, types, extra=extra, sparse=ordered)
    for a, b in product(FP8, FP8):
        yield Product(16, 64, ("f32", a, b, "f32"), sparse=ordered)
    yield Product(16, 32, halves[1], sparse="mma.sp", selector=1)
    yield Product(16, 64, ("s32", "s8", "s8", "s32"), sparse="mma.sp")
    yield Product(16, 32, halves[2], sparse=ordered, random=True)


WMMA = {
    # type of A and B, of C and D, shape: registers of A, B and C
    ("f16", "f32", "m16n16k16"): (8, 8, 8),
    ("f16", "f16", "m32n8k16"): (8, 8, 4),
    ("f16", "f32", "m8n32k16"): (8, 8, 8),
    ("bf16", "f32", "m16n16k16"): (4, 4, 8),
    ("bf16", "f32", "m32n8k16"): (8, 2, 8),
    ("tf32", "f32", "m16n16k8"): (4, 4, 8),
    ("s8", "s32", "m16n16k16"): (2, 2, 8),
    ("u8", "s32", "m8n32k16"): (1, 4, 8),
}


def _wmma() -> Iterator[Program]:
    """Loads, the product, and a store; fragments themselves are opaque."""
    for (kind, cell, shape), (na, nb, nc) in WMMA.items():
        m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
        for a_layout, b_layout, d_layout in (("row", "col", "row"), ("col", "row", "col")):
            name = f"warp_mma/wmma.{shape}.{kind}.{cell}.{a_layout}.{b_layout}.{d_layout}"
            lead = [
                k + 8 if a_layout == "row" else m + 8,
                k + 8 if b_layout == "col" else n + 8,
                n + 8 if d_layout == "row" else m + 8,
            ]
            if kind in ("s8", "u8"):
                lead[:2] = [x + 8 for x in lead[:2]]
            rows = [m if a_layout == "row" else k, n if b_layout == "col" else k]
            rows.append(m if d_layout == "row" else n)
            fragments = [
                "{" + ", ".join(f"%w{at + i}" for i in range(count)) + "}"
                for at, count in ((0, na), (10, nb), (20, nc), (30, nc))
            ]
            prefix = "sync.aligned"
            body = f"""
wmma.load.a.{prefix}.{a_layout}.{shape}.global.{kind} {fragments[0]}, [%a], {lead[0]};
wmma.load.b.{prefix}.{b_layout}.{shape}.global.{kind} {fragments[1]}, [%b], {lead[1]};
wmma.load.c.{prefix}.{d_layout}.{shape}.global.{cell} {fragments[2]}, [%c], {lead[2]};
wmma.mma.{prefix}.{a_layout}.{b_layout}.{shape}.{_wmma_types(kind, cell)}
  {fragments[3]}, {fragments[0]}, {fragments[1]}, {fragments[2]};
wmma.store.d.{prefix}.{d_layout}.{shape}.global.{cell} [%out], {fragments[3]}, {lead[2]};"""
            size = 2 if cell == "f16" else 4
            extent = rows[2] * lead[2]
            cells = (below(f"{name}/c", extent, 65) - 32).astype(np.float64)
            c = cells.astype(np.int32).view(np.uint8) if cell == "s32" else encode(cells, cell)
            words = [-(-rows[i] * lead[i] * BITS[kind] // 1024) for i in range(2)]
            args = [
                ("out", result(extent * size)),
                ("a", Array(_values(f"{name}/a", kind, words[0], random=False))),
                ("b", Array(_values(f"{name}/b", kind, words[1], random=False))),
                ("c", Array(c)),
            ]
            yield kernel(name, body, args, declarations=".reg .b32 %w<64>;", version="8.4")


def _wmma_types(kind: str, cell: str) -> str:
    return f"{cell}.{cell}" if kind == "f16" else f"{cell}.{kind}.{kind}.{cell}"


def programs() -> Iterator[Program]:
    """All of the family."""
    for group in (_dense, _sparse):
        for p in group():
            yield _program(p)
    yield from _wmma()
