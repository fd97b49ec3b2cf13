"""Random loops and branches with loads and stores: programs for whatever runs them."""

import random

from tests.kernel_run import source

PROLOGUE = """
mov.u32 %r0, %tid.x; mov.u32 %r9, %ctaid.x; mad.lo.u32 %r1, %r9, 64, %r0;
mov.u32 %r2, %r1; mad.lo.u32 %r3, %r1, 40503, 17; mov.u32 %r4, 1; mov.u32 %r5, 0;
mov.u32 %r20, smem; mov.u64 %rd9, depot; and.b32 %r21, %r0, 63; shl.b32 %r21, %r21, 3;
cvta.shared.u64 %rd8, 0; cvt.u64.u32 %rd7, %r20; add.u64 %rd8, %rd8, %rd7;
cvt.rn.f32.u32 %f0, %r0; mov.f32 %f1, 0f3F800000;
"""
EPILOGUE = """
mul.wide.u32 %rd0, %r1, 32; add.u64 %rd0, %rd0, %rd_out;
st.global.v4.u32 [%rd0], {%r2, %r3, %r4, %r5}; mov.b32 %r6, %f1; st.global.u32 [%rd0+16], %r6;
"""
PURE = [
    "mad.lo.u32 %r{a}, %r{b}, 1664525, %r{c};",
    "xor.b32 %r{a}, %r{b}, %r{c};",
    "shr.u32 %r{a}, %r{b}, 3;",
    "@%p{p} add.u32 %r{a}, %r{b}, 77;",
    "setp.lt.u32 %p{p}, %r{a}, %r{b};",
    "setp.ne.s32 %p{p}, %r{a}, 5;",
    "fma.rn.f32 %f1, %f0, %f1, %f1;",
    "selp.b32 %r{a}, %r{b}, %r{c}, %p{p};",
]
INDEX = "and.b32 %r7, %r{a}, 31; mul.wide.u32 %rd1, %r7, 8; "
OWN = "add.u64 %rd1, %rd1, %rd_own; mul.wide.u32 %rd2, %r1, 256; add.u64 %rd1, %rd1, %rd2; "
ACCESSES = [
    INDEX + OWN + "ld.global.u32 %r{b}, [%rd1];",
    INDEX + OWN + "ld.global.v2.u32 {{%r{b}, %r{c}}}, [%rd1];",
    INDEX + OWN + "@%p{p} st.global.u32 [%rd1+4], %r{b};",
    INDEX + OWN + "st.global.v2.b32 [%rd1], {{%r{b}, %r{c}}};",
    INDEX + OWN + "st.u16 [%rd1+2], %r{b};",
    INDEX + OWN + "ld.s8 %r{b}, [%rd1+1];",
    INDEX + OWN + "ld.u8 %r{b}, [%rd1+3];",
    INDEX + "add.u64 %rd1, %rd1, %rd9; st.local.u32 [%rd1], %r{b};",
    INDEX + "add.u64 %rd1, %rd1, %rd9; @!%p{p} ld.local.u32 %r{b}, [%rd1];",
    "add.u32 %r7, %r20, %r21; st.shared.u32 [%r7], %r{b};",
    "add.u32 %r7, %r20, %r21; ld.shared.u32 %r{b}, [%r7+4];",
    "cvt.u64.u32 %rd1, %r21; add.u64 %rd1, %rd1, %rd8; ld.u32 %r{b}, [%rd1];",
]


class Author:
    """Writes random loops and branches."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._labels = 0

    def body(self, depth=3):
        return "\n".join(self._statement(depth) for _ in range(self._random.randint(2, 5)))

    def _statement(self, depth):
        kind = self._random.random()
        if depth and kind < 0.25:
            return self._loop(depth - 1)
        if depth and kind < 0.5:
            return self._branch(depth - 1)
        template = self._random.choice(ACCESSES if kind < 0.75 else PURE)
        a, b, c = (self._random.randint(2, 5) for _ in range(3))
        return template.format(a=a, b=b, c=c, p=self._random.randint(0, 1))

    def _loop(self, depth):
        self._labels += 1
        label, counter, again = f"L{self._labels}", f"%r{30 + depth}", f"%p{5 + depth}"
        rounds = self._random.choice(["3", "%r0", "%r2", "%r3"])
        return (
            f"and.b32 {counter}, {rounds}, 3;\n{label}:\n{self.body(depth)}\n"
            f"add.u32 {counter}, {counter}, 1; setp.lt.u32 {again}, {counter}, 5;\n"
            f"@{again} bra {label};"
        )

    def _branch(self, depth):
        self._labels += 1
        label = f"B{self._labels}"
        guard = self._random.choice(["%p0", "!%p1"])
        return f"@{guard} bra {label};\n{self.body(depth)}\n{label}:"


def text(body):
    local = ".local .align 8 .b8 depot[256];\n"
    return source(
        f"{local}{PROLOGUE}mov.u32 %r40, 0; LOOP:\n{body}\n"
        f"add.u32 %r40, %r40, 1; setp.lt.u32 %p9, %r40, 4; @%p9 bra LOOP;{EPILOGUE}",
        ["out", "own"],
        shared=1024,
    )
