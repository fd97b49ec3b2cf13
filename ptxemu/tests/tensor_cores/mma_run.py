"""Programs with tcgen05.mma: operands in shared memory or TMEM, D read back from TMEM.

Which cell holds D[m, n] is written down a second time from the ISA's figures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.tensor_cores import tensor_core_run as run

from ptxemu.descriptors import (
    BlockScaledInstructionDescriptor,
    InstructionDescriptor,
    Swizzle,
    Tcgen05Descriptor,
)
from ptxemu.sched.policy import Policy

A_AT, B_AT = run.DATA, run.DATA + 64 * 1024
MODES = {
    "none": Swizzle.NONE,
    "32B": Swizzle.B32,
    "64B": Swizzle.B64,
    "128B": Swizzle.B128,
    "128B_atom_32B": Swizzle.B128_ATOM_32B,
}


def program(issue: str, *, group: int = 1, commit: bool = True, release: bool = True) -> str:
    """`issue` runs in one thread, of the even CTA for cta_group::2, after the allocation."""
    cluster = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if group == 2 else ""
    arrive = "mbarrier::arrive::one.shared::cluster"
    many = f"tcgen05.commit.cta_group::2.{arrive}.multicast::cluster.b64 [%r1], %h0;"
    one = f"tcgen05.commit.cta_group::1.{arrive}.b64 [%r1];"
    committing = (many if group == 2 else one) if commit else ""
    waiting = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra WAIT;"
    free = f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r5, 512;"
    return f"""
.visible .entry k()
{{
  .reg .b32 %r<16>; .reg .b64 %rd<4>; .reg .pred %p<6>; .reg .b16 %h<2>;
  .shared .align 8 .b64 bar; .shared .align 4 .b32 hold; mov.u32 %r0, hold;
  tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r0], 512;
  ld.shared.u32 %r5, [%r0]; mov.u32 %r1, bar; mov.u32 %r2, %tid.x; mov.u32 %r3, %cluster_ctarank;
  mov.b16 %h0, 3; or.b32 %r4, %r2, %r3; setp.eq.u32 %p0, %r2, 0; setp.eq.u32 %p1, %r4, 0;
  @%p0 mbarrier.init.shared::cta.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
  {cluster}
  @!%p1 bra SKIP;
  {issue}
  {committing}
SKIP:
  {waiting if commit else ""}
  {cluster}
  {free if release else ""}
  ret;
}}
"""


@dataclass
class Case:
    """One matrix product as a sequence of instructions along K."""

    m: int
    n: int
    kind: str = "f16"
    dtype: str = "f32"
    atype: str = "bf16"
    btype: str = "bf16"
    group: int = 1
    ws: bool = False
    a_major: str = "K"
    b_major: str = "K"
    a_mode: str = "128B"
    b_mode: str = "128B"
    a_in_tmem: bool = False
    d_address: int = 0
    a_address: int = 256
    negate_a: bool = False
    negate_b: bool = False
    saturate: bool = False
    accumulate_first: bool = False
    tail: str = ""
    """Operands behind enable-input-d."""
    before_enable: str = ""
    """Operands between the instruction descriptor and enable-input-d."""

    @property
    def descriptor(self) -> InstructionDescriptor:
        """The instruction descriptor."""
        return InstructionDescriptor(
            self.kind, self.m, self.n, self.dtype, self.atype, self.btype, negate_a=self.negate_a,
            negate_b=self.negate_b, transpose_a=self.a_major == "MN",
            transpose_b=self.b_major == "MN", saturate=self.saturate,
        )  # fmt: skip


def cell(case: Case, m: int, n: int) -> tuple[int, int, int]:
    """CTA of the pair, lane and column of D[m, n] (figures of "Data Path Layout Organization")."""
    cta, row = divmod(m, case.m // case.group)
    lane0, column0 = case.d_address >> 16, case.d_address & 0xFFFF
    if case.group == 2 and case.m == 128:  # B: columns in two halves, 64 lanes each
        half, column = divmod(n, case.n // 2)
        return cta, row + 64 * half, column0 + column
    if case.ws and case.m == 64:  # E
        half, column = divmod(n, case.n // 2)
        return cta, row + 64 * half, column0 + column
    if case.ws and case.m == 32:  # G
        quarter, column = divmod(n, case.n // 4)
        return cta, row + 32 * quarter, column0 + column
    if case.m == 64:  # F: 16 rows on every 32 lanes
        return cta, lane0 + row % 16 + 32 * (row // 16), column0 + n
    return cta, row, column0 + n


def read_d(recorder: run.Recorder, case: Case) -> NDArray[Any]:
    """D (m, n) from TMEM."""
    words = np.zeros((case.m, case.n), np.uint32)
    for m in range(case.m):
        for n in range(case.n):
            cta, lane, column = cell(case, m, n)
            words[m, n] = recorder.ctas[cta].tmem[lane, column]
    if case.dtype == "f16":
        return words.astype(np.uint16).view(np.float16)
    return words.view({"f32": np.float32, "s32": np.int32}[case.dtype])


def write_d(cta: Any, value: float, dtype: str = "f32") -> None:
    """The same number everywhere in TMEM."""
    number = np.array([value], {"f32": np.float32, "s32": np.int32, "f16": np.float16}[dtype])
    cta.tmem[:] = number.view(np.uint16 if dtype == "f16" else np.uint32)[0]


def desc(placed: run.Placed) -> int:
    """A shared memory descriptor."""
    return Tcgen05Descriptor(
        placed.start, placed.leading, placed.stride, MODES[placed.mode]
    ).encode()


def matrix_steps(
    matrix: NDArray[Any], at: int, mode: str, major: str, steps: int
) -> list[run.Placed]:
    """The descriptors' fields of each step along K."""
    placed = run.place(np.zeros(256 * 1024, np.uint8), matrix, at, mode, major)
    mn, k = matrix.shape
    per_step = k // steps
    found = []
    for step in range(steps):
        if mode == "none" and major == "K":
            bytes_per_step = per_step * matrix.dtype.itemsize
            moved = placed.start + step * bytes_per_step // 16 * placed.leading
            found.append(run.Placed(moved, placed.leading, placed.stride, mode, placed.end))
        else:
            lines = mn if major == "K" else k
            step_bytes = step * per_step * matrix.dtype.itemsize
            found.append(run.k_step(placed, step_bytes, lines, major, step * per_step))
    return found


def multiply(
    case: Case,
    a: NDArray[Any],
    b: NDArray[Any],
    *,
    steps: int = 1,
    policy: Policy | None = None,
    setup: Callable[[Any], None] = lambda cta: None,
    extra: str = "",
    idesc: int | None = None,
    metadata: str = "",
) -> run.Recorder:
    """D = A * B: A (m, k) and B (n, k) are codes of whole-byte types, cut between the CTAs.

    `metadata`: the operand of a sparse product. `idesc`: in place of the case's own.
    """
    parts_a = np.split(a, case.group)
    parts_b = np.split(b, case.group)

    def fill(cta: Any) -> None:
        setup(cta)
        if case.a_in_tmem:
            fill_a_tmem(cta, case, parts_a[cta.rank])
        else:
            run.place(cta.shared, parts_a[cta.rank], A_AT, case.a_mode, case.a_major)
        run.place(cta.shared, parts_b[cta.rank], B_AT, case.b_mode, case.b_major)

    if case.a_in_tmem:
        words = a.shape[1] * a.dtype.itemsize // 4 // steps
        a_operands = ["[%r10]"] * steps
        a_values = [case.a_address + words * step for step in range(steps)]
    else:
        a_operands = ["%rd0"] * steps
        a_values = [
            desc(p) for p in matrix_steps(parts_a[0], A_AT, case.a_mode, case.a_major, steps)
        ]
    b_values = [desc(p) for p in matrix_steps(parts_b[0], B_AT, case.b_mode, case.b_major, steps)]
    idesc = case.descriptor.encode() if idesc is None else idesc
    lines = [f"mov.b32 %r6, {case.d_address}; mov.b32 %r7, {signed(idesc)};", extra]
    for step in range(steps):
        enable = "-1" if step or case.accumulate_first else "0"
        lines.append(
            f"mov.b32 %r10, {a_values[step] & 0xFFFFFFFF}; mov.b64 %rd0, {a_values[step]};"
            f"mov.b64 %rd1, {b_values[step]}; mov.pred %p3, {enable};"
            f"tcgen05.mma{'.ws' if case.ws else ''}{'.sp' if metadata else ''}"
            f".cta_group::{case.group}.kind::{case.kind} [%r6], {a_operands[step]}, %rd1, "
            f"{metadata}%r7{case.before_enable}, %p3{case.tail};"
        )
    text = program("\n  ".join(lines), group=case.group)
    return run.launch(text, cluster=case.group, fill=fill, policy=policy)


def fill_a_tmem(cta: Any, case: Case, a: NDArray[Any]) -> None:
    """Rows of A on the lanes of D's rows, packed along K; twice or four times where D's columns
    are cut."""
    words = np.ascontiguousarray(a).view(np.uint32)
    column = case.a_address & 0xFFFF
    for m in range(case.m // case.group):
        for n in range(case.n):
            _, lane, _ = cell(case, m, n)
            cta.tmem[lane, column : column + words.shape[1]] = words[m]


def scaled_descriptor(**fields: Any) -> int:
    """A block-scaled instruction descriptor."""
    return BlockScaledInstructionDescriptor(**fields).encode()


def signed(word: int) -> int:
    """A word as PTX's `mov.b32` takes it."""
    return word - (1 << 32) if word >> 31 else word
