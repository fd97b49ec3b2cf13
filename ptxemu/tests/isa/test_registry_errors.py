"""Instructions with a wrong number of operands are refused by name, not by a crash."""

import pytest
from tests.kernel_run import run

from ptxemu.errors import PtxEmuError


@pytest.mark.parametrize(
    "text",
    [
        "mbarrier.arrive.shared.b64 [%rd1];",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1, %r2, %r3, %r4};",
        "shfl.sync.idx.b32 %r1, %r2;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r3];",
        "tensormap.replace.tile.rank.global.b1024.b32 [%rd1];",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1];",
        "movmatrix.sync.aligned.m8n8.trans.b16 %r1;",
        "redux.sync.add.u32 %r1;",
        "st.global.b32 [%rd1];",
        "atom.global.add.u32 %r1, [%rd1];",
        "elect.sync %r1;",
    ],
)
def test_too_few_operands(text):
    with pytest.raises(PtxEmuError, match=text.split(".")[0]):
        run(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("suld.b.1d.b32.trap %r1, [%rd1, {%r2}];", "textures and surfaces"),
        ("alloca.u64 %rd1, %rd2;", "run-time size"),
        ("red.global.add.f16x2 [%rd1], %r1;", "noftz"),
        (
            "cp.async.bulk.prefetch.tensor.3d.L2.global.im2col::w [%rd1, {%r1, %r1, %r1}];",
            "im2col::w is not",
        ),
    ],
)
def test_what_is_not_emulated_says_so(text, reason):
    with pytest.raises(PtxEmuError, match=reason):
        run(text)
