"""ldmatrix, stmatrix and movmatrix: every count, with and without .trans."""

from collections.abc import Iterator

import numpy as np
from tests.silicon.programs.build import kernel, result
from tests.silicon.programs.case import Array, Program
from tests.silicon.programs.values import random_bytes, raw

PREPARE = """mad.wide.u32 %x0, %t, 16, %in; mad.lo.u32 %r1, %t, 16, %s;
ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%x0]; st.shared.v4.u32 [%r1], {%r2, %r3, %r4, %r5};
mad.wide.u32 %x1, %t, 4, %rows; ld.global.u32 %r6, [%x1]; add.u32 %r6, %r6, %s;
mad.wide.u32 %x2, %t, 16, %out; bar.sync 0;
"""


def _program(name: str, body: str) -> Program:
    rows = (np.argsort(raw(f"rows/{name}", 32)) * 16).astype(np.uint32).view(np.uint8)
    args = [
        ("out", result(512)),
        ("in", Array(random_bytes(f"matrix/{name}", 512))),
        ("rows", Array(rows)),
    ]
    return kernel(f"matrix_move/{name}", PREPARE + body, args, smem=512)


def programs() -> Iterator[Program]:
    """All of the family."""
    for n in (1, 2, 4):
        registers = ", ".join(f"%r{10 + i}" for i in range(n))
        stores = "".join(f"st.global.u32 [%x2+{4 * i}], %r{10 + i};" for i in range(n))
        for trans in ("", ".trans"):
            full = f"ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16"
            yield _program(f"ldmatrix.x{n}{trans}", f"{full} {{{registers}}}, [%r6];" + stores)
            full = f"stmatrix.sync.aligned.m8n8.x{n}{trans}.shared::cta.b16"
            values = ", ".join(f"%r{2 + i}" for i in range(n))
            body = f"""{full} [%r6], {{{values}}}; bar.sync 0;
                ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r1];
                st.global.v4.u32 [%x2], {{%r10, %r11, %r12, %r13}};"""
            yield _program(f"stmatrix.x{n}{trans}", body)
    body = """movmatrix.sync.aligned.m8n8.trans.b16 %r10, %r2; st.global.u32 [%x2], %r10;"""
    yield _program("movmatrix.trans", body)
