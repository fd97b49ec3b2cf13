"""The descriptors that a script's kernels hand to the tensor cores and copies, on the emulator.

    python -m workbench.probes.record_descriptors OUT.json --arch sm_100a SCRIPT [ARGUMENTS]

Runs `ptxemu exec` with the arguments after OUT.json and writes the raw values, in hexadecimal, of a
few of each sort: matrix descriptors that differ in more than their start address, instruction
descriptors with the .kind of their instruction, tensor maps. ptxemu/tests/descriptors/ holds those
of strangers' kernels.
"""

from __future__ import annotations

import atexit
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptxemu.cli.main import main
from ptxemu.descriptors import Tcgen05Descriptor, WgmmaDescriptor
from ptxemu.engines import mma_plan, tma

PER_SORT = 3
"""Values kept of each sort."""
found: dict[str, dict[Any, list[str]]] = {}


def keep(what: str, sort: Any, value: str) -> None:
    """Remember one more value of a sort."""
    values = found.setdefault(what, {}).setdefault(sort, [])
    if value not in values and len(values) < PER_SORT:
        values.append(value)


def watch() -> None:
    """Listen to every decoder from now on."""
    for what, kind in (("wgmma", WgmmaDescriptor), ("tcgen05", Tcgen05Descriptor)):

        def matrix(value: int, what: str = what, decode: Any = kind.decode) -> Any:
            decoded = decode(value)
            keep(what, replace(decoded, start_address=0), f"0x{value:016x}")
            return decoded

        kind.decode = staticmethod(matrix)  # type: ignore[method-assign,assignment]
    decode_instruction, decode_map = mma_plan.decode_instruction, tma.decode_map

    def instruction(value: int, kind: str) -> Any:
        keep(f"instruction {kind}", value, f"0x{value & 0xFFFFFFFF:08x}")
        return decode_instruction(value, kind)

    def copied(raw: bytes) -> Any:
        decoded = decode_map(raw)
        keep("tensor_map", replace(decoded, address=0), raw[:64].hex())
        return decoded

    mma_plan.decode_instruction = instruction  # type: ignore[attr-defined]
    tma.decode_map = copied  # type: ignore[attr-defined]


def write(path: Path) -> None:
    """Write all values, by kind."""
    values = {
        what: sorted(value for kept in sorts.values() for value in kept)
        for what, sorts in sorted(found.items())
    }
    path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    watch()
    atexit.register(write, Path(sys.argv[1]))
    sys.argv = ["ptxemu", "exec", *sys.argv[2:]]
    main()
