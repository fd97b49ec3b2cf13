"""tcgen05.mma with block scaling: mxf8f6f4, mxf4 and mxf4nvf4, and where scale factors lie."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tensor_cores import mma_run
from tests.tensor_cores import tensor_core_run as run
from tests.tensor_cores.mma_run import Case

from ptxemu.errors import ExecutionError

SFA, SFB = 300, 320
"""Columns of the scale factors in TMEM."""


def write_scales(cta: Any, column: int, codes: NDArray[np.uint8], id_: int, halves: bool) -> None:
    """Scale factors (rows, count): row r on lane r % 32 of every 32 lanes, column r / 32, from byte
    `id_` on; with two halves, rows from the middle on lie on lanes 64 to 127."""
    rows = len(codes)
    half = rows // 2 if halves else rows
    cells = cta.tmem.view(np.uint8).reshape(128, 512, 4)
    for row in range(rows):
        group, within = divmod(row, half)
        copies = [64 * group, 64 * group + 32] if halves else [0, 32, 64, 96]
        for lane in copies:
            where = cells[lane + within % 32, column + within // 32]
            where[id_ : id_ + codes.shape[1]] = codes[row]


def ue8m0(exponents: NDArray[Any]) -> NDArray[np.uint8]:
    """Powers of two as ue8m0."""
    return (exponents + 127).astype(np.uint8)


def nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two 4-bit codes a byte, the first one low."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def scaled(
    kind: str,
    m: int,
    n: int,
    group: int,
    count: int,
    suffix: str,
    scale_type: str,
    *,
    ids: tuple[int, int] = (0, 0),
    spoil: int | None = None,
    in_tmem: bool = False,
) -> tuple[run.Recorder, NDArray[Any], NDArray[Any]]:
    """Run one instruction on random data; gives D and what it should be."""
    rng = np.random.default_rng(11)
    k = 32 if kind == "mxf8f6f4" else 64
    a, b = run.integers(rng, (m, k), 3), run.integers(rng, (n, k), 3)
    if kind == "mxf8f6f4":
        a_raw, b_raw = run.codes(a, "e4m3"), run.codes(b, "e5m2")
        atype, btype = "e4m3", "e5m2"
    else:
        atype = btype = "e2m1"
        a_raw, b_raw = nibbles(run.codes(a, "e2m1")), nibbles(run.codes(b, "e2m1"))
    if scale_type == "ue8m0":
        sa, sb = rng.integers(-3, 4, (m, count)), rng.integers(-3, 4, (n, count))
        sa_codes, sb_codes, sa, sb = ue8m0(sa), ue8m0(sb), 2.0**sa, 2.0**sb
    else:
        sa, sb = rng.integers(1, 8, (m, count)) / 2, rng.integers(1, 8, (n, count)) / 2
        sa_codes, sb_codes = run.codes(sa, "e4m3"), run.codes(sb, "e4m3")
    expected = (a * np.repeat(sa, k // count, 1)) @ (b * np.repeat(sb, k // count, 1)).T
    case = Case(m, n, f"{kind}.block_scale{suffix}", group=group, a_in_tmem=in_tmem,
                before_enable=", [%r8], [%r9]")  # fmt: skip
    rows = m // group

    def setup(cta: Any) -> None:
        write_scales(cta, SFA, sa_codes[cta.rank * rows :][:rows], ids[0], False)
        write_scales(cta, SFB, sb_codes, ids[1], group == 2 and m == 128)
        if spoil is not None:
            cta.tmem[spoil, SFB] ^= 0x01010101

    idesc = mma_run.scaled_descriptor(
        kind=kind, m=m, n=n, atype=atype, btype=btype, scale_type=scale_type,
        scale_factor_a_id=ids[0], scale_factor_b_id=ids[1],
    )  # fmt: skip
    extra = f"mov.b32 %r8, {SFA}; mov.b32 %r9, {SFB};"
    recorder = mma_run.multiply(case, a_raw, b_raw, setup=setup, extra=extra, idesc=idesc)
    return recorder, mma_run.read_d(recorder, case), expected


@pytest.mark.parametrize(("m", "group"), [(128, 1), (128, 2), (256, 2)])
@pytest.mark.parametrize("in_tmem", [False, True])
@pytest.mark.parametrize(
    ("kind", "count", "suffix", "scale_type"),
    [
        ("mxf8f6f4", 1, "", "ue8m0"),
        ("mxf8f6f4", 1, ".block32", "ue8m0"),
        ("mxf4", 2, "", "ue8m0"),
        ("mxf4nvf4", 2, ".scale_vec::2X", "ue8m0"),
        ("mxf4nvf4", 4, ".block16", "ue4m3"),
        ("mxf4nvf4", 4, ".scale_vec::4X", "ue8m0"),
    ],
)
def test_every_scaled_kind(
    kind: str, count: int, suffix: str, scale_type: str, m: int, group: int, in_tmem: bool
) -> None:
    recorder, d, expected = scaled(kind, m, 64, group, count, suffix, scale_type, in_tmem=in_tmem)
    assert np.array_equal(d, expected)
    assert recorder.complaints == []


@pytest.mark.parametrize("ids", [(1, 3), (3, 0)])
def test_scale_factor_ids_select_the_byte(ids: tuple[int, int]) -> None:
    _, d, expected = scaled("mxf8f6f4", 128, 48, 1, 1, "", "ue8m0", ids=ids)
    assert np.array_equal(d, expected)


def test_scale_factor_ids_select_the_half_word() -> None:
    _, d, expected = scaled("mxf4", 128, 256, 1, 2, "", "ue8m0", ids=(2, 0))
    assert np.array_equal(d, expected)


@pytest.mark.parametrize("lane", [0, 33, 96])
def test_scale_factors_must_be_in_every_group_of_lanes(lane: int) -> None:
    recorder, _, _ = scaled("mxf8f6f4", 128, 64, 1, 1, "", "ue8m0", spoil=lane)
    assert recorder.codes == ["scale-factor-copies"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("mxf8f6f4", 128, 64, 1, 1, "", "ue4m3"), "no .scale_vec::1X with ue4m3"),
        (("mxf4nvf4", 128, 64, 1, 2, ".scale_vec::2X", "ue4m3"), "no .scale_vec::2X with ue4m3"),
        (("mxf4", 128, 20, 1, 2, "", "ue8m0"), "multiple of 8"),
        (("mxf4", 256, 64, 1, 2, "", "ue8m0"), "M = 128; got 256"),
    ],
)
def test_limits_of_block_scaling(arguments: Any, match: str) -> None:
    with pytest.raises((ExecutionError, ValueError), match=match):
        scaled(*arguments)


def test_ids_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ExecutionError, match="scale factor A ID 1"):
        scaled("mxf4", 128, 64, 1, 2, "", "ue8m0", ids=(1, 0))


def test_k_96_needs_another_gpu() -> None:
    idesc = mma_run.scaled_descriptor(
        kind="mxf4", m=128, n=64, atype="e2m1", btype="e2m1", scale_type="ue8m0", k_is_96=True
    )
    issue = f"""mov.b32 %r6, 0; mov.b32 %r7, {mma_run.signed(idesc)};
      mov.b64 %rd0, {1 << 46};
      tcgen05.mma.cta_group::1.kind::mxf4.block_scale [%r6], %rd0, %rd0, %r7, [%r6], [%r6], %p3;"""
    with pytest.raises(ExecutionError, match="K = 96 needs sm_103a"):
        run.launch(mma_run.program(issue))
