"""Which descriptors a script's kernels hand to the tensor cores and copies, seen on the emulator.

    python -m workbench.probes.record_descriptors OUT.json --arch sm_100a SCRIPT [ARGUMENTS]

Runs `ptxemu exec` with the arguments behind OUT.json and writes the raw values, in hexadecimal, of
a few of each sort: matrix descriptors that differ in more than their start address, instruction
descriptors with the .kind of their instruction, tensor maps. ptxemu/tests/descriptors/ holds what
it found in strangers' kernels.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptxemu.cli.main import main
from ptxemu.descriptors import Tcgen05Descriptor, WgmmaDescriptor
from ptxemu.engines import mma_plan, tma

PER_SORT = 3
"""Values kept of each sort: descriptors with the same fields but for the start address."""


class Recorder:
    """Remembers values; put in front of the emulator's own decoders."""

    def __init__(self) -> None:
        self.found: dict[str, dict[Any, list[str]]] = {}

    def keep(self, what: str, sort: Any, value: str) -> None:
        """One more value of a sort."""
        values = self.found.setdefault(what, {}).setdefault(sort, [])
        if value not in values and len(values) < PER_SORT:
            values.append(value)

    def install(self) -> None:
        """Watch every decoder from now on."""
        self._watch_matrices("wgmma", WgmmaDescriptor)
        self._watch_matrices("tcgen05", Tcgen05Descriptor)
        decode_instruction = mma_plan.decode_instruction

        def instruction(value: int, kind: str) -> Any:
            self.keep(f"instruction {kind}", value, f"0x{value & 0xFFFFFFFF:08x}")
            return decode_instruction(value, kind)

        mma_plan.decode_instruction = instruction  # type: ignore[attr-defined]
        decode_map = tma.decode_map

        def copied(raw: bytes) -> Any:
            found = decode_map(raw)
            self.keep("tensor_map", replace(found, address=0), raw[:64].hex())
            return found

        tma.decode_map = copied  # type: ignore[attr-defined]

    def _watch_matrices(self, what: str, kind: Any) -> None:
        decode: Callable[[int], Any] = kind.decode

        def watched(value: int) -> Any:
            found = decode(value)
            self.keep(what, replace(found, start_address=0), f"0x{value:016x}")
            return found

        kind.decode = staticmethod(watched)

    def write(self, path: Path) -> None:
        """All values, by what they are."""
        values = {
            what: sorted(value for kept in sorts.values() for value in kept)
            for what, sorts in sorted(self.found.items())
        }
        path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    recorder = Recorder()
    recorder.install()
    atexit.register(recorder.write, Path(sys.argv[1]))
    sys.argv = ["ptxemu", "exec", *sys.argv[2:]]
    main()
