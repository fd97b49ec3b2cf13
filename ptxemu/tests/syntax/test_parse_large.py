"""A kernel of 20 000 lines, as long as a compiler's largest."""

import pytest

from ptxemu.syntax.parser import parse_module

LINES = 20_000


def large_kernel():
    """Lines such as a compiler writes: every operand text about twice, a .loc every eighth."""
    lines = [".version 9.0", ".target sm_100a", ".address_size 64", '.file 1 "k.py"']
    lines += [".entry k()", "{", f".reg .b32 %r<{LINES}>;", f".reg .f32 %f<{LINES}>;"]
    lines += [".reg .pred %p<9>;", ".reg .b64 %rd<9>;"]
    while len(lines) < LINES - 2:
        n = len(lines)
        lines += [
            f"\t.loc\t1 {n} 12",
            f"\tadd.s32 \t%r{n}, %r{n // 2}, {n};",
            f"\tfma.rn.ftz.f32 \t%f{n}, %f{n // 2}, 0f3F{n:06X}, %f{n // 4};",
            f"\tld.shared.v4.b32 \t{{%r{n + 1}, %r{n + 2}, %r{n + 3}, %r{n + 4}}}, [%r{n}+{n}];",
            f"\tsetp.lt.s32 \t%p1, %r{n + 1}, %r{n + 2};",
            f"\t@%p1 bra \t$L__BB0_{n};",
            f"\tmov.b64 \t%rd1, {{%r{n + 3}, %r{n + 4}}};",
            f"$L__BB0_{n}:",
        ]
    return "\n".join([*lines, "ret;", "}"])


@pytest.mark.timeout(30)
def test_twenty_thousand_lines():
    kernel = parse_module(large_kernel()).functions["k"]
    blocks = len(kernel.labels)
    assert blocks > LINES // 8 - 10
    assert len(kernel.instructions) == 6 * blocks + 1
    last = kernel.instructions[-2]
    assert last.span.ptx_line == last.span.source_line + 7
    assert len({r.slot for r in kernel.registers}) == len(kernel.registers)
