"""Files of saved launches, which may be strangers': checked before anything is allocated for them.

A file is a zip archive of NumPy arrays of bytes: a header (JSON), the PTX, and an array for each
allocation, whose size the header says.
"""

from __future__ import annotations

import json
import re
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import LaunchError
from ptxemu.memory.address import (
    CODE_WINDOW,
    CONST_WINDOW,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    WINDOW_BYTES,
)

FORMAT = "ptxemu launch"
VERSION = 1
_MOST_HEADER_BYTES = 1 << 20
_MOST_PTX_BYTES = 1 << 28
_PART_BYTES = 1 << 20
_DAMAGED = (
    ValueError, KeyError, AttributeError, TypeError, EOFError, RuntimeError, MemoryError,
    OverflowError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What readers of archives, of NumPy's headers and of JSON raise for files that are not whole.

RuntimeError is of encrypted members, unknown methods of compression, and too much nesting."""

_HEX = re.compile(r"(?:[0-9a-f]{2})*")
_WINDOWS = CODE_WINDOW, CONST_WINDOW, PARAM_WINDOW, LOCAL_WINDOW, SHARED_WINDOW
"""Where the emulator has memory of its own."""
_Predicate = Callable[[Any], bool]


def _is_integer(value: Any, least: int, end: int) -> bool:
    return type(value) is int and least <= value < end


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(_is_integer(extent, 1, 1 << 31) for extent in value)
    )


def _is_hex(value: Any) -> bool:
    return (
        isinstance(value, str) and len(value) % 2 == 0 and not set(value) - set("0123456789abcdef")
    )


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_integer(one, 0, 1 << 64) for one in value.values())


def _is_allocation(value: Any) -> bool:
    if not isinstance(value, dict) or _wrong_fields(value, _OF_ALLOCATION):
        return False
    begin, end = value["base"], value["base"] + value["bytes"]
    is_apart = all(end <= one or begin >= one + WINDOW_BYTES for one in _WINDOWS)
    return end <= 1 << 64 and is_apart


_OF_ALLOCATION: Mapping[str, _Predicate] = {
    "base": lambda value: _is_integer(value, 0, 1 << 64),
    "bytes": lambda value: _is_integer(value, 0, 1 << 47),
    "name": lambda value: isinstance(value, str),
    "writable": lambda value: isinstance(value, bool),
}
_OF_HEADER: Mapping[str, _Predicate] = {
    "kernel": lambda value: isinstance(value, str),
    "grid": _is_shape,
    "block": _is_shape,
    "cluster": lambda value: value is None or _is_shape(value),
    "smem": lambda value: _is_integer(value, 0, 1 << 31),
    "arch": lambda value: isinstance(value, str),
    "num_sms": lambda value: _is_integer(value, 1, 1 << 16),
    "allow_illegal": lambda value: isinstance(value, bool),
    "ptx_name": lambda value: isinstance(value, str),
    "placed": _is_table,
    "parameters": lambda value: isinstance(value, list) and all(map(_is_hex, value)),
    "allocations": lambda value: isinstance(value, list) and all(map(_is_allocation, value)),
}
"""Fields of a header, and what their values must be."""


def _wrong_fields(found: Mapping[str, Any], fields: Mapping[str, _Predicate]) -> list[str]:
    """Return names of fields that are missing or have another value than they must."""
    return [
        name for name, is_right in fields.items() if name not in found or not is_right(found[name])
    ]


def read_launch(path: Path) -> tuple[dict[str, Any], str, list[NDArray[np.uint8]]]:
    """Read the header, whose fields are as they must be, the PTX, and each allocation's bytes.

    Raises:
        LaunchError: not a saved launch, or of another version of the format.
    """
    wrong = f"{path}: not a launch that `ptxemu exec --save` wrote"
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(_member(archive, "header", most=_MOST_HEADER_BYTES).tobytes())
            if header.get("format") != FORMAT:
                raise LaunchError(wrong)
            if (version := header.get("version")) != VERSION:
                raise LaunchError(
                    f"{path}: saved by another ptxemu: version {version} of the format, this "
                    f"ptxemu reads version {VERSION}: save the launch again"
                )
            header.setdefault("placed", {})  # files of earlier releases have none
            if names := _wrong_fields(header, _OF_HEADER):
                raise LaunchError(f"{wrong}: its {', '.join(names)} cannot be")
            text = _member(archive, "ptx", most=_MOST_PTX_BYTES).tobytes().decode()
            arrays = [
                _member(archive, f"memory_{number}", size=facts["bytes"])
                for number, facts in enumerate(header["allocations"])
            ]
    except LaunchError:
        raise
    except _DAMAGED as error:
        raise LaunchError(f"{wrong}: {type(error).__name__}: {error}") from error
    return header, text, arrays


def _member(
    archive: zipfile.ZipFile, name: str, *, most: int = 1 << 47, size: int | None = None
) -> NDArray[np.uint8]:
    """Read an array of bytes, after its headers were compared.

    Args:
        most: bytes that it may have.
        size: bytes that it must have; None: any number.

    Raises:
        one of `_DAMAGED`: it is missing, damaged, or something else.
    """
    entry = archive.getinfo(f"{name}.npy")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed by another method")
    with archive.open(entry) as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        said = shape[0] if len(shape) == 1 else -1
        if dtype != np.uint8 or said != entry.file_size - file.tell():
            raise ValueError(f"{name} is not an array of its bytes")
        if not 0 <= said <= most or size not in (None, said):
            raise ValueError(f"{name} has {said} bytes")
        data = np.empty(said, np.uint8)
        at = 0
        while part := file.read(_PART_BYTES):  # to the end, where the checksum is compared
            data[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        if at != said:
            raise EOFError(f"{name} ends after {at} bytes")
    return data
