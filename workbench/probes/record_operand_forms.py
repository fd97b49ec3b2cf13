"""Which operand forms of tcgen05.mma a script's kernels use, seen on the emulator.

    python -m workbench.probes.record_operand_forms OUT.json --arch sm_100a SCRIPT [ARGUMENTS]

Runs `ptxemu exec` with the arguments behind OUT.json and writes one list a form, sorted: kind,
cta_group, .ws, M, N, A and B (major-ness and swizzle, or TMEM), whether the halves of the lanes
ever held different A's, how many instructions. workbench/lab/forms_witnesses.py holds what it
found in strangers' kernels.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ptxemu.cli.main import main
from ptxemu.descriptors import Tcgen05Descriptor
from ptxemu.engines import tcgen05_mma

Form = tuple[str, int, bool, int, int, str, str]


class Recorder:
    """Counts products by form; put in front of the emulator's own class."""

    def __init__(self) -> None:
        self.count: Counter[Form] = Counter()
        self.distinct: set[Form] = set()

    def install(self) -> None:
        """Watch every tcgen05.mma from now on."""
        product = tcgen05_mma._Product
        execute_in = product._execute_in

        def watched(this: Any, cta: Any, rank: int, right: Any) -> Any:
            form = self._form(this)
            self.count[form] += rank == 0
            if this._a is None:
                cells = cta.tmem[:, this._a_column : this._a_column + 8]
                if (cells[:64] != cells[64:]).any():
                    self.distinct.add(form)
            return execute_in(this, cta, rank, right)

        product._execute_in = watched  # type: ignore[method-assign]

    def _form(self, product: Any) -> Form:
        form, descriptor = product._form, product._descriptor
        a = "TMEM" if product._a is None else _layout(product._a_major, product._a)
        b = _layout(product._b_major, product._b)
        return form.kind, form.cta_group, form.ws, descriptor.m, descriptor.n, a, b

    def write(self, path: Path) -> None:
        """All forms, sorted."""
        rows = [[*form, form in self.distinct, n] for form, n in sorted(self.count.items())]
        path.write_text(json.dumps(rows, indent=1) + "\n")


def _layout(major: Any, descriptor: Tcgen05Descriptor) -> str:
    swizzle = descriptor.swizzle
    return f"{major.value} {swizzle.span}B" + ("" if swizzle.atomicity == 0 else " atom")


if __name__ == "__main__":
    recorder = Recorder()
    recorder.install()
    atexit.register(recorder.write, Path(sys.argv[1]))
    sys.argv = ["ptxemu", "exec", *sys.argv[2:]]
    main()
