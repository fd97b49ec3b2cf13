"""Small PTX texts whose need of registers is known."""

from __future__ import annotations

HEAD = ".version 8.6\n.target {target}\n.address_size 64\n"


def sums_of(count: int, target: str = "sm_90a", directive: str = ".reqntid 128") -> str:
    """A kernel that holds `count` fp32 values at once: all loaded before any is used, twice."""
    loads = "\n".join(f"ld.global.f32 %f{i}, [%rd2+{512 * i}];" for i in range(count))
    mixes = "\n".join(
        f"fma.rn.f32 %f{i}, %f{i}, %f{(7 * i + 3) % count}, %f{(i + 1) % count};"
        for i in range(count)
    )
    stores = "\n".join(f"st.global.f32 [%rd2+{512 * i}], %f{i};" for i in range(count))
    return HEAD.format(target=target) + (
        f".visible .entry sums(.param .u64 p) {directive}\n{{\n"
        f".reg .f32 %f<{count}>; .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .pred %p<2>;\n"
        "ld.param.u64 %rd1, [p]; cvta.to.global.u64 %rd1, %rd1; mov.u32 %r1, %tid.x;\n"
        "mul.wide.u32 %rd3, %r1, 4; add.s64 %rd2, %rd1, %rd3;\n"
        f"{loads}\nmov.u32 %r2, 0;\nAGAIN:\n{mixes}\nadd.u32 %r2, %r2, 1;\n"
        f"setp.lt.u32 %p1, %r2, 100;\n@%p1 bra AGAIN;\n{stores}\nret;\n}}\n"
    )


def roles_of(count: int, more: int, fewer: int = 24, target: str = "sm_90a") -> str:
    """256 threads give registers up, the other 256 take `more` each for `count` values."""
    body = sums_of(count, target).partition("mul.wide")[2].rpartition("ret;")[0]
    start, _, _ = sums_of(count, target, ".reqntid 512, 1, 1 .minnctapersm 1").partition("mul.wide")
    return (
        start
        + ".reg .pred %q;\nsetp.lt.u32 %q, %r1, 256;\n@%q bra SMALL;\n"
        + f"setmaxnreg.inc.sync.aligned.u32 {more};\nmul.wide{body}ret;\n"
        + f"SMALL:\nsetmaxnreg.dec.sync.aligned.u32 {fewer};\n"
        + "mul.wide.u32 %rd3, %r1, 4; add.s64 %rd2, %rd1, %rd3;\n"
        + "st.global.u32 [%rd2+65536], %r1;\nret;\n}\n"
    )
