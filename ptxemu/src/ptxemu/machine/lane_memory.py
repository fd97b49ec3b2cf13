"""Memory as instructions of 32 lanes reach it: loads, stores and updates of one operand.

The common case, aligned addresses of all lanes in one region, is one NumPy gather or scatter; what
NumPy refuses is taken apart lane by lane, which serves lanes in several regions and names the lane
whose address is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import fault
from ptxemu.events import Access, AccessKind, Proxy, Space
from ptxemu.machine import regions
from ptxemu.machine.lanes import FULL, LANE_IDS, Mask
from ptxemu.machine.operands import address_reader
from ptxemu.machine.state import Region, Warp
from ptxemu.memory.address import CONST_WINDOW, PARAM_WINDOW, SHARED_RANK_SHIFT, WINDOW_BYTES
from ptxemu.syntax.ast import Address, Instruction, IntImmediate, Operand

Values: TypeAlias = NDArray[Any]
"""One word an active lane, shape (n,); or `count` of them, shape (count, n)."""
Combine: TypeAlias = Callable[[Values, NDArray[np.intp], Space], Values]
"""New values from the old ones, for the active lanes of the given numbers, in a space."""

_WINDOWS = {"param": PARAM_WINDOW, "const": CONST_WINDOW}


class LaneMemory:
    """Memory that one instruction's address operand reaches.

    Args:
        space: shared::cta, shared::cluster, global, local, param, const or generic.
        element: bytes of a word (1, 2, 4, 8); count: words at each lane's address.
        order: memory order and scope of the access.
    """

    def __init__(
        self,
        instruction: Instruction,
        operand: Operand,
        space: str,
        element: int,
        count: int = 1,
        *,
        order: tuple[str, str] = ("weak", ""),
    ) -> None:
        self._instruction = instruction
        self._addresses = address_reader(operand)
        self._space = space
        self._element = element
        self._count = count
        self._size = element * count
        self._order = order

    def load(self, warp: Warp, mask: Mask) -> Values:
        """The words at the active lanes' addresses."""
        return self.load_at(warp, mask, self.addresses(warp, mask))

    def load_at(self, warp: Warp, mask: Mask, addresses: NDArray[np.int64]) -> Values:
        """The words at `addresses`, one an active lane."""
        try:
            region, inside = self._guess(warp, mask, addresses)
            values = region.words.gather(inside, self._element, self._count)
        except IndexError:
            return self._load_apart(warp, mask, addresses)
        if warp.cta.machine.observer is not None:
            self._report(warp, region, inside, AccessKind.READ)
        return values

    def store(self, warp: Warp, mask: Mask, values: Values) -> None:
        """Write words at the active lanes' addresses; of equal addresses the last lane wins."""
        self.store_at(warp, mask, self.addresses(warp, mask), values)

    def store_at(
        self, warp: Warp, mask: Mask, addresses: NDArray[np.int64], values: Values
    ) -> None:
        """Write words at `addresses`, one an active lane."""
        try:
            region, inside = self._guess(warp, mask, addresses)
            if not region.is_writable:
                raise IndexError
            machine = warp.cta.machine
            words, size, count = region.words, self._element, self._count
            if machine.observer is not None:
                same = words.exchange(inside, values, size, count)
            else:
                words.scatter(inside, values, size, count)
        except IndexError:
            self._store_apart(warp, mask, addresses, values)
            return
        machine.progress += 1
        if machine.observer is not None:
            self._report_write(warp, region, inside, values, same)

    def update(self, warp: Warp, mask: Mask, combine: Combine) -> Values:
        """Replace each lane's words by what `combine` makes of them, in lane order.

        Returns:
            the words as each lane found them.
        """
        addresses = self.addresses(warp, mask)
        try:
            region, inside = self._guess(warp, mask, addresses)
            if not region.is_writable:
                raise IndexError
            found = region.words.gather(inside, self._element, self._count)
            parts = [(region, inside, np.arange(len(inside)))]
        except IndexError:
            parts = self._apart(warp, mask, addresses, for_writing=True)
            shape = (len(addresses),) if self._count == 1 else (self._count, len(addresses))
            found = np.empty(shape, dtype=f"u{self._element}")
        for region, inside, lanes in parts:
            found[..., lanes] = self._update_region(warp, region, inside, lanes, combine)
            if warp.cta.machine.observer is not None:
                self._report(warp, region, inside, AccessKind.ATOMIC)
        return found

    def _update_region(
        self,
        warp: Warp,
        region: Region,
        inside: NDArray[np.int64],
        lanes: NDArray[np.intp],
        combine: Combine,
    ) -> Values:
        listed = inside.tolist()
        if len(set(listed)) == len(listed):
            old = region.words.gather(inside, self._element, self._count)
            new = combine(old, lanes, region.space)
            region.words.scatter(inside, new, self._element, self._count)
            is_changed = bool((new != old).any())
        else:
            places, cell_of = np.unique(inside, return_inverse=True)
            cells = region.words.gather(places, self._element, self._count)
            before = cells.copy()
            old = cells[..., cell_of]
            for turn in _turns(listed):
                mine = cell_of[turn]
                old[..., turn] = cells[..., mine]
                cells[..., mine] = combine(old[..., turn], lanes[turn], region.space)
            region.words.scatter(places, cells, self._element, self._count)
            is_changed = bool((before != cells).any())
        if is_changed:
            warp.cta.machine.progress += 1
        return old

    def fill(self, warp: Warp, mask: Mask, count: int) -> None:
        """Zero `count` words from each lane's address on."""
        addresses = self.addresses(warp, mask)
        for region, inside, lanes in self._apart(warp, mask, addresses, for_writing=True):
            for lane, start in zip(lanes.tolist(), inside.tolist(), strict=True):
                if not region.words.holds(start, self._size * count):
                    self._refuse(warp, lane, start, self._whereabouts(warp, start))
                places = start + self._size * np.arange(count, dtype=np.int64)
                region.words.scatter(places, np.zeros(count, np.uint64), self._element, 1)
                self._report(warp, region, places, AccessKind.WRITE)
        warp.cta.machine.progress += 1

    def check(self, warp: Warp, mask: Mask) -> None:
        """Refuse addresses that are misaligned or in no region, as a load would."""
        self._apart(warp, mask, self.addresses(warp, mask), for_writing=False)

    def addresses(self, warp: Warp, mask: Mask) -> NDArray[np.int64]:
        """The active lanes' addresses."""
        addresses = self._addresses(warp)
        return addresses if mask is FULL else addresses[mask]

    def _guess(
        self, warp: Warp, mask: Mask, addresses: NDArray[np.int64]
    ) -> tuple[Region, NDArray[np.int64]]:
        """The region of the first active lane, and the addresses as its words know them.

        Raises:
            IndexError: there is none.
        """
        space = self._space
        if space == "shared::cta":
            return regions.shared_region(warp.cta), addresses
        first = int(addresses[0])
        if space == "shared::cluster":
            return regions.shared_region(self._peer(warp, first)), addresses
        if space == "generic":
            top = first >> 32
            if top == regions.SHARED_TOP:
                return regions.generic_shared_region(
                    self._peer(warp, first & regions.LOW_BITS)
                ), addresses
            space = "local" if top == regions.LOCAL_TOP else "global"
        if space == "local":
            offsets = addresses & regions.LOW_BITS
            stride = regions.local_stride(warp)
            if int(offsets.max()) + self._size > stride:
                raise IndexError
            return regions.local_region(warp), offsets + LANE_IDS[mask] * np.int64(stride)
        window = _WINDOWS.get(space)
        if window is not None and first < WINDOW_BYTES:
            addresses = addresses + window
            first += window
        region = warp.last_regions.get(self._instruction.pc)
        if region is None or not region.words.holds(first, self._size):
            region = regions.global_region(warp, first, self._size)
            if region is None:
                raise IndexError
            warp.last_regions[self._instruction.pc] = region
        return region, addresses

    def _peer(self, warp: Warp, address: int) -> Any:
        """The CTA that a shared::cluster address names; IndexError if there is none."""
        cta = warp.cta
        rank = address >> SHARED_RANK_SHIFT
        if rank == cta.rank:
            return cta
        if not 0 <= rank < len(cta.cluster.ctas):
            raise IndexError
        peer = cta.cluster.ctas[rank]
        if peer.exited:
            message = f"access to shared memory of cta {peer.ctaid}, which has exited"
            cta.machine.complain("error", "exited-cta", message, warp, self._instruction)
        return peer

    def _load_apart(self, warp: Warp, mask: Mask, addresses: NDArray[np.int64]) -> Values:
        shape = (len(addresses),) if self._count == 1 else (self._count, len(addresses))
        values = np.empty(shape, dtype=f"u{self._element}")
        for region, inside, lanes in self._apart(warp, mask, addresses, for_writing=False):
            values[..., lanes] = region.words.gather(inside, self._element, self._count)
            if warp.cta.machine.observer is not None:
                self._report(warp, region, inside, AccessKind.READ)
        return values

    def _store_apart(
        self, warp: Warp, mask: Mask, addresses: NDArray[np.int64], values: Values
    ) -> None:
        for region, inside, lanes in self._apart(warp, mask, addresses, for_writing=True):
            region.words.scatter(inside, values[..., lanes], self._element, self._count)
            if warp.cta.machine.observer is not None:
                self._report(warp, region, inside, AccessKind.WRITE)
        warp.cta.machine.progress += 1

    def _apart(
        self, warp: Warp, mask: Mask, addresses: NDArray[np.int64], *, for_writing: bool
    ) -> list[tuple[Region, NDArray[np.int64], NDArray[np.intp]]]:
        """Regions with the addresses in them and the numbers of the active lanes these are of.

        Raises:
            ExecutionError: a lane's address is misaligned or in no region.
        """
        lane_ids = np.flatnonzero(mask)
        parts: dict[int, tuple[Region, list[int], list[int]]] = {}
        for number, address in enumerate(addresses.tolist()):
            lane = int(lane_ids[number])
            one = np.equal(LANE_IDS, lane)
            if address % self._size:
                self._refuse(warp, lane, address, f"not aligned to {self._size} bytes")
            try:
                region, inside = self._guess(warp, one, addresses[number : number + 1])
            except IndexError:
                self._refuse(warp, lane, address, self._whereabouts(warp, address))
            if not region.words.holds(int(inside[0]), self._size):
                self._refuse(warp, lane, address, self._whereabouts(warp, address))
            if for_writing and not region.is_writable:
                self._refuse(warp, lane, address, "read-only memory")
            _, insides, numbers = parts.setdefault(id(region.words), (region, [], []))
            insides.append(int(inside[0]))
            numbers.append(number)
        return [
            (region, np.array(insides, dtype=np.int64), np.array(numbers, dtype=np.intp))
            for region, insides, numbers in parts.values()
        ]

    def _whereabouts(self, warp: Warp, address: int) -> str:
        space = self._space if self._space != "generic" else regions.describe_generic(address)
        if space in ("global", "param", "const"):
            return warp.cta.machine.memory.nearest(address)
        if space == "local":
            return f"a thread has {warp.cta.machine.layout.local_bytes} bytes of local memory"
        rank = (address & regions.LOW_BITS) >> SHARED_RANK_SHIFT
        if rank >= len(warp.cta.cluster.ctas):
            return f"CTA rank {rank} of a cluster of {len(warp.cta.cluster.ctas)}"
        if rank != warp.cta.rank and self._space == "shared::cta":
            return f"shared::cta in the CTA of rank {warp.cta.rank}, but it is rank {rank}'s"
        words = regions.shared_region(warp.cta.cluster.ctas[rank]).words
        return f"that CTA's shared memory is 0x{words.base:x} to 0x{words.end:x}"

    def _refuse(self, warp: Warp, lane: int, address: int, why: str) -> NoReturn:
        fault(
            self._instruction,
            f"{warp.label} lane {lane}: "
            f"illegal {self._space} address 0x{address:x} ({self._size} bytes): {why}",
        )

    def _report_write(
        self,
        warp: Warp,
        region: Region,
        inside: NDArray[np.int64],
        values: Values,
        same: NDArray[np.bool_],
    ) -> None:
        """Report a store, and which lanes wrote what was there already."""
        silent = same.tobytes().count(1)
        if not silent:
            self._report(warp, region, inside, AccessKind.WRITE)
            return
        held = values[..., same]
        self._report(
            warp,
            region,
            inside,
            AccessKind.WRITE,
            is_silent=silent == len(same),
            silent_pieces=same if silent < len(same) else None,
            is_varied=bool((held != held.item(0)).any()),
        )

    def _report(
        self,
        warp: Warp,
        region: Region,
        inside: NDArray[np.int64],
        kind: AccessKind,
        *,
        is_silent: bool = False,
        silent_pieces: NDArray[np.bool_] | None = None,
        is_varied: bool = False,
    ) -> None:
        machine = warp.cta.machine
        if machine.observer is None or not region.is_observed or self._space == "const":
            return
        owner = region.owner
        starts = inside - region.origin if region.origin else inside
        machine.observer.accessed(
            Access(
                warp,
                region.space,
                None if owner is None else owner.index,
                starts,
                self._size,
                kind,
                Proxy.GENERIC,
                self._instruction,
                *self._order,
                is_silent,
                silent_pieces,
                is_varied=is_varied,
            )
        )


def read_bytes(warp: Warp, lane: int, address: int, size: int, instruction: Instruction) -> bytes:
    """Bytes at a generic address of one lane."""
    byte = LaneMemory(instruction, Address(IntImmediate(address)), "generic", 1)
    return b"".join(
        byte.load_at(warp, np.equal(LANE_IDS, lane), np.array([address + k])).tobytes()
        for k in range(size)
    )


def _turns(addresses: list[int]) -> list[NDArray[np.intp]]:
    """Numbers of the lanes that may go at once, in turns: no address twice in a turn, and lanes
    of equal address in lane order."""
    turns: list[list[int]] = []
    count: dict[int, int] = {}
    for number, address in enumerate(addresses):
        turn = count.get(address, 0)
        count[address] = turn + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(number)
    return [np.array(turn, dtype=np.intp) for turn in turns]
