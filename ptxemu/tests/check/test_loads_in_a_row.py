"""Loads in a row that machine code does and judges: the same run and findings as one by one."""

import random

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from tests.kernel_run import aligned, source

from ptxemu import api, machine_code
from ptxemu.check import Checker

SHARED = 4096
START = """
mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; shl.b32 %r2, %r0, 2; shl.b32 %r3, %r1, 4;
mov.u32 %r4, smem; add.u32 %r5, %r4, %r2; add.u32 %r6, %r4, %r3; mov.u32 %r7, 3;
mov.u32 %r8, %ctaid.x; shl.b32 %r8, %r8, 13; add.u32 %r8, %r8, %r2;
cvt.u64.u32 %rd0, %r8; add.u64 %rd1, %rd_data, %rd0; mov.u64 %rd2, %rd_data;
mov.u32 %r20, 0; mov.u32 %r21, 0; mov.u32 %r22, 0; mov.u32 %r23, 0; mov.u16 %h0, 0;
mov.u32 %r9, 0; mov.f32 %f0, 0f00000000; setp.eq.u32 %p2, %r0, 0; st.shared.u32 [%r5], %r0;
"""
FORMS = (
    (8, "ld.shared.u32 %r20, [%r5+{0}]; add.u32 %r7, %r7, %r20;"),
    (8, "ld.shared.u32 %r21, [%r6+{0}]; xor.b32 %r7, %r7, %r21;"),
    (3, "ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [%r6+{1}];"),
    (2, "ld.shared.u16 %h0, [%r4+{0}]; cvt.u32.u16 %r21, %h0;"),
    (4, "ld.global.u32 %r22, [%rd1+{0}]; add.u32 %r7, %r7, %r22;"),
    (2, "ld.global.v2.u32 {{%r20, %r21}}, [%rd2+{1}];"),
    (2, "ld.global.u32 %r20, [%rd1+65520]; "),  # of two pages of the check
    (2, "@%p0 ld.shared.u32 %r20, [%r4+{0}];"),
    (2, "ex2.approx.ftz.f32 %f0, %f0; add.u32 %r7, %r7, 1;"),
    (3, "st.shared.u32 [%r5+{0}], %r7;"),
    (1, "st.global.u32 [%rd1+{0}], %r7;"),
    (1, "@%p0 st.shared.u32 [%r4+{0}], 1;"),
    (2, "bar.warp.sync -1;"),
)
ORDERS = (
    (6, "bar.sync 0;"),
    (1, "fence.sc.gpu;"),
    (2, "@%p0 ld.acquire.gpu.global.u32 %r20, [%rd2+4096];"),
    (2, "@%p2 st.release.gpu.global.u32 [%rd2+4096], %r7;"),
)


def program(seed):
    """A kernel with loads in a row, some races, shared memory that nobody wrote, and a loop."""
    choose = random.Random(seed)
    weights, forms = zip(*FORMS, *(ORDERS if seed % 4 else ()), strict=True)
    lines = [
        form.format(4 * choose.randrange(16), 16 * choose.randrange(4))
        for form in choose.choices(forms, weights, k=60)
    ]
    body = "\n".join(lines)
    loop = "add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 3;\n@%p1 bra AGAIN;"
    start = f"{START} setp.lt.u32 %p0, %r1, {choose.randrange(33)};"
    return source(f"{start}\nAGAIN:\n{body}\n{loop}", ["data"], shared=SHARED)


class Told(Checker):
    """Counts the loads that come in a row."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.rows = 0
        TOLD.append(self)

    def loaded(self, agent, owner, loads, count):
        self.rows += count > 1
        super().loaded(agent, owner, loads, count)


TOLD: list[Told] = []
MEMORY = aligned(np.zeros(1 << 17, np.uint32), 1 << 16)
"""The same for both cores, as findings name addresses; from the start of a page of the check on."""


def outcome(text, core, monkeypatch, *, cluster):
    monkeypatch.setenv("PTXEMU_CORE", core)
    for name in ("COLD_INSTRUCTIONS", "WARM_INSTRUCTIONS", "NUMPY_SCANS"):
        monkeypatch.setattr(machine_code, name, 0)
    monkeypatch.setattr("ptxemu.check.shadow_memory.ACCESSES_AT_ONCE", 7)
    monkeypatch.setattr("ptxemu.check.shadow_memory.STATES_BEFORE_COMPACTION", 50)
    monkeypatch.setattr(api, "Checker", Told)
    TOLD.clear()
    MEMORY[:] = np.arange(len(MEMORY), dtype=np.uint32) * np.uint32(2654435761)
    result = api.load(text).launch("k", 4, 96, cluster=cluster, args=[MEMORY], check=True)
    rows = sum(checker.rows for checker in TOLD)
    return MEMORY.copy(), result.warp_instructions, result.findings, rows


SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 24))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_have_the_same_findings(seed, monkeypatch):
    text, cluster = program(seed), 1 + seed % 2
    plain = outcome(text, "numpy", monkeypatch, cluster=cluster)
    quick = outcome(text, "llvm", monkeypatch, cluster=cluster)
    assert plain[3] == 0 and quick[3] > 50
    np.testing.assert_array_equal(quick[0], plain[0])
    assert quick[1] == plain[1]
    assert len(plain[2]) > 3
    assert [str(one) for one in quick[2]] == [str(one) for one in plain[2]]
