"""Results of decoding an instruction: a pure function on lanes, or a step that acts on a warp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import Mask
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Address, Scalar


def identity(lanes: Any) -> Any:
    """The function of a move; a block copies the register and calls nothing."""
    return lanes


@dataclass(frozen=True, slots=True)
class PureOp:
    """A decoded pure instruction.

    `function(*sources)` gets one array (32,) per source, viewed as `source_types` say
    (`machine.lanes.VALUE`), and returns the destination's value, viewed as `result_types` say; for
    more than one destination (`d|p`, a vector) a tuple. It must not change its arguments, and works
    lane by lane: on any number of lanes, each result depending on that lane's operands only.
    `destinations` and `sources` are operands of the instruction (scalars; a vector's elements).
    """

    function: Callable[..., Any]
    result_types: tuple[str, ...]
    source_types: tuple[str, ...]
    destinations: tuple[Scalar, ...]
    sources: tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class PlainAccess:
    """A weak load or store, as machine code needs to know it; no other step depends on its order.

    `registers` are loaded, or stored; of a load those that take signed words extend their sign.
    """

    is_store: bool
    space: str
    address: Address
    element: int
    """Bytes of a word: 1, 2, 4 or 8."""
    registers: tuple[Scalar, ...]
    """One a word."""
    is_signed: bool = False


Step: TypeAlias = Callable[["Warp", Mask], "Blocked | None"]
"""A decoded visible instruction: `step(warp, mask)`, `mask` being the lanes that execute it (the
active lanes whose guard holds; never empty)."""


@dataclass(frozen=True, slots=True)
class AccessStep:
    """A step that is a plain access and nothing else."""

    step: Step
    access: PlainAccess


Decoded: TypeAlias = PureOp | Step | AccessStep
