"""The context that common parts of consumers read: a plan's tile and choices, and shared memory."""

from typing import Any, Protocol

from cutlass import Int32

from flashdsa.dsl.memory import Memory
from flashdsa.kernels.attention.sm90.core.tile import Tile


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
    def memory(self) -> Memory:
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
