"""Features of an implementation, as data: integer sets and flags to hold a Problem against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import Protocol

from flashdsa.problem import INDEX_TOKEN_BYTES, PAGE_SIZE, Problem
from flashdsa.row_formats import ROW_FORMATS, Objections, RowFormat


class IntSet(Protocol):
    """A set of integers that prints itself for people."""

    def __contains__(self, value: object) -> bool: ...
    def __str__(self) -> str: ...


@dataclass(frozen=True)
class AtLeast:
    """Every integer from `low` on."""

    low: int

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and value >= self.low

    def __str__(self) -> str:
        return f">= {self.low}"


@dataclass(frozen=True)
class UpTo:
    """Every integer from 1 to `high`."""

    high: int

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and 1 <= value <= self.high

    def __str__(self) -> str:
        return f"1 to {self.high}"


@dataclass(frozen=True)
class OneOf:
    """The listed integers."""

    values: tuple[int, ...]

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return ", ".join(str(value) for value in self.values)


ANY = AtLeast(1)


@dataclass(frozen=True)
class Formats:
    """The formats of packed rows that an implementation reads.

    Attributes:
        objections: what it cannot read of a format. None: it reads no packed rows.
    """

    objections: Objections | None = None

    def __contains__(self, form: RowFormat) -> bool:
        return self.objections is not None and not any(self.objections(form))

    def __bool__(self) -> bool:
        return self.objections is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the formats in the table that it reads."""
        return tuple(name for name, form in ROW_FORMATS.items() if form in self)

    def refusal(self, form: RowFormat) -> str:
        """Say which fields of a format it cannot read; "" if it reads no packed rows."""
        found = () if self.objections is None else self.objections(form)
        said = "; ".join(found)
        return said and f"kv_format {form.name}: {said}"


NO_FORMATS = Formats()
ANY_FORMATS = Formats(lambda form: iter(()))


@dataclass(frozen=True)
class Reason:
    """Why an implementation cannot serve a call: the feature, what it has, what is needed."""

    feature: str
    supported: tuple[str, ...] = ()
    wanted: str = ""
    sentence: str = ""
    """In place of what the other fields say."""

    @property
    def need(self) -> str:
        """The call's need: "num_heads 64", or a flag's name."""
        return f"{self.feature} {self.wanted}".strip()

    def __str__(self) -> str:
        if self.sentence:
            return self.sentence
        if not self.wanted:
            return f"{self.feature}: not supported"
        return f"{self.feature}: takes {', '.join(self.supported) or 'none'}; got {self.wanted}"


def explain(rows: Sequence[Sequence[Reason]]) -> str:
    """Say once what is missing of a call against which each of several implementations has reasons:
    what they all lack (if they are another machine's, that alone), else what none has together."""
    merged: dict[str, Reason] = {}
    for reason in (reason for row in rows for reason in row):
        known = merged.get(reason.need, reason)
        supported = tuple(dict.fromkeys((*known.supported, *reason.supported)))
        sentence = known.sentence or reason.sentence
        merged[reason.need] = replace(reason, supported=supported, sentence=sentence)
    lacking = [{reason.need for reason in row} for row in rows]
    shared = [merged[need] for need in merged if all(need in row for row in lacking)]
    if shared:
        machine = [reason for reason in shared if reason.feature in MACHINE]
        return ", ".join(map(str, machine or shared))
    groups = (group for size in range(2, len(rows) + 1) for group in combinations(merged, size))
    together = next(group for group in groups if all(row & {*group} for row in lacking))
    return f"{' and '.join(together)}: not together"


@dataclass(frozen=True, kw_only=True)
class Features:
    """Everything that an implementation can do. `missing` lists what a call needs beyond it.

    A set of integers holds the sizes that it takes; a bool says that it takes what a call may need.
    Both have the name of the `Problem`'s field.
    """

    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...]
    num_heads: IntSet = field(default=ANY)
    d_qk: IntSet = field(default=ANY)
    d_v: IntSet = field(default=ANY)
    topk: IntSet = field(default=ANY)
    next_n: IntSet = field(default=OneOf((1,)))
    table_page_size: IntSet = field(default=OneOf((PAGE_SIZE,)))
    """Tokens that an entry of the indexer's block table names."""
    index_block: IntSet = field(default=OneOf((1,)))
    """Rows of kv that an id may name."""
    block: IntSet = field(default=OneOf((1,)))
    """Positions of the indexer's blocks, which are chosen, or from which tokens are."""
    token_bytes: IntSet = field(default=OneOf((INDEX_TOKEN_BYTES,)))
    """Bytes of a key in the indexer's cache."""
    row_formats: Formats = NO_FORMATS
    """Formats of packed rows that kv may have."""
    mixed_formats: Formats = NO_FORMATS
    """Formats of packed rows of which each source may have its own."""
    attn_sink: bool = False
    topk_length: bool = False
    max_logits: bool = False
    deterministic: bool = False
    sorted: bool = False
    positions: bool = False
    extra_kv: bool = False
    """A second source, with ids of its own."""
    ranges: bool = False
    """Lists of neighbouring rows, of each source that it takes."""
    batch_invariant: bool = False
    """A query's bits do not depend on the others."""
    candidates: bool = False
    """The indexer chooses tokens from listed blocks only."""
    capabilities: tuple[tuple[int, int], ...] = ()
    """CUDA compute capabilities of the GPUs that run the kernels; none: no matter."""
    least_capability: tuple[int, int] = (0, 0)
    """The oldest of the GPUs that run the kernels."""

    def leaves_open(self, name: str) -> bool:
        """Whether calls that these features take may have several values of a parameter."""
        feature = getattr(self, "row_formats" if name == "kv_format" else name, ANY)
        return len(feature.values) > 1 if isinstance(feature, OneOf) else bool(feature)

    @property
    def gpus(self) -> str:
        """The compute capabilities of the GPUs that run the kernels, in words; "": no matter."""
        if self.capabilities:
            return dotted(self.capabilities)
        return f"{dotted([self.least_capability])} or newer" if any(self.least_capability) else ""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability runs the kernels."""
        own = self.capabilities
        return capability in own if own else capability >= self.least_capability

    def missing(self, problem: Problem) -> Iterator[Reason]:
        """Each feature that `problem` needs and this set lacks."""
        for name, wanted, choices in (
            ("device", problem.device, self.devices),
            ("dtype", problem.dtype, self.dtypes),
        ):
            if wanted not in choices:
                yield Reason(name, choices, wanted)
        here = problem.capability
        if here is not None and not self.runs_on(here):
            yield Reason(CAPABILITY, (self.gpus,), dotted([here]))
        for name in SIZES:
            size: int | None = getattr(problem, name)
            supported: IntSet = getattr(self, name)
            if size is not None and size not in supported:
                yield Reason(name, tuple(str(supported).split(", ")), str(size))
        for form in problem.row_formats:
            if form not in self.row_formats:
                refusal = self.row_formats.refusal(form)
                yield Reason("kv_format", self.row_formats.names, form.name, refusal)
        if problem.mixed_formats:
            mixed = self.mixed_formats
            if any(form not in mixed for form in problem.row_formats):
                wanted = ", ".join(form.name for form in problem.row_formats)
                yield Reason("mixed_formats", mixed.names, wanted)
        for name in FLAGS:
            if getattr(problem, name) and not getattr(self, name):
                yield Reason(name)


TRITON_LEAST = (8, 0)
"""The oldest compute capability that Triton compiles bf16 products for."""
CAPABILITY = "compute capability"
PACKAGE = "package"
"""A package that an implementation may need."""
ELSEWHERE = ("device", CAPABILITY)
"""Features of the device that the tensors are on."""
MACHINE = (*ELSEWHERE, PACKAGE)
"""Features of the machine, not of the call."""
SIZES = tuple(one.name for one in fields(Features) if one.type == "IntSet")
"""Sizes of a `Problem`, each with its set in `Features`."""
FLAGS = tuple(one.name for one in fields(Features) if one.type == "bool")
"""Flags of a `Problem` and of `Features`: what a call may need."""


def dotted(capabilities: Iterable[tuple[int, int]]) -> str:
    """Write compute capabilities as people do: "10.0 or 10.3"."""
    return " or ".join(f"{major}.{minor}" for major, minor in capabilities)
