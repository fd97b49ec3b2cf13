"""atom and red: every operation and type on an address a lane, and contended sums."""

from collections.abc import Iterator

import numpy as np
from tests.silicon.programs.build import kernel, result
from tests.silicon.programs.case import Array, Bytes, Program
from tests.silicon.programs.values import encode, integers, normals, random_bytes, typed

SCALARS = (
    *(("add", t) for t in ("u32", "s32", "u64", "f32", "f64")),
    *((op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64")),
    ("inc", "u32"),
    ("dec", "u32"),
    *((op, t) for op in ("and", "or", "xor", "exch") for t in ("b32", "b64")),
    ("add.noftz", "f16"),
    ("add.noftz", "f16x2"),
    ("add.noftz", "bf16"),
    ("add.noftz", "bf16x2"),
)
VECTORS = (
    ("add.v2.f32", "f32", 2),
    ("add.v4.f32", "f32", 4),
    *((f"{op}.noftz.v{n}.{t}", t, n) for op in ("add", "min", "max") for t in ("f16", "bf16")
      for n in (2, 4, 8)),
    *((f"{op}.noftz.v{n}.{t}x2", t, 2 * n) for op in ("add", "max") for t in ("f16", "bf16")
      for n in (2, 4)),
)  # fmt: skip
SIZE = {"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4}


CONTENDED = (
    ("add", "u32"), ("min", "s32"), ("max", "u32"), ("xor", "b32"), ("and", "b32"), ("or", "b32"),
    ("add", "f32"), ("inc", "u32"),
)  # fmt: skip


def _size(kind: str) -> int:
    return SIZE.get(kind) or int(kind[1:]) // 8


def _memory(label: str, kind: str) -> Array:
    return Array(typed(label, kind, 32), recorded=True)


def _at(space: str, size: int) -> str:
    """%x1: the lane's address of `mem`, copied to shared memory first if that is the space."""
    bits = 8 * size
    temporary = {16: "%h9", 32: "%r9", 64: "%x9"}[bits]
    body = f"mul.lo.u32 %r0, %t, {size}; cvt.u64.u32 %x0, %r0; add.u64 %x1, %mem, %x0;"
    if space == "shared":
        body += f"""add.u32 %r1, %s, %r0; ld.global.b{bits} {temporary}, [%x1];
            st.shared.b{bits} [%r1], {temporary};"""
    return body


def _back(space: str, size: int) -> str:
    if space == "global":
        return ""
    bits = 8 * size
    temporary = {16: "%h9", 32: "%r9", 64: "%x9"}[bits]
    return f"ld.shared.b{bits} {temporary}, [%r1]; st.global.b{bits} [%x1], {temporary};"


def _one_address_a_lane() -> Iterator[Program]:
    for space in ("global", "shared"):
        address = "%x1" if space == "global" else "%r1"
        for op, kind in SCALARS:
            size = _size(kind)
            letter = {2: "h", 4: "r", 8: "x"}[size]
            load = f"""add.u64 %x2, %in, %x0; ld.global.b{8 * size} %{letter}10, [%x2];
                add.u64 %x3, %out, %x0;"""
            name = f"atomics/atom.{space}.{op}.{kind}"
            arrays = [("out", result(32 * size)), ("mem", _memory(f"{name}/mem", kind))]
            arrays.append(("in", Array(typed(f"{name}/in", kind, 32))))
            action = f"""atom.{space}.{op}.{kind} %{letter}11, [{address}], %{letter}10;
                st.global.b{8 * size} [%x3], %{letter}11;"""
            body = _at(space, size) + load + action + _back(space, size)
            yield kernel(name, body, arrays, smem=1024)
            if op == "exch":
                continue
            name = f"atomics/red.{space}.{op}.{kind}"
            arrays = [("mem", _memory(f"{name}/mem", kind))]
            arrays.append(("in", Array(typed(f"{name}/in", kind, 32))))
            load = f"add.u64 %x2, %in, %x0; ld.global.b{8 * size} %{letter}10, [%x2];"
            action = f"red.relaxed.gpu.{space}.{op}.{kind} [{address}], %{letter}10;"
            if space == "global":
                body = _at(space, size) + load + action
                yield kernel(name, body, arrays)


def _cas() -> Iterator[Program]:
    for space in ("global", "shared"):
        address = "%x1" if space == "global" else "%r1"
        for size in (2, 4, 8):
            letter, bits = {2: "h", 4: "r", 8: "x"}[size], 8 * size
            name = f"atomics/atom.{space}.cas.b{bits}"
            memory = random_bytes(name, 32 * size)
            compare = memory.reshape(32, size).copy()
            compare[::3] ^= 1
            body = (
                _at(space, size)
                + f"""
                add.u64 %x2, %in, %x0; ld.global.b{bits} %{letter}10, [%x2];
                add.u64 %x3, %cmp, %x0; ld.global.b{bits} %{letter}12, [%x3];
                atom.acq_rel.gpu.{space}.cas.b{bits} %{letter}11, [{address}],
                %{letter}12, %{letter}10;
                add.u64 %x4, %out, %x0; st.global.b{bits} [%x4], %{letter}11;
                """
                + _back(space, size)
            )
            arrays = [
                ("out", result(32 * size)),
                ("mem", Array(memory, recorded=True)),
                ("in", Array(random_bytes(name + "/in", 32 * size))),
                ("cmp", Array(compare.reshape(-1))),
            ]
            yield kernel(name, body, arrays, smem=1024)
    for op in ("cas", "exch"):
        name = f"atomics/atom.global.{op}.b128"
        memory = random_bytes(name, 512)
        compare = memory.reshape(32, 16).copy()
        compare[::3, 9] ^= 1
        operands = "old, [%x1], want, new" if op == "cas" else "old, [%x1], new"
        body = f"""mad.wide.u32 %x1, %t, 16, %mem; mad.wide.u32 %x2, %t, 16, %in;
            mad.wide.u32 %x3, %t, 16, %cmp; mad.wide.u32 %x4, %t, 16, %out;
            ld.global.b128 new, [%x2]; ld.global.b128 want, [%x3];
            atom.global.{op}.b128 {operands}; st.global.b128 [%x4], old;"""
        arrays = [
            ("out", result(512)),
            ("mem", Array(memory, recorded=True)),
            ("in", Array(random_bytes(name + "/in", 512))),
            ("cmp", Array(compare.reshape(-1))),
        ]
        yield kernel(name, body, arrays, declarations=".reg .b128 old, want, new;", version="8.4")


def _vectors() -> Iterator[Program]:
    for op, kind, count in VECTORS:
        for opcode in ("atom", "red"):
            size = count * (4 if kind == "f32" else 2)
            operation, _, rest = op.partition(".")
            packed = op.endswith("x2")
            n = int(op.split(".v")[1][0])
            bits = 32 if packed or kind == "f32" else 16
            letter = "r" if bits == 32 else "h"
            old = ", ".join(f"%{letter}{i}" for i in range(10, 10 + n)) if bits == 32 else ""
            old = old or ", ".join(f"%h{i}" for i in range(n))
            new = ", ".join(f"%{letter}{30 + i}" if bits == 32 else f"%h{10 + i}" for i in range(n))
            loads = "".join(
                f"ld.global.b{bits} {r}, [%x2+{i * bits // 8}];"
                for i, r in enumerate(new.split(", "))
            )
            stores = "".join(
                f"st.global.b{bits} [%x3+{i * bits // 8}], {r};"
                for i, r in enumerate(old.split(", "))
            )
            # the vector stands between the operation's modifiers and the type
            full = f"{opcode}.global.{operation}.{rest}"
            if ".noftz." in full:
                full = full.replace(".noftz.", ".").replace(f".v{n}.", f".noftz.v{n}.")
            what = f"{{{old}}}, [%x1], {{{new}}}" if opcode == "atom" else f"[%x1], {{{new}}}"
            body = f"""mad.wide.u32 %x1, %t, {size}, %mem; mad.wide.u32 %x2, %t, {size}, %in;
                {loads} {full} {what};"""
            name = f"atomics/{opcode}.{op}"
            data = [typed(f"{name}/{i}", kind, 32 * count) for i in range(2)]
            arrays = [("mem", Array(data[0], recorded=True)), ("in", Array(data[1]))]
            if opcode == "atom":
                body += f"mad.wide.u32 %x3, %t, {size}, %out;" + stores
                arrays.insert(0, ("out", result(32 * size)))
            yield kernel(name, body, arrays)


def _contended() -> Iterator[Program]:
    """Many lanes on few addresses: the sum does not depend on the order."""
    for space in ("global", "shared"):
        for op, kind in CONTENDED:
            name = f"atomics/contended.{space}.{op}.{kind}"
            values: Bytes = integers(name, 32, 128)
            if kind == "f32":
                values = encode(np.round(normals(name, "f32", 128).view("f4") * 64.0), "f32")
            start = np.full(8, -1 if op == "and" else 5 if op == "inc" else 0, np.int32)
            address = "%x1" if space == "global" else "%r1"
            read = "ld.shared.u32 %r5, [%r1]; st.global.u32 [%x1], %r5;"
            body = f"""and.b32 %r2, %t, 7; mad.wide.u32 %x1, %r2, 4, %mem;
                mad.lo.u32 %r1, %r2, 4, %s; ld.global.u32 %r3, [%x1]; bar.sync 0;
                st.shared.u32 [%r1], %r3; bar.sync 0;
                mad.wide.u32 %x2, %t, 4, %in; ld.global.u32 %r4, [%x2];
                {"mov.u32 %r4, 9;" if op == "inc" else ""}
                red.{space}.{op}.{kind} [{address}], %r4; bar.sync 0;
                {read if space == "shared" else ""}"""
            arrays = [("mem", Array(start.view(np.uint8), recorded=True)), ("in", Array(values))]
            yield kernel(name, body, arrays, block=128, smem=64)


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _one_address_a_lane()
    yield from _cas()
    yield from _vectors()
    yield from _contended()
