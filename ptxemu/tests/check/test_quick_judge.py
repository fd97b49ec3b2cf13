"""Machine code judges accesses as Python does: the same findings, the same states everywhere."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from tests.check.fake_run import GLOBAL, SHARED, STORE, TMEM, FakeRun, FakeWarp

from ptxemu import machine_code
from ptxemu.check.rows import RowStates

builtins = pytest.importorskip("ptxemu.compiled.builtins")
judge_code = pytest.importorskip("ptxemu.compiled.judge_code")
python_objects = pytest.importorskip("ptxemu.compiled.python_objects")

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
    bit_of, constant = python_objects.bit_of, python_objects.constant

    def write(b: object, arguments: list[object]) -> None:
        bit = bit_of(b, *arguments)
        b.ret(b.zext(bit, constant(0).type))  # type: ignore[attr-defined]

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
