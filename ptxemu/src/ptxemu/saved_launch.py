"""A launch as one file: saved where it was caught, run again anywhere with NumPy alone."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ptxemu.api import dim3, load, parameter_values
from ptxemu.errors import LaunchError
from ptxemu.launch_setup import LaunchSetup
from ptxemu.memory.address import CONST_WINDOW, PARAM_WINDOW, in_window
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.saved_launch_file import FORMAT, VERSION, read_launch

SUFFIX = ".launch"
"""Suffix of the files that the command line writes."""
_LOWEST_HOST, _HIGHEST_HOST = 1 << 32, 1 << 47
_TENSOR_MAP_BYTES = 128
_FIXED_DATE = (1980, 1, 1, 0, 0, 0)


def save_launch(setup: LaunchSetup, path: str | Path) -> None:
    """Write a launch that has not happened yet: PTX, shape, parameters, and memory as it is now.

    Addresses stay as they are, so pointers and tensor maps among the parameters stay valid. The
    file is a compressed NumPy archive; equal launches give equal files.

    Raises:
        LaunchError: the launch uses memory that is not registered, or its PTX text is not known.
    """
    module = setup.module
    if module.text is None:
        raise LaunchError(f"kernel {setup.kernel}: cannot be saved: its PTX text is not known")
    parameters = module.syntax.kernels[setup.kernel].parameters
    values = parameter_values(parameters, setup.args, setup.memory)
    if setup.memory.allow_unregistered:
        loose = [f"{address:#x}" for address in _unregistered(values, setup.memory)]
        which = ", ".join(loose) or "any"
        raise LaunchError(
            f"kernel {setup.kernel}: cannot be saved: it may use memory that belongs to no tensor "
            f"that is known, so its size is not known either; addresses among its parameters: "
            f"{which}"
        )
    # An earlier run of the launch has left its parameters and the module's variables there.
    allocations = [
        a
        for a in setup.memory.allocations
        if not (in_window(a.base, PARAM_WINDOW) or in_window(a.base, CONST_WINDOW))
    ]
    header = {
        "format": FORMAT,
        "version": VERSION,
        "kernel": setup.kernel,
        "grid": dim3("grid", setup.grid),
        "block": dim3("block", setup.block),
        "cluster": None if setup.cluster is None else dim3("cluster", setup.cluster),
        "smem": setup.smem,
        "arch": module.device.arch,
        "num_sms": module.device.num_sms,
        "allow_illegal": module.allow_illegal,
        "ptx_name": module.syntax.name,
        "placed": module.placed,
        "parameters": [value.hex() for value in values],
        "allocations": [
            {"base": a.base, "bytes": a.data.nbytes, "name": a.name, "writable": a.writable}
            for a in allocations
        ],
    }
    members = {
        "header": _bytes_of(json.dumps(header)),
        "ptx": _bytes_of(module.text),
        **{f"memory_{n}": a.data.reshape(-1).view(np.uint8) for n, a in enumerate(allocations)},
    }
    _write(Path(path), members)


def load_launch(path: str | Path) -> LaunchSetup:
    """The launch in a file of `save_launch`, ready to run; it changes a copy of the saved memory.

    Raises:
        LaunchError: not a saved launch, or of another version of the format.
    """
    header, text, arrays = read_launch(Path(path))
    # The name is that of the text's origin, for the file's own name says nothing about lines.
    illegal = header["allow_illegal"]
    module = load(text, arch=header["arch"], allow_illegal=illegal, name=header["ptx_name"])
    module.device = replace(module.device, num_sms=header["num_sms"])
    module.placed = header["placed"]
    memory = GlobalMemory()
    for facts, data in zip(header["allocations"], arrays, strict=True):
        memory.register(data, facts["name"], base=facts["base"], writable=facts["writable"])
    cluster = header["cluster"]
    return LaunchSetup(
        module,
        header["kernel"],
        tuple(header["grid"]),
        tuple(header["block"]),
        tuple(bytes.fromhex(value) for value in header["parameters"]),
        memory,
        None if cluster is None else tuple(cluster),
        header["smem"],
    )


def is_saved_launch(path: Path) -> bool:
    """Whether a file is an archive, as saved launches are, and so no PTX text.

    Raises:
        OSError: it cannot be read.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _write(path: Path, members: dict[str, NDArray[np.uint8]]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(f"{name}.npy", _FIXED_DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, data, allow_pickle=False)


def _unregistered(values: list[bytes], memory: GlobalMemory) -> Iterator[int]:
    """Words of the parameters that look like addresses of host memory that nobody registered."""
    for value in values:
        end = 8 if len(value) == _TENSOR_MAP_BYTES else len(value) // 8 * 8
        for word in struct.unpack(f"<{end // 8}Q", value[:end]) if len(value) >= 8 else ():
            if _LOWEST_HOST <= word < _HIGHEST_HOST and memory.find(word) is None:
                yield word


def _bytes_of(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), dtype=np.uint8)
