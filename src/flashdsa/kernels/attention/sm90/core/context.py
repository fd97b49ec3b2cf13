"""The context that common parts of consumers read: a plan's tile and choices, and shared memory."""

from typing import Any, Protocol

from cutlass import Int32

from flashdsa.dsl.memory import Memory, Region
from flashdsa.dsl.pipeline import Barriers
from flashdsa.kernels.attention.sm90.core.tile import Tile


class StepMemory(Memory):
    """Shared memory of two consumers, which take steps of two tiles of keys.

    Barriers, of which those of k, masks, halves and P complete a phase a step:
        k0_full, k1_full: a slice of a tile has come. masks_full: a tile's masks are written.
        low_free, high_free: a tile's half has been read.
        p0_full, p1_full: P of a tile and its maxima are written.
        sums0_full, sums1_full: a consumer's sums of the item are written.
    """

    q: Region
    k: Region
    p: Region
    masks: Region
    row_max: Region
    row_sum: Region
    largest: Region
    k0_full: Barriers
    k1_full: Barriers
    masks_full: Barriers
    low_free: Barriers
    high_free: Barriers
    q_full: Barriers
    p0_full: Barriers
    p1_full: Barriers
    sums0_full: Barriers
    sums1_full: Barriers


class StepPlan(Protocol):
    """A plan of two consumers, which take steps of two tiles of keys."""

    @property
    def tile(self) -> Tile:
        """The geometry of a tile of keys."""

    @property
    def group(self) -> int:
        """Queries that share the rows of an item."""

    @property
    def group_heads(self) -> int:
        """Heads of each of these queries."""

    @property
    def lazy_log2(self) -> float:
        """A row's maximum is updated only if it has grown by this factor, in log2."""


class StepContext(Protocol):
    """One thread's context in a CTA that takes steps of two tiles of keys."""

    @property
    def memory(self) -> StepMemory:
        """The CTA's shared memory."""

    @property
    def thread(self) -> Any:
        """Number of the thread in its warpgroup."""

    @property
    def plan(self) -> StepPlan:
        """The compile-time plan."""

    @property
    def kind(self) -> str:
        """Kind of P and V in the products."""

    def kind_of_slice(self, slice_: int) -> str:
        """Kind of a slice's columns of Q and K in the products."""

    def phase(self, step: Any) -> Int32:
        """The phase that a step of the CTA completes, of every barrier of a step."""
