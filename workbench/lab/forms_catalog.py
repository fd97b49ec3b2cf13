"""The operand forms of the Blackwell backward: those of its plan, then the reference design's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashdsa.dsl.umma import (
    SharedOperand,
    SharedTile,
    TilePart,
    TmemOperand,
    UmmaProduct,
)
from workbench.lab.kernels.operand_forms.sm100.plan import FormPlan

PLAN = "plan"
KIB = 1024


@dataclass(frozen=True)
class OperandForm:
    """A form that somebody wants to use.

    Attributes:
        name: on the command line.
        users: "plan" or "reference", and for which product.
    """

    name: str
    title: str
    users: str
    plan: FormPlan

    @property
    def is_of_plan(self) -> bool:
        """Whether the recommended plan uses it."""
        return self.users.startswith(PLAN)


def _k_major(*pieces: TilePart, extent: int) -> SharedOperand:
    return SharedOperand("K", extent, pieces)


def _mn_major(*pieces: TilePart, extent: int) -> SharedOperand:
    return SharedOperand("MN", extent, pieces)


@cache
def catalog() -> tuple[OperandForm, ...]:
    """All of them, in the order of the table."""
    return (*_of_plan(), *_pairs(), *_weight_stationary(), *_ways_into_tmem())


def form_named(name: str) -> OperandForm:
    """One form.

    Raises:
        ValueError: there is none of this name.
    """
    for form in catalog():
        if form.name == name:
            return form
    raise ValueError(f"form: expected one of {', '.join(f.name for f in catalog())}; got {name!r}")


def _of_plan() -> tuple[OperandForm, ...]:
    q, q_rope = SharedTile("q", 0, 128, 64, 128), SharedTile("q_rope", 16 * KIB, 128, 64, 128)
    kv, kv_rope = (
        SharedTile("kv", 32 * KIB, 32, 64, 128),
        SharedTile("kv_rope", 36 * KIB, 32, 32, 64),
    )
    scores = UmmaProduct(
        128,
        32,
        _k_major(TilePart(q, 64), extent=128),
        _k_major(TilePart(SharedTile("kv", 16 * KIB, 32, 64, 128), 64), extent=32),
    )
    scores_rope = UmmaProduct(
        128,
        32,
        _k_major(TilePart(q, 64), TilePart(q_rope, 32, column=32), extent=128),
        _k_major(TilePart(kv, 64), TilePart(kv_rope, 32), extent=32),
    )
    keys = SharedTile("kv", 0, 32, 64, 128)
    grads = UmmaProduct(128, 32, TmemOperand(32, 64), _k_major(TilePart(keys, 64), extent=32))
    wide = SharedTile("kv", 0, 32, 256, 128)
    query = UmmaProduct(128, 256, TmemOperand(256, 32), _mn_major(TilePart(wide, 32), extent=256))
    narrow = SharedTile("kv_rope", 0, 32, 32, 64)
    rope = UmmaProduct(128, 32, TmemOperand(32, 32), _mn_major(TilePart(narrow, 32), extent=32))
    do, s = SharedTile("dO", 0, 128, 128, 128), SharedTile("s", 32 * KIB, 128, 32, 64)
    dkv = UmmaProduct(
        128,
        32,
        _mn_major(TilePart(do, 128), extent=128),
        _mn_major(TilePart(s, 128), extent=32),
    )
    q64, ds = SharedTile("q_rope", 0, 128, 64, 128), SharedTile("ds", 16 * KIB, 128, 32, 64)
    dkv_rope = UmmaProduct(
        64,
        32,
        _mn_major(TilePart(q64, 128), extent=64),
        _mn_major(TilePart(ds, 128), extent=32),
    )
    return (
        OperandForm(
            "ss-m128-n32",
            "SS M=128 N=32, K-major SW128",
            "plan: P = Q K^T",
            FormPlan(scores),
        ),
        OperandForm(
            "ss-m128-n32-tail",
            "SS M=128 N=32, last K steps: half of A's SW128 atom, B SW64",
            "plan: P, RoPE dims of one CTA",
            FormPlan(scores_rope),
        ),
        OperandForm(
            "ts-m128-n32",
            "TS M=128 N=32, A stored with thread = row; B K-major",
            "plan: dP = dO V^T",
            FormPlan(grads, "rows"),
        ),
        OperandForm(
            "ts-m128-n256-mn128",
            "TS M=128 N=256, A stored with thread = row; B MN-major SW128",
            "plan: dQ = dS K",
            FormPlan(query, "rows"),
        ),
        OperandForm(
            "ts-m128-n32-mn64",
            "TS M=128 N=32, A stored with thread = row; B MN-major SW64",
            "plan: dQ_rope = dS K",
            FormPlan(rope, "rows"),
        ),
        OperandForm(
            "ss-m128-n32-amn",
            "SS M=128 N=32, A MN-major SW128, B MN-major SW64",
            "plan: dKV = S^T dO",
            FormPlan(dkv),
        ),
        OperandForm(
            "ss-m64-n32-amn",
            "SS M=64 N=32, A MN-major SW128, B MN-major SW64",
            "plan: dKV_rope = dS^T Q",
            FormPlan(dkv_rope),
        ),
    )


def _pairs() -> tuple[OperandForm, ...]:
    """cta_group::2: each CTA has 64 heads and 16 keys, or all 32 keys of its dims."""
    q, kv = SharedTile("q", 0, 64, 64, 128), SharedTile("kv", 8 * KIB, 16, 64, 128)
    scores = UmmaProduct(
        128,
        32,
        _k_major(TilePart(q, 64), extent=64),
        _k_major(TilePart(kv, 64), extent=16),
        cta_group=2,
    )
    # the reference design's buffer of nine 64-wide chunks: keys 0-15 in chunks 0-3, keys 16-31 in
    # chunks 5-8, and the halves of chunk 4 for the last 32 dims
    buffer = SharedTile("kv", 0, 16, 576, 128)
    query = UmmaProduct(
        128,
        256,
        TmemOperand(128, 32),
        _mn_major(TilePart(buffer, 16), TilePart(buffer, 16, column=320), extent=128),
        cta_group=2,
    )
    rope = UmmaProduct(
        128,
        64,
        TmemOperand(32, 32),
        _mn_major(TilePart(buffer, 16, column=256), TilePart(buffer, 16, column=288), extent=32),
        cta_group=2,
    )
    return (
        OperandForm(
            "pair-ss-m128-n32",
            "2-CTA SS M=128 N=32, K-major",
            "reference: P = Q K^T",
            FormPlan(scores),
        ),
        OperandForm(
            "pair-ts-m128-n256",
            "2-CTA TS M=128 N=128+128, A twice over lane halves; B MN-major SW128",
            "reference: dQ = dS K",
            FormPlan(query, "rows"),
        ),
        OperandForm(
            "pair-ts-m128-n64-half",
            "2-CTA TS M=128 N=32+32, B MN-major: half of an SW128 atom",
            "reference: dQ_rope = dS K",
            FormPlan(rope, "rows"),
        ),
    )


def _weight_stationary() -> tuple[OperandForm, ...]:
    """.ws with 32 keys or 64 heads on M, and M = 64 without it."""
    st32, st64 = SharedTile("s_t", 0, 32, 64, 128), SharedTile("s_t", 0, 64, 64, 128)
    do = SharedTile("dO", 8 * KIB, 64, 256, 128)
    wide = _mn_major(TilePart(do, 64), extent=256)
    do_first, q_first = SharedTile("dO", 0, 64, 256, 128), SharedTile("q_rope", 0, 64, 64, 128)
    keys = SharedTile("kv", 0, 128, 64, 128)
    q, kv = SharedTile("q", 0, 64, 64, 128), SharedTile("kv", 8 * KIB, 32, 64, 128)
    ss32 = UmmaProduct(32, 256, _k_major(TilePart(st32, 64), extent=32), wide, ws=True)
    ss64 = UmmaProduct(64, 256, _k_major(TilePart(st64, 64), extent=64), wide, ws=True)
    ts_b = _mn_major(TilePart(do_first, 64), extent=256)
    ts32 = UmmaProduct(32, 256, TmemOperand(64, 64), ts_b, ws=True)
    narrow = _mn_major(TilePart(q_first, 64), extent=64)
    ts32_narrow = UmmaProduct(32, 64, TmemOperand(32, 64), narrow, ws=True)
    ts64 = UmmaProduct(64, 256, TmemOperand(128, 64), ts_b, ws=True)
    two = _k_major(TilePart(keys, 64), extent=128)
    pair = UmmaProduct(64, 128, TmemOperand(64, 64, distinct=True), two, ws=True)
    plain = UmmaProduct(
        64, 32, _k_major(TilePart(q, 64), extent=64), _k_major(TilePart(kv, 64), extent=32)
    )
    kv_first = SharedTile("kv", 0, 32, 64, 128)
    plain_ts = UmmaProduct(64, 32, TmemOperand(32, 64), _k_major(TilePart(kv_first, 64), extent=32))
    return (
        OperandForm(
            "ws-ss-m32-n256",
            ".ws SS M=32 N=256, A K-major, B MN-major",
            "reference: dKV = S^T dO",
            FormPlan(ss32),
        ),
        OperandForm(
            "ws-ss-m64-n256",
            ".ws SS M=64 N=256, A K-major, B MN-major",
            "reference: dKV, 64 keys",
            FormPlan(ss64),
        ),
        OperandForm(
            "ws-ts-m32-n256",
            ".ws TS M=32 N=256, A in all four lane groups; B MN-major",
            "reference: dKV = S^T dO",
            FormPlan(ts32, "rows"),
        ),
        OperandForm(
            "ws-ts-m32-n64",
            ".ws TS M=32 N=64, A in all four lane groups; B MN-major",
            "reference: dKV_rope = dS^T Q",
            FormPlan(ts32_narrow, "rows"),
        ),
        OperandForm(
            "ws-ts-m64-n256",
            ".ws TS M=64 N=256, A in both lane halves; B MN-major",
            "reference: dQ of one CTA",
            FormPlan(ts64, "rows"),
        ),
        OperandForm(
            "ws-ts-m64-two-a",
            ".ws TS M=64 N=128, two different A: an implicit pair; B K-major",
            "reference: FlashMLA's way",
            FormPlan(pair, "rows"),
        ),
        OperandForm(
            "ss-m64-n32",
            "SS M=64 N=32 without .ws, K-major",
            "reference: P of one CTA",
            FormPlan(plain),
        ),
        OperandForm(
            "ts-m64-n32",
            "TS M=64 N=32 without .ws, B K-major",
            "reference: dP of one CTA",
            FormPlan(plain_ts, "rows"),
        ),
    )


def _ways_into_tmem() -> tuple[OperandForm, ...]:
    """A is the D of another product: exchanged between lane halves, or transposed."""
    q, own = SharedTile("q", 0, 64, 64, 128), SharedTile("kv_own", 8 * KIB, 16, 64, 128)
    buffer = SharedTile("kv", 10 * KIB, 16, 576, 128)
    scores = UmmaProduct(
        128,
        32,
        _k_major(TilePart(q, 64), extent=64),
        _k_major(TilePart(own, 64), extent=16),
        column=144,
        cta_group=2,
    )
    query = UmmaProduct(
        128,
        256,
        TmemOperand(128, 32),
        _mn_major(TilePart(buffer, 16), TilePart(buffer, 16, column=320), extent=128),
        cta_group=2,
    )
    kv, do = SharedTile("kv", 8 * KIB, 32, 64, 128), SharedTile("dO", 12 * KIB, 64, 256, 128)
    per_cta = UmmaProduct(
        64,
        32,
        _k_major(TilePart(q, 64), extent=64),
        _k_major(TilePart(kv, 64), extent=32),
        column=96,
    )
    dkv = UmmaProduct(
        32,
        256,
        TmemOperand(64, 64),
        _mn_major(TilePart(do, 64), extent=256),
        ws=True,
    )
    return (
        OperandForm(
            "pair-ts-exchange",
            "2-CTA TS M=128, A = D of a product after an exchange of lane halves",
            "reference: P -> S -> dQ",
            FormPlan(query, "exchange", scores, 28 * KIB),
        ),
        OperandForm(
            "ws-ts-transpose-st",
            ".ws TS M=32, A = D^T through shared memory, tcgen05.st",
            "reference: P -> S^T -> dKV",
            FormPlan(dkv, "transpose", per_cta, 44 * KIB),
        ),
        OperandForm(
            "ws-ts-transpose-cp",
            ".ws TS M=32, A = D^T through shared memory, tcgen05.cp.warpx4",
            "reference: P -> S^T -> dKV",
            FormPlan(dkv, "copy", per_cta, 44 * KIB),
        ),
    )
