"""Findings: what the check reports, once for each pair of instructions (or lines), with a count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ptxemu.errors import Span

if TYPE_CHECKING:
    from ptxemu.check.state import Actor
    from ptxemu.syntax.ast import Instruction

LEVELS: dict[str, str] = {
    "race": "error",
    "lane-race": "error",
    "shuffle-order": "error",
    "mixed-race": "error",
    "lost-update": "error",
    "scope-race": "error",
    "relaxed-barrier-race": "error",
    "narrow-wait-race": "error",
    "non-coherent-read": "error",
    "missing-grid-wait": "error",
    "missing-wait": "error",
    "missing-proxy-fence": "error",
    "missing-proxy-fence-after-read": "warning",
    "missing-proxy-fence-after-cp-async": "warning",
    "missing-tensormap-fence": "error",
    "missing-mbarrier-init-fence": "error",
    "mbarrier-access": "error",
    "mbarrier-overrun": "error",
    "mbarrier-early-arrival": "error",
    "mbarrier-tx-left": "warning",
    "mbarrier-arrivals-left": "warning",
    "unordered-mma": "error",
    "missing-tcgen05-wait": "error",
    "tmem-load-not-waited": "error",
    "tmem-dealloc-race": "error",
    "tmem-overlap": "warning",
    "volatile-race": "error",
    "missing-acquire": "note",
    "stale-read": "note",
    "weak-order": "note",
    "unordered-float-additions": "note",
    "same-value-race": "note",
    "missing-tcgen05-fence": "note",
    "late-tmem-read": "error",
    "tmem-read-by-register": "error",
    "mma-order-in-practice": "note",
    "uninitialised-read": "warning",
    "uninitialised-result": "error",
    "uninitialised-tmem-read": "error",
    "uninitialised-async-read": "warning",
    "async-after-exit": "error",
    "read-after-exit": "warning",
    "signal-after-exit": "warning",
    "dsmem-exit": "error",
    "dsmem-entry": "error",
    "tmem-alloc-entry": "error",
    "wgmma-fence-missing": "warning",
}
"""Every code of the check itself with its level; the machine's complaints bring their own."""
AGAINST_THE_ISA = frozenset(
    (
        *("missing-mbarrier-init-fence", "mixed-race", "narrow-wait-race", "relaxed-barrier-race"),
        *("shuffle-order", "remote-mbarrier-scope", "skipped-aligned"),
        *("tmem-alloc-after-relinquish", "tmem-alloc-entry", "tmem-alloc-grows", "tmem-lanes"),
        *("tmem-load-not-waited", "tmem-read-by-register"),
    )
)
"""Codes of errors that the ISA does not allow, though published kernels with them give right
results on hardware. All other errors can give wrong results there, or stop the kernel."""
UNORDERED = (
    *("race", "lane-race", "shuffle-order", "same-value-race", "mixed-race", "lost-update"),
    *("scope-race", "relaxed-barrier-race", "narrow-wait-race", "missing-wait", "unordered-mma"),
    *("missing-tcgen05-wait", "late-tmem-read", "tmem-read-by-register", "tmem-dealloc-race"),
)
"""Codes of accesses that nothing orders: the schedule decides which of the two comes first, and by
that which of the codes it is; two instructions give one finding."""
BY_LINES = ("unordered-float-additions",)
"""Codes of which pairs of instructions say no more than pairs of source lines."""
RESULT = "uninitialised-result"
UNINITIALISED = ("uninitialised-read", "uninitialised-tmem-read", "uninitialised-async-read")
ONE_VALUE = "one value"
"""About writes of one value by one instruction: they are what its other writes are, if any are
found."""
SEVERITY = {"note": 0, "warning": 1, "error": 2}
SHOWN_OPCODE = 60


@dataclass(frozen=True, slots=True)
class Site:
    """One of the two accesses of a finding, or the instruction that a fault is about."""

    kernel: str
    action: str
    """ "generic write", "async read", "mbarrier.init"..., "" where there is no access."""
    agent: str
    """"cta (0,0,0) warp 3", or the operation and who issued it."""
    cta: tuple[int, ...] | None
    warp: int | None
    """Warp number in the CTA; of an operation that of its issuer."""
    instruction: str
    ptx_line: int | None
    source_file: str | None
    source_line: int | None
    pc: int | None
    library: str | None = None
    """File and line of the library's code that is inlined there."""

    def __str__(self) -> str:
        opcode = self.instruction.split(" ", 1)[0].rstrip(";")[:SHOWN_OPCODE]
        what = " ".join(part for part in (self.action, f"({opcode})" if opcode else "") if part)
        by = f" by {self.agent}" if self.agent else ""
        return f"{what}{by}{f' at {self.where}' if self.ptx_line is not None else ''}"

    @property
    def line(self) -> str:
        """The source line, or the PTX line where there is none."""
        if self.source_file is not None:
            return f"{self.source_file}:{self.source_line}"
        return f"PTX {self.ptx_line}"

    @property
    def where(self) -> str:
        """The PTX line, and the source line where there is one."""
        if self.ptx_line is None:
            return "an unknown place"
        return str(Span(self.ptx_line, self.source_file, self.source_line, self.library))


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of the kernel."""

    level: str
    """error, warning or note."""
    code: str
    message: str
    """One line that names both accesses and what is missing between them."""
    first: Site | None
    second: Site | None
    count: int
    """Number of times that it happened in the run."""
    seeds: tuple[int, ...] = ()
    """Seeds that show it, where several schedules were tried (`--seeds`)."""
    orders: int = 0
    """Number of orders of synchronisation that show it, where all are tried (`--explore`)."""
    repeat: str = ""
    """Options with which one run shows it, where there were several."""

    @property
    def kind(self) -> str:
        """Kind of an error: "hardware" if it can give wrong results there, "isa" if only the ISA's
        letter forbids it; else empty."""
        if self.level != "error":
            return ""
        return "isa" if self.code in AGAINST_THE_ISA else "hardware"

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines of its sites (at most two), in the source or, if that is not known, in the PTX."""
        return tuple(site.line for site in (self.first, self.second) if site is not None)

    def to_json_dict(self) -> dict[str, Any]:
        """Return the finding for `--json`: only dicts, lists, strings, numbers and None."""
        found = asdict(self)
        found["kind"] = self.kind
        found["seeds"] = list(self.seeds)
        for name in ("seeds", "orders", "repeat"):
            if not found[name]:
                del found[name]
        for site in (found["first"], found["second"]):
            if site is not None and site["cta"] is not None:
                site["cta"] = list(site["cta"])
        return found


@dataclass(slots=True)
class Entry:
    """A finding as it is collected."""

    level: str
    code: str
    message: str
    first: Site | None
    second: Site | None
    instance: int
    count: int = 1

    def happened(self, instance: int) -> None:
        """Count it once more, unless it was of the same access; -1 counts always."""
        if instance < 0 or instance != self.instance:
            self.count += 1
            self.instance = instance


_Key: TypeAlias = tuple[str, int, int, str]
Place = tuple["Actor | None", "Instruction | None", str]
"""Who did it, with which instruction, and what it was (Event.action)."""


class Findings:
    """Collects findings; of those with the same code and instructions the first of the most severe
    is kept."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self._entries: dict[_Key, Entry] = {}
        self._keys: dict[tuple[str, int, int, str], _Key] = {}
        """Keys by code, ids of both instructions, and what else tells findings apart."""
        self.changes = 0
        """Times that a finding was new, or more severe than before."""

    def add(
        self,
        code: str,
        first: Place | None,
        second: Place | None,
        message: Callable[[Any, Any], str],
        *,
        level: str | None = None,
        about: str = "",
        instance: int = -1,
    ) -> None:
        """Count a finding; a new one gets the text that `message` makes of its two sites.

        Args:
            message: makes a text of the two sites; that of a place that is None is None.
            level: of a code that LEVELS lacks.
            about: tells findings apart that have the same code and instructions.
            instance: the access that it is about, which counts once; -1 counts always.
        """
        key = self._key(code, first and first[1], second and second[1], about)
        level = level if level is not None else LEVELS[code]
        entry = self._entries.get(key)
        count = 1
        if entry is not None:
            entry.happened(instance)
            if SEVERITY[level] <= SEVERITY[entry.level]:
                return
            count = entry.count
        sites = self._site(first), self._site(second)
        text = f"{code}: kernel {self._kernel}: {message(*sites)}"
        self.changes += 1
        self._entries[key] = Entry(level, code, text, *sites, instance, count)

    def judge_unwritten(self, reached: Callable[[], str]) -> None:
        """Ask where reads of memory that nobody wrote reach the launch's results, if there are."""
        reads = [one for one in self._entries.values() if one.code in UNINITIALISED]
        where = reached() if reads else ""
        if where:
            about = reads[0].message.split(": ", 2)[-1]
            text = f"{where} depends on memory that nobody wrote; the first read of it: {about}"
            message = f"{RESULT}: kernel {self._kernel}: {text}"
            entry = Entry(LEVELS[RESULT], RESULT, message, reads[0].first, None, -1)
            self._entries[RESULT, -1, -1, ""] = entry

    def known(
        self, code: str, first: Instruction | None, second: Instruction | None
    ) -> Entry | None:
        """The finding of two instructions, if there is one; it need only be counted."""
        return self._entries.get(self._key(code, first, second, ""))

    def _key(
        self, code: str, first: Instruction | None, second: Instruction | None, about: str
    ) -> _Key:
        """Return the key of a finding; all its occurrences have this key."""
        quick = code, id(first), id(second), about
        key = self._keys.get(quick)
        if key is None:
            pcs = _pc(first), _pc(second)
            family = code
            if code in UNORDERED:
                family, pcs = "unordered", (min(pcs), max(pcs))
            if code in BY_LINES:
                about, pcs = "; ".join(sorted({_line(first), _line(second)})), (-1, -1)
            key = self._keys[quick] = (family, *pcs, about)
        return key

    def settle(self) -> None:
        """Count what is about ONE_VALUE with the other finding of the same instruction, if any."""
        for key in [key for key in self._entries if key[-1] == ONE_VALUE]:
            other = self._entries.get((*key[:-1], ""))
            if other is not None:
                other.count += self._entries.pop(key).count

    def explain(self, explanation: Callable[[str, Site, Site], str]) -> None:
        """Add what `explanation` says of the code and both sites to each finding of a missing
        order."""
        for entry in self._entries.values():
            if entry.code in UNORDERED and entry.first is not None and entry.second is not None:
                entry.message += explanation(entry.code, entry.first, entry.second)

    def all(self) -> list[Finding]:
        """The findings in the order in which they arose."""
        return [
            Finding(e.level, e.code, e.message, e.first, e.second, e.count)
            for e in self._entries.values()
        ]

    def _site(self, place: Place | None) -> Site | None:
        if place is None:
            return None
        actor, instruction, action = place
        span = None if instruction is None else instruction.span
        return Site(
            self._kernel,
            action,
            "" if actor is None else actor.label,
            None if actor is None else actor.ctaid,
            None if actor is None else actor.warp,
            "" if instruction is None else instruction.text,
            None if span is None else span.ptx_line,
            None if span is None else span.source_file,
            None if span is None else span.source_line,
            None if instruction is None else instruction.pc,
            None if span is None else span.library,
        )


def _line(instruction: Instruction | None) -> str:
    if instruction is None:
        return ""
    span = instruction.span
    return f"{span.source_file}:{span.source_line or span.ptx_line}"


def _pc(instruction: Instruction | None) -> int:
    return -1 if instruction is None else instruction.pc
