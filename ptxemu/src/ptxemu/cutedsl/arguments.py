"""The memory that a host call may touch: the tensors among its arguments, with their bounds."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.cutedsl import dlpack, gpu_blocks
from ptxemu.errors import LaunchError
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.syntax.ast import Address, Function, Instruction, Operand, Symbol, Vector
from ptxemu.syntax.types import TYPES

# The words of a launch's parameters that may be addresses of global memory.

_LOWEST_ADDRESS = 1 << 16
HIGHEST_ADDRESS = 1 << 47
_TENSOR_MAP_BYTES = 128
_WORD_BYTES = 8


def address_words(kernel: Function, values: Sequence[bytes]) -> Iterator[int]:
    """Words that the kernel reads whole, where they may be addresses.

    Two sizes in one word are read apart, and what pads a structure is not read at all, whatever
    the host's stack had there.
    """
    read = _read_offsets(kernel)
    for parameter, value in zip(kernel.parameters, values, strict=True):
        is_tensor_map = parameter.size == _TENSOR_MAP_BYTES and parameter.align >= 64
        end = _WORD_BYTES if is_tensor_map else len(value) - len(value) % _WORD_BYTES
        words = struct.unpack(f"<{end // _WORD_BYTES}Q", value[:end])
        yield from plausible(
            word
            for offset, word in zip(range(0, end, _WORD_BYTES), words, strict=True)
            if offset in read[parameter.name]
        )


def plausible(words: Iterable[int]) -> Iterator[int]:
    """Words that may be addresses of a process."""
    return (word for word in words if _LOWEST_ADDRESS <= word < HIGHEST_ADDRESS)


def _read_offsets(kernel: Function) -> dict[str, set[int] | range]:
    """Offsets in each parameter at which the kernel reads 64 bits or more at once.

    All of them where it takes the parameter's own address.
    """
    found: dict[str, set[int] | range] = {p.name: set() for p in kernel.parameters}
    whole = {p.name: range(0, p.size, _WORD_BYTES) for p in kernel.parameters}
    for instruction in kernel.instructions:
        for symbol, offset in _symbols(instruction.operands):
            offsets = found.get(symbol.name)
            if not isinstance(offsets, set):
                continue
            if instruction.modifiers[0] == "ld":
                offsets.update(_loaded(instruction, symbol.addend + offset))
            else:
                found[symbol.name] = whole[symbol.name]
    return found


def _symbols(operands: Iterable[Operand]) -> Iterator[tuple[Symbol, int]]:
    """The names among operands, each with the offset beside it."""
    for operand in operands:
        if isinstance(operand, Symbol):
            yield operand, 0
        elif isinstance(operand, Address) and isinstance(operand.base, Symbol):
            yield operand.base, operand.offset
        elif isinstance(operand, Vector):
            yield from _symbols(operand.elements)


def _loaded(load: Instruction, offset: int) -> range:
    """Offsets of the 64-bit words that an `ld` from a parameter reads; none of narrower values."""
    size = TYPES[load.modifiers[-1]].size
    counts = [int(m[1:]) for m in load.modifiers if m in ("v2", "v4", "v8")]
    if size < _WORD_BYTES:
        return range(0)
    return range(offset, offset + size * (counts[0] if counts else 1), _WORD_BYTES)


_MAX_DEPTH = 8
_MAX_POINTER_TABLE = 1 << 16
_MAX_SEARCHED_BYTES = 1 << 24
"""Larger memory is not searched for addresses."""


@dataclasses.dataclass(slots=True)
class ArgumentRegion:
    """Bytes [start, end) of host memory that `owner` keeps alive."""

    start: int
    end: int
    name: str
    owner: Any


@dataclasses.dataclass(slots=True)
class Arguments:
    """Memory and pointers found in the arguments of a call."""

    regions: list[ArgumentRegion]
    pointer_tables: list[NDArray[np.int64]]
    """64-bit integer tensors, which may hold addresses of other tensors (grouped GEMMs)."""
    has_bare_pointers: bool = False
    """Whether an argument is an address without a tensor."""

    def memory(
        self,
        kernel: Function,
        values: Sequence[bytes],
        note: Callable[[str], None],
        *,
        allow_unregistered: bool | None,
    ) -> GlobalMemory:
        """Global memory for one launch.

        Addresses among the kernel's parameters, or in pointer tables, that belong to no argument
        are looked up among all live tensors, and in the memory of those that were freed last. Where
        that fails too, and the caller passed bare pointers, bounds are given up with a note, unless
        `allow_unregistered` says otherwise.
        """
        regions = list(self.regions)
        loose = [a for a in address_words(kernel, values) if not _holds(regions, a)]
        tables = [a for table in self.pointer_tables for a in plausible(table.tolist())]
        loose, tables = _mapped(loose, tables)
        stray = []
        if loose or tables:
            live = list(_live_tensors())
            for address in (*loose, *(a for a in tables if not _holds(regions, a))):
                found = [r for r in live if r.start <= address < r.end] or _freed(address, note)
                regions.extend(found)
                if not found and address in loose:
                    stray.append(address)
            regions.extend(_pointed_at(regions[len(self.regions) :], regions, live))
        if stray and self.has_bare_pointers and allow_unregistered is None:
            note(
                f"the kernel gets the address {stray[0]:#x}, which belongs to no tensor that is "
                "known: bounds of global accesses are not checked"
            )
            allow_unregistered = True
        memory = GlobalMemory(allow_unregistered=bool(allow_unregistered))
        for region in merged(regions):
            memory.register(_view(region), region.name)
        return memory


def collect(values: Iterable[tuple[str, Any]]) -> Arguments:
    """Find the tensors in named arguments, through tuples, lists, dicts and dataclasses.

    Raises:
        LaunchError: a tensor that is not in host memory.
    """
    found = Arguments([], [])
    for name, value in values:
        _walk(found, name, value, 0)
    return found


def _walk(found: Arguments, name: str, value: Any, depth: int) -> None:
    if _is_bare_pointer(value):
        found.has_bare_pointers = True
        return
    if value is None or depth > _MAX_DEPTH or isinstance(value, int | float | str | bytes | type):
        return
    if _is_torch_tensor(value):
        _add_torch(found, name, value)
    elif isinstance(value, np.ndarray):
        _add_numpy(found, name, value)
    elif hasattr(value, "_dlpack_data"):
        _add_capsule(found, name, value._dlpack_data, value)
    elif hasattr(value, "__dlpack__"):
        capsule = value.__dlpack__()
        _add_capsule(found, name, capsule, (value, capsule))
    else:
        for key, item in _members(value):
            _walk(found, f"{name}{key}", item, depth + 1)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of a container, each after the text that follows the container's name."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif hasattr(value, "_fields"):
        yield from ((f".{key}", item) for key, item in zip(value._fields, value, strict=True))
    elif isinstance(value, tuple | list):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif dataclasses.is_dataclass(value) or hasattr(value, "__c_pointers__"):
        yield from ((f".{key}", item) for key, item in getattr(value, "__dict__", {}).items())


def _is_bare_pointer(value: Any) -> bool:
    """A pointer object of CuTe DSL or ctypes, or a number that may be an address."""
    if isinstance(value, ctypes.c_void_p | ctypes._Pointer) or hasattr(value, "_pointer"):
        return True
    number = getattr(value, "value", value)
    return isinstance(number, int) and 1 << 32 <= number < HIGHEST_ADDRESS


def _is_torch_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.Tensor)


def _add_torch(found: Arguments, name: str, tensor: Any) -> None:
    storage = tensor.untyped_storage()
    if storage.device.type != "cpu":
        raise LaunchError(
            f"{name}: expected a CPU tensor (ptxemu runs on the CPU); got one on {storage.device}"
        )
    start = int(storage.data_ptr())
    found.regions.append(ArgumentRegion(start, start + int(storage.nbytes()), name, storage))
    torch = sys.modules["torch"]
    if tensor.dtype == torch.int64 and 0 < tensor.numel() <= _MAX_POINTER_TABLE:
        found.pointer_tables.append(tensor.detach().reshape(-1).numpy())


def _add_numpy(found: Arguments, name: str, array: NDArray[Any]) -> None:
    base: Any = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    low, high = np.lib.array_utils.byte_bounds(base)
    found.regions.append(ArgumentRegion(int(low), int(high), name, array))
    if array.dtype.itemsize == 8 and array.dtype.kind in "iu" and array.size <= _MAX_POINTER_TABLE:
        found.pointer_tables.append(array.reshape(-1).astype(np.int64))


def _add_capsule(found: Arguments, name: str, capsule: Any, owner: Any) -> None:
    where = dlpack.extent(capsule)
    region = ArgumentRegion(where.start, where.end, name, owner)
    found.regions.append(region)
    if where.holds_int64 and 0 < where.end - where.start <= 8 * _MAX_POINTER_TABLE:
        found.pointer_tables.append(_view(region).view(np.int64))


def merged(regions: Iterable[ArgumentRegion]) -> list[ArgumentRegion]:
    """The regions sorted, those that overlap joined (views of one storage)."""
    result: list[ArgumentRegion] = []
    for region in sorted(regions, key=lambda r: (r.start, r.end)):
        if region.start == region.end:
            continue
        last = result[-1] if result else None
        if last is not None and region.start < last.end:
            last.end = max(last.end, region.end)
            last.owner = (last.owner, region.owner)
            if region.name not in last.name.split(", "):
                last.name += f", {region.name}"
        else:
            result.append(dataclasses.replace(region))
    return result


def _view(region: ArgumentRegion) -> NDArray[np.uint8]:
    buffer = (ctypes.c_uint8 * (region.end - region.start)).from_address(region.start)
    buffer._owner = region.owner  # type: ignore[attr-defined]  # lives as long as the view
    return np.ctypeslib.as_array(buffer)


def _holds(regions: Iterable[ArgumentRegion], address: int) -> bool:
    return any(region.start <= address < region.end for region in regions)


def _pointed_at(
    roots: Sequence[ArgumentRegion], known: Sequence[ArgumentRegion], live: Sequence[ArgumentRegion]
) -> list[ArgumentRegion]:
    """Live tensors whose addresses lie in `roots`: tables of pointers, tensor maps in workspaces.

    Only what the kernel got as a bare pointer is searched: nothing says what it holds.
    """
    unknown = {r.start: r for r in live if r.end > r.start and not _holds(known, r.start)}
    starts = np.array(sorted(unknown), dtype=np.uint64)
    ends = np.array([unknown[int(start)].end for start in starts], dtype=np.uint64)
    found: list[ArgumentRegion] = []
    queue = [root for root in roots if root.end - root.start <= _MAX_SEARCHED_BYTES]
    while queue and len(starts):
        root = queue.pop()
        first = -(-root.start // 8) * 8
        count = max(root.end - first, 0) // 8
        data = _view(root)[first - root.start : first - root.start + 8 * count]
        words = data.view(np.uint64)
        at = np.searchsorted(starts, words, side="right").astype(np.int64) - 1
        hits = np.unique(at[(at >= 0) & (words < ends[at])])
        reached = [unknown[int(start)] for start in starts[hits]]
        found.extend(reached)
        queue.extend(r for r in reached if r.end - r.start <= _MAX_SEARCHED_BYTES)
        starts, ends = np.delete(starts, hits), np.delete(ends, hits)
    return found


def _live_tensors() -> Iterator[ArgumentRegion]:
    """The storages of all torch tensors that Python knows."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    types = {torch.Tensor}
    while more := {sub for type_ in types for sub in type_.__subclasses__()} - types:
        types |= more
    for candidate in [found for found in gc.get_objects() if type(found) in types]:
        try:
            storage = candidate.untyped_storage()
            # Another device's address, or a FakeTensor's, is not asked for: torch would complain.
            start = int(storage.data_ptr()) if storage.device.type == "cpu" else 0
        except (RuntimeError, NotImplementedError):
            continue
        if start:
            name = f"a tensor {tuple(candidate.shape)} that is no argument"
            yield ArgumentRegion(start, start + int(storage.nbytes()), name, storage)


def _freed(address: int, note: Callable[[str], None]) -> list[ArgumentRegion]:
    """The block of a freed tensor that `address` is in."""
    block = gpu_blocks.kept_at(address)
    if block is None:
        return []
    start = int(block.ctypes.data)
    note(
        "an address that the kernel gets is in a tensor that was freed: on a GPU another one may "
        "have that memory"
    )
    return [ArgumentRegion(start, start + block.nbytes, "a freed tensor", block)]


def _mapped(*lists: list[int]) -> list[list[int]]:
    """The numbers of each list that are addresses of the process's memory: few of those that only
    look like addresses, such as two sizes in one word. To look them up among tensors takes long.
    """
    if not any(lists):
        return list(lists)
    starts, ends = np.array(sorted(_mapped_ranges()), dtype=np.uint64).T

    def is_mapped(addresses: list[int]) -> NDArray[np.bool_]:
        words = np.array(addresses, dtype=np.uint64)
        at = np.searchsorted(starts, words, side="right") - 1
        mapped: NDArray[np.bool_] = (at >= 0) & (words < ends[at])
        return mapped

    return [list(compress(addresses, is_mapped(addresses))) for addresses in lists]


def _mapped_ranges() -> list[tuple[int, int]]:
    """The process's address ranges; everything where the system does not tell."""
    try:
        with open("/proc/self/maps") as maps:
            lines = maps.read().splitlines()
    except OSError:
        return [(0, HIGHEST_ADDRESS)]
    spans = (line.split(" ", 1)[0].split("-") for line in lines)
    return [(int(low, 16), int(high, 16)) for low, high in spans]
