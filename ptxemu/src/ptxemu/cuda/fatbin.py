"""PTX out of what CUDA programs carry: fat binaries, compressed or not, and plain PTX text.

A fat binary is a header and entries; an entry has the PTX or the machine code (a cubin) of one
translation unit for one architecture. Payloads may be compressed with LZ4 (until CUDA 12.7) or
zstd (later). https://docs.nvidia.com/cuda/nvfatbin names the parts, not the layout, which is read
off files here.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptxemu.errors import PtxEmuError

FAT_BINARY = 0xBA55ED50
_MAGIC_BYTES = FAT_BINARY.to_bytes(4, "little")
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_PTX, _CUBIN = 1, 2
_LZ4, _ZSTD = 0x2000, 0x8000
_ELF = b"\x7fELF"
_MOST_TEXT_BYTES = 1 << 28
"""Size of a PTX text that no compiler reaches."""
_MOST_DAMAGED = 100
"""Fat binaries without an end that a program may have; their beginnings are constants of code."""
_TARGET = re.compile(r"^\s*\.target\s+(sm_(\d+)([af]?))", re.MULTILINE)


class ImageError(PtxEmuError, ValueError):
    """An image that holds nothing that ptxemu can run; says what it holds."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One part of a fat binary."""

    is_ptx: bool
    arch: int
    """90 for sm_90 and sm_90a."""
    payload: bytes
    """PTX text without compression, or a cubin as it is."""


def entries(image: bytes) -> Iterator[Entry]:
    """The parts of a fat binary.

    Raises:
        ImageError: not a fat binary, or one that is cut off or damaged.
    """
    end = _end_of(image, 0)
    at = _HEADER.unpack_from(image)[2]
    while at + _ENTRY.size <= end:
        kind, _, entry_header, stored, packed, _, _, _, arch, _, _, flags, _, unpacked = (
            _ENTRY.unpack_from(image, at)
        )
        begin, at = at + entry_header, at + entry_header + stored
        if entry_header < _ENTRY.size or at > end:
            raise ImageError("a damaged fat binary")
        payload = image[begin:at]
        if kind == _PTX:
            if flags & (_LZ4 | _ZSTD):
                if unpacked > _MOST_TEXT_BYTES:
                    raise ImageError(f"a damaged fat binary: PTX of {unpacked} bytes")
                unpack = _zstd if flags & _ZSTD else lz4_block
                payload = unpack(payload[: packed or stored], unpacked)
            yield Entry(True, arch, payload)
        elif kind == _CUBIN:
            yield Entry(False, arch, payload)


def _end_of(image: bytes, at: int) -> int:
    """Return where the fat binary at `at` ends.

    Raises:
        ImageError: there is none, or it is cut off.
    """
    if at + _HEADER.size > len(image):
        raise ImageError("not a whole fat binary")
    magic, _version, header_size, size = _HEADER.unpack_from(image, at)
    end: int = at + header_size + size
    if magic != FAT_BINARY or header_size < _HEADER.size or end > len(image):
        raise ImageError("not a whole fat binary")
    return end


def ptx_for(image: bytes, arch: str) -> str:
    """The PTX of an image that a device runs, the newest if there are several.

    Args:
        image: a fat binary, a cubin, or PTX text.
        arch: the device, as "sm_90a".

    Raises:
        ImageError: there is none; says what is there, and how to build with PTX.
    """
    if image.startswith(_ELF):
        raise ImageError(f"a cubin has machine code only: {_advice(arch)}")
    if struct.unpack_from("<I", image.ljust(4, b"\0"))[0] != FAT_BINARY:
        return _text(image)
    found = list(entries(image))
    if not found:
        raise ImageError(
            "relocatable device code (-rdc=true) is not emulated, and with it dynamic parallelism "
            "and allocation in kernels: compile without -rdc, what calls each other in one source"
        )
    texts = [_text(entry.payload) for entry in found if entry.is_ptx]
    runnable = [(order, text) for text in texts if (order := _order(text, arch)) is not None]
    if not runnable:
        targets = [_target(text) for text in texts] or ["none"]
        code = [f"sm_{entry.arch}" for entry in found if not entry.is_ptx] or ["none"]
        raise ImageError(
            f"no PTX for {arch}: PTX for {', '.join(targets)}, machine code for "
            f"{', '.join(code)}: {_advice(arch)}"
        )
    return max(runnable, key=lambda one: one[0])[1]


def _advice(arch: str) -> str:
    virtual = arch.replace("sm_", "compute_")
    return f"compile with -gencode arch={virtual},code={virtual}"


def _text(payload: bytes) -> str:
    try:
        return payload.rstrip(b"\0").decode()
    except UnicodeDecodeError as error:
        raise ImageError(f"PTX that is no text: {error}") from error


def _target(text: str) -> str:
    found = _TARGET.search(text)
    return found[1] if found else "an unknown target"


def _order(text: str, arch: str) -> tuple[int, str] | None:
    """Return how well PTX suits a device, for comparison; None if it does not run on the device."""
    found = _TARGET.search(text)
    device = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if found is None or device is None:
        return None
    number, suffix = int(found[2]), found[3]
    if suffix == "a" and found[1] != arch:
        return None
    if suffix == "f" and number // 10 != int(device[1]) // 10:
        return None
    return (number, suffix) if number <= int(device[1]) else None


def lz4_block(data: bytes, size: int) -> bytes:
    """`size` bytes out of an LZ4 block (github.com/lz4/lz4, doc/lz4_Block_format.md).

    Raises:
        ImageError: the block is damaged.
    """
    out = bytearray()
    at = 0
    try:
        while True:
            token = data[at]
            at, length = _lz4_length(data, at + 1, token >> 4)
            out += data[at : at + length]
            at += length
            if len(out) >= size or at >= len(data):
                break
            offset = data[at] | data[at + 1] << 8
            at, length = _lz4_length(data, at + 2, token & 15)
            if offset == 0 or offset > len(out):
                raise ImageError("a damaged LZ4 block")
            length = min(length + 4, size - len(out))
            pattern = out[len(out) - offset :][:length]  # source and target may overlap
            out += (pattern * (length // offset + 1))[:length]
    except IndexError:
        raise ImageError("a damaged LZ4 block") from None
    return bytes(out[:size])


def _lz4_length(data: bytes, at: int, nibble: int) -> tuple[int, int]:
    length = nibble
    if nibble == 15:
        while data[at] == 255:
            length, at = length + 255, at + 1
        length, at = length + data[at], at + 1
    return at, length


def _zstd(data: bytes, size: int) -> bytes:
    """`size` bytes out of a zstd frame, by whatever this machine has for it.

    Raises:
        ImageError: it has nothing, or the frame is damaged.
    """
    for name in ("compression.zstd", "zstandard"):
        try:
            package = importlib.import_module(name)
        except ImportError:
            continue
        unpacker = package.ZstdDecompressor()
        try:
            if name == "zstandard":
                return bytes(unpacker.decompress(data, max_output_size=size))
            return bytes(unpacker.decompress(data, max_length=size))
        except package.ZstdError as error:
            raise ImageError(f"a damaged zstd frame: {error}") from error
    path = ctypes.util.find_library("zstd")
    if path is None:
        raise ImageError(
            "the PTX is compressed with zstd, which this machine cannot read: "
            "pip install 'zstandard>=0.22', or compile with -Xfatbin -compress-mode=none"
        )
    library = ctypes.CDLL(path)
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = (
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.c_size_t,
    )
    out = ctypes.create_string_buffer(size)
    done = library.ZSTD_decompress(out, size, data, len(data))
    if done != size:
        raise ImageError("a damaged zstd frame")
    return out.raw[:size]


def has_kernels(program: str) -> bool:
    """Whether a file has a section of kernels, as nvcc makes it; strip leaves its name."""
    try:
        return b".nv_fatbin" in Path(program).read_bytes()
    except OSError:
        return False


def arch_of_program(path: str, archs: Sequence[str]) -> str | None:
    """The first of `archs` that a program has PTX for which runs only there; None: no such PTX."""
    targets = set(map(_target, ptx_of_program(path)))
    return next((arch for arch in archs if targets & {arch, arch[:-1] + "f"}), None)


def ptx_of_program(path: str) -> list[str]:
    """The PTX that a program has in it."""
    try:
        image = Path(path).read_bytes()
    except OSError:
        return []
    texts: list[str] = []
    damaged, at = 0, image.find(_MAGIC_BYTES)
    while at >= 0 and damaged < _MOST_DAMAGED:
        try:
            after = _end_of(image, at)
            found = list(entries(image[at:after]))
            texts += [_text(entry.payload) for entry in found if entry.is_ptx]
        except ImageError:
            damaged, after = damaged + 1, at + len(_MAGIC_BYTES)
        at = image.find(_MAGIC_BYTES, after)
    return texts
