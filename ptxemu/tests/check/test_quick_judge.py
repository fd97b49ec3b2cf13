"""Machine code judges accesses as Python does: the same findings, the same states everywhere."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from tests.check.fake_run import GLOBAL, SHARED, STORE, TMEM, FakeRun, FakeWarp
from tests.kernel_run import aligned, source

from ptxemu import api, machine_code
from ptxemu.check.checker import Checker
from ptxemu.check.rows import RowStates

builtins = pytest.importorskip("ptxemu.compiled.builtins")
judge_code = pytest.importorskip("ptxemu.compiled.judge_code")
judge_states = pytest.importorskip("ptxemu.compiled.judge_states")

ADD = "red.relaxed.gpu.global.add.f32 [a], b"
COPY = "cp.async.cg.shared.global [a], [b], 16"
MMA = "tcgen05.mma.cta_group::1.kind::f16 [d], a, b, idesc, p"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x8.b32 {r}, [t]"
PAGE = 1 << 16
"""Bytes of a page of global memory."""


class History:
    """Something that may have happened, the same for one seed."""

    def __init__(self, seed: int, *, clusters: int) -> None:
        self.choose = random.Random(seed)
        self.run = FakeRun(clusters=clusters, warps=3)
        self.running: list[tuple[FakeWarp, object, str]] = []
        self.uses = 0
        self.actions: list[tuple[int, Callable[[FakeWarp], None]]] = [
            (8, self.access),
            (3, self.barrier),
            (2, self.fence),
            (4, self.start),
            (6, self.act),
            (3, self.join),
            (2, self.add),
            (1, self.hand_on),
        ]

    def play(self, actions: int) -> None:
        weights, does = zip(*self.actions, strict=True)
        for _ in range(actions):
            self.choose.choices(does, weights)[0](self.choose.choice(self.run.warps))

    def _starts(self, count: int, *, wide: bool) -> list[int]:
        places = [PAGE - 64, PAGE, 3 * PAGE + 128] if wide else [0, 64, 256]
        return [self.choose.choice(places) + 8 * self.choose.randrange(6) for _ in range(count)]

    def access(self, warp: FakeWarp) -> None:
        wide = self.choose.random() < 0.4
        does = self.run.read if self.choose.random() < 0.6 else self.run.write
        does(
            warp,
            self._starts(self.choose.choice([1, 3, 9]), wide=wide),
            self.choose.choice([2, 4, 4, 8, 16]),
            space=GLOBAL if wide else SHARED,
            **(
                {"is_silent": True} if does == self.run.write and self.choose.random() < 0.1 else {}
            ),
        )

    def barrier(self, warp: FakeWarp) -> None:
        self.uses += 1
        self.run.barrier(*warp.cta.warps, use=self.uses)

    def fence(self, warp: FakeWarp) -> None:
        kinds = ["proxy.async", "acq_rel.gpu", "tcgen05.before_thread_sync"]
        self.run.fence(warp, self.choose.choice([*kinds, "tcgen05.after_thread_sync"]))

    def start(self, warp: FakeWarp) -> None:
        text = self.choose.choice([STORE, COPY, MMA, MMA, LOAD])
        kind = ".".join(text.split(".")[:2]) if text.startswith("tcgen05") else ""
        mine = [one for who, one, _ in self.running if who is warp]
        after = mine[-1:] if text == MMA and self.choose.random() < 0.7 else None
        operation = self.run.issue(warp, text, kind=kind, ordered_after=after)  # type: ignore[arg-type]
        self.running.append((warp, operation, text))

    def act(self, warp: FakeWarp) -> None:
        if not self.running:
            return
        _, operation, text = self.choose.choice(self.running[-6:])
        does = self.run.read if self.choose.random() < 0.5 else self.run.write
        if text in (MMA, LOAD) and self.choose.random() < 0.7:
            lanes, column = self.choose.choice([32, 128]), self.choose.choice([0, 0, 8, 32])
            starts = [lane * 2048 + column * 4 for lane in range(lanes)]
            does = self.run.read if text == LOAD else does
            does(operation, starts, self.choose.choice([32, 64]), space=TMEM)
        else:
            count = self.choose.choice([1, 2, 4, 7])
            starts = [64 * piece + self.choose.choice([0, 16]) for piece in range(count)]
            does(operation, starts, 16)

    def join(self, warp: FakeWarp) -> None:
        if self.running:
            index = self.choose.randrange(len(self.running))
            who, operation, _ = self.running[index]
            reads = self.choose.random() < 0.3
            self.run.join(who, operation, reads=reads)  # type: ignore[arg-type]
            if not reads:
                del self.running[index]

    def add(self, warp: FakeWarp) -> None:
        starts = [5 * PAGE + 4 * self.choose.randrange(8)]
        rest = {"space": GLOBAL, "order": "relaxed", "scope": "gpu"}
        self.run.access(warp, ADD, "atomic", starts, **rest)  # type: ignore[arg-type]

    def hand_on(self, warp: FakeWarp) -> None:
        token = ("mbarrier", warp.cta.index, 0x3F00, 0)
        self.run.checker.released(warp, token, "cta")
        for other in warp.cta.warps:
            self.run.checker.acquired(other, token, "cta")


def states(run: FakeRun) -> dict[object, object]:
    """The numbers of the states of all memory."""
    return {
        (key, number): page.ids.tolist()
        for key, region in run.checker._memory._regions.items()
        for number, page in region.pages.items()
    }


def played(seed: int, monkeypatch: pytest.MonkeyPatch, *, by_code: bool) -> FakeRun:
    with monkeypatch.context() as patch:
        if by_code:
            patch.setattr(machine_code, "NUMPY_SCANS", 0)
            patch.setattr("ptxemu.check.shadow_memory.ACCESSES_AT_ONCE", 1 + seed % 40)
        else:
            patch.setenv("PTXEMU_CORE", "numpy")
        patch.setattr("ptxemu.check.shadow_memory.STATES_BEFORE_COMPACTION", 60)
        history = History(seed, clusters=1 + seed % 2)
        history.run.checker._memory._compact_at = 60
        history.play(400)
    return history.run


@pytest.mark.parametrize("seed", range(40))
def test_findings_and_states_are_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = played(seed, monkeypatch, by_code=False)
    quick = played(seed, monkeypatch, by_code=True)
    assert isinstance(quick.checker._memory._states, RowStates)
    assert not isinstance(plain.checker._memory._states, RowStates)
    assert len(plain.findings) > 3
    assert quick.findings == plain.findings
    assert states(quick) == states(plain)


def test_tables_grow_with_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """More states and events than there is room for at first; all are told apart."""
    monkeypatch.setattr(machine_code, "NUMPY_SCANS", 0)
    monkeypatch.setattr("ptxemu.check.shadow_memory.ACCESSES_AT_ONCE", 1)
    run = FakeRun()
    a, b = run.warps
    for number in range(9000):
        run.write(a, 8 * number)
        run.arrive(a, phase=number)  # behind it comes another event
    assert len(run.checker._memory._states) > 9000
    run.wait(b, phase=8998)
    run.read(b, [8 * number for number in range(8999)])
    assert run.codes == []
    run.read(b, 8 * 8999)
    assert run.codes == ["race"]


def test_python_judges_where_objects_are_laid_out_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judge_code, "is_layout_known", lambda: False)
    assert judge_code.judge.__wrapped__() is None


def test_bits_of_integers_are_read() -> None:
    """Of none, one and many digits, and behind the last."""

    def write(b: object, arguments: list[object]) -> None:
        b.ret(judge_states.bit_of(*arguments).as_number().ir)  # type: ignore[attr-defined]

    read = builtins.make_builtin("bit", 2, write, objects={0})
    for number in (0, 1, 1 << 29, 1 << 30, (5 << 100) | 3, random.Random(0).getrandbits(500)):
        bits = [read(number, place) for place in range(600)]
        assert bits == [number >> place & 1 for place in range(600)]


def test_builtins_refuse_what_they_do_not_take() -> None:
    """A wrong number of arguments, or no bytes where bytes are to be, is no address."""
    judge = judge_code.judge()
    assert judge is not None
    with pytest.raises(TypeError):
        judge(1, 2)
    clocks = np.zeros((12, 2), np.int32)
    with pytest.raises(TypeError):
        judge(0, 0, 5, *range(8), clocks, *range(5))
    with pytest.raises(TypeError):
        judge("0", 0, b"", *range(8), clocks, *range(5))


# Loads in a row that machine code does and judges: the same run and findings as one by one.


SHARED_BYTES = 4096
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
    return source(f"{start}\nAGAIN:\n{body}\n{loop}", ["data"], shared=SHARED_BYTES)


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
    monkeypatch.setattr("ptxemu.check.checker.Checker", Told)
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
