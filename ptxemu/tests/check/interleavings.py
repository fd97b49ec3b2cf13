"""Every interleaving of a small program, and what the check says of it."""

from collections import defaultdict
from collections.abc import Iterator

from tests.check.axioms import Coherence, Pairs, ReadsFrom
from tests.check.fake_run import GLOBAL, FakeRun, FakeWarp
from tests.check.small_programs import SCOPES, Event, Op, Program

from ptxemu.events import Fence, FenceKind

RACES = frozenset(("race", "mixed-race", "lost-update", "scope-race"))
"""Codes of accesses that conflict, and that nothing orders."""
_OPCODES = {"read": "ld", "write": "st", "atomic": "atom"}


class Interleaving:
    """One order of a program's accesses. Fences concern their own thread only and go at once."""

    def __init__(self, program: Program, order: tuple[int, ...] = (), *, is_checked: bool = False):
        self.program = program
        self.reads_from: ReadsFrom = {}
        self.executed: list[Event] = []
        self._next = [0] * len(program.threads)
        self._waits: set[int] = set()
        self._registers: list[dict[str, int]] = [{} for _ in program.threads]
        self._values: dict[str, int] = defaultdict(int)
        self._writes: dict[str, list[Event]] = defaultdict(list)
        self._addresses: dict[str, int] = {}
        self._events: dict[int, Event] = {}
        self._uses = 0
        self.run: FakeRun | None = None
        if is_checked:
            self.run, self._warps = _machine(program)
        for thread in range(len(program.threads)):
            self._go_on(thread)
        for thread in order:
            self._access(thread)

    def ready(self) -> list[int]:
        """The threads that have an access left."""
        threads = enumerate(self.program.threads)
        return [t for t, ops in threads if self._next[t] < len(ops) and t not in self._waits]

    @property
    def coherence(self) -> Coherence:
        """The writes of each location in their order."""
        return {at: tuple(writes) for at, writes in self._writes.items() if writes}

    def found(self) -> Pairs:
        """The pairs of events that the check finds to race."""
        assert self.run is not None
        found: Pairs = set()
        for finding in self.run.findings:
            if finding.code in RACES:
                assert finding.first is not None and finding.second is not None
                lines = finding.first.ptx_line, finding.second.ptx_line
                assert lines[0] is not None and lines[1] is not None
                one, other = sorted(self._events[line] for line in lines)
                found.add((one, other))
        return found

    def _go_on(self, thread: int) -> None:
        """Up to the thread's next access."""
        ops = self.program.threads[thread]
        while self._next[thread] < len(ops):
            op = ops[self._next[thread]]
            if op.kind == "fence":
                self._fence(thread, op)
            elif op.guard is not None and self._register(thread, op.guard[0]) != op.guard[1]:
                pass
            elif op.kind == "barrier":
                self._waits.add(thread)
                self._meet(self.program.places[thread][0])
                return
            else:
                return
            self._next[thread] += 1

    def _register(self, thread: int, name: str) -> int | None:
        return self._registers[thread].get(name)

    def _meet(self, cta: int) -> None:
        mates = [t for t, place in enumerate(self.program.places) if place[0] == cta]
        if not self._waits.issuperset(mates):
            return
        self._waits.difference_update(mates)
        if self.run is not None:
            self._uses += 1
            self.run.barrier(*(self._warps[mate] for mate in mates), use=self._uses)
        for mate in mates:
            self._next[mate] += 1
        for mate in mates:
            self._go_on(mate)

    def _fence(self, thread: int, op: Op) -> None:
        if self.run is not None:
            told = Fence(FenceKind.MEMORY, op.order, SCOPES[op.scope])
            name = f"fence.{op.order}.{SCOPES[op.scope]}"
            self.run.checker.fenced(self._warps[thread], told, self.run.instruction(name))

    def _access(self, thread: int) -> None:
        event = thread, self._next[thread]
        op = self.program.op(event)
        if self.run is not None:
            self._tell(event, op)
        self.executed.append(event)
        before = self._writes[op.location]
        if op.reads:
            self.reads_from[event] = before[-1] if before else None
            self._registers[thread][op.register] = self._values[op.location]
        if op.writes:
            before.append(event)
            added = self._values[op.location] if op.kind == "atomic" else 0
            self._values[op.location] = added + op.value
        self._next[thread] += 1
        self._go_on(thread)

    def _tell(self, event: Event, op: Op) -> None:
        assert self.run is not None
        opcode = "red" if op.is_red else _OPCODES[op.kind]
        text = f"{opcode}.b32 of {event}"
        self._events[10 * self.run.instruction(text).pc] = event
        address = self._addresses.setdefault(op.location, 0x1000 * (1 + len(self._addresses)))
        self.run.access(
            self._warps[event[0]], text, op.kind, address, space=GLOBAL, order=op.order,
            scope=SCOPES.get(op.scope, ""),
        )  # fmt: skip


def _machine(program: Program) -> tuple[FakeRun, list[FakeWarp]]:
    """A run with a warp for each thread, where it is to be."""
    run = FakeRun(clusters=0)
    width = max(sum(p == place for p in program.places) for place in program.places)
    clusters = sorted({cluster for _, cluster in program.places})
    spare: dict[tuple[int, int], Iterator[FakeWarp]] = {}
    for number in clusters:
        ctas = sorted({cta for cta, cluster in program.places if cluster == number})
        first = len(run.ctas)
        run.start_cluster(number, ctas=len(ctas), warps=width)
        for rank, cta in enumerate(ctas):
            spare[cta, number] = iter(run.ctas[first + rank].warps)
    return run, [next(spare[place]) for place in program.places]


def orders(program: Program) -> Iterator[tuple[tuple[int, ...], Interleaving]]:
    """Every complete order of the accesses of a program's threads."""
    stack: list[tuple[int, ...]] = [()]
    while stack:
        order = stack.pop()
        run = Interleaving(program, order)
        ready = run.ready()
        if ready:
            stack += [(*order, thread) for thread in ready]
        else:
            yield order, run
