"""PTX text of element-wise programs: a thread an element, one instruction in the middle."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.silicon.programs.case import EXACT, Array, Bytes, Check, Program, TensorMap
from tests.silicon.programs.values import typed

POISON = 0xA5


def header(version: str = "8.3", target: str = "sm_90a") -> str:
    """The three lines that open a module."""
    return f".version {version}\n.target {target}\n.address_size 64\n"


def size_of(kind: str) -> int:
    """Bytes of a PTX type; packed pairs count both halves."""
    if kind.endswith("x2"):
        return 2 * size_of(kind[:-2])
    return {"bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}.get(kind) or int(kind[1:]) // 8


def result(size: int) -> Array:
    """An output buffer full of poison."""
    return Array(np.full(size, POISON, np.uint8), recorded=True)


def elementwise(
    name: str,
    body: str,
    ins: Sequence[str],
    outs: Sequence[str],
    *,
    count: int = 64,
    data: Sequence[Bytes] | None = None,
    check: Check = EXACT,
    version: str = "8.3",
    registers: str = "",
    narrow: bool = False,
) -> Program:
    """A thread an element: inputs in a, b, c, ..., results from d, e, f2, ...

    Args:
        name: "family/instruction"; it also seeds the inputs.
        body: instructions between the loads and the stores; t is the thread's index.
        ins: PTX types of a, b, c (sub-word ones are loaded zero-extended into 16 bits).
        outs: PTX types of d, e, f.
        data: the inputs' bytes where they are not the type's usual ones.
        registers: further declarations.
        narrow: 8-bit operands live in registers of 8 bits, not of 16.
    """
    smallest = 1 if narrow else 2
    results, operands = "def"[: len(outs)], "abcghi"[: len(ins)]
    names = [f"o{r}" for r in results] + [f"i{o}" for o in operands]
    lines = [header(version), ".visible .entry k("]
    lines.append(", ".join(f".param .u64 {n}" for n in names) + ")\n{")
    lines.append("  .reg .b32 t; .reg .b64 w; .reg .pred p, q, r;")
    for register, kind in zip(results + operands, [*outs, *ins], strict=True):
        lines.append(f"  .reg .b{8 * max(size_of(kind), smallest)} {register};")
    lines += [f"  {registers}", "  mov.u32 t, %tid.x;"]
    for operand, kind in zip(operands, ins, strict=True):
        lines.append(_address(f"i{operand}", size_of(kind)))
        unsigned = "u" if size_of(kind) == 1 else "b"
        lines.append(f"  ld.global.{unsigned}{8 * size_of(kind)} {operand}, [w];")
    lines += [f"  {line.strip()}" for line in body.strip().splitlines()]
    for register, kind in zip(results, outs, strict=True):
        lines.append(_address(f"o{register}", size_of(kind)))
        unsigned = "u" if size_of(kind) == 1 else "b"
        lines.append(f"  st.global.{unsigned}{8 * size_of(kind)} [w], {register};")
    lines.append("  ret;\n}\n")
    given = data or [typed(f"{name}/{o}", k, count) for o, k in zip(operands, ins, strict=True)]
    for values, kind in zip(given, ins, strict=True):
        if len(values) != count * size_of(kind):
            raise ValueError(f"{name}: {len(values)} bytes of input for {count} of {kind}")
    arrays = [result(count * size_of(k)) for k in outs] + [Array(v) for v in given]
    return Program(name, "\n".join(lines), tuple(arrays), block=count, check=check)


def operation(
    family: str, opcode: str, ins: Sequence[str], outs: Sequence[str], name: str = "", **rest: Any
) -> Program:
    """One instruction d, a, b...: `elementwise`, by default under the instruction's name."""
    operands = ", ".join("dabcghi"[: 1 + len(ins)])
    return elementwise(f"{family}/{name or opcode}", f"{opcode} {operands};", ins, outs, **rest)


def _address(parameter: str, size: int) -> str:
    return f"  ld.param.u64 w, [{parameter}]; mad.wide.u32 w, t, {size}, w;"


def kernel(
    name: str,
    body: str,
    args: Sequence[tuple[str, Array | TensorMap | int]],
    *,
    declarations: str = "",
    version: str = "8.3",
    block: int = 32,
    grid: int = 1,
    cluster: int = 1,
    smem: int = 0,
    check: Check = EXACT,
) -> Program:
    """A free-form kernel: `args` are loaded into %registers of their names before the body.

    %t is the thread's index in the CTA, %s the address of dynamic shared memory; %r0-%r79,
    %x0-%x39 (64 bits), %h0-%h19 (16 bits), %p0-%p19 are free. Braces in `body` need no care.
    """
    parameters = ", ".join(_parameter(n, a) for n, a in args)
    lines = [header(version), ".extern .shared .align 1024 .b8 dynamic_smem[];"]
    lines.append(f".visible .entry k({parameters})")
    if cluster > 1:
        lines.append(f"  .explicitcluster .reqnctapercluster {cluster}, 1, 1")
    lines.append("{\n  .reg .b32 %r<80>, %t, %s; .reg .b64 %x<40>; .reg .b16 %h<20>;")
    lines.append("  .reg .pred %p<20>;")
    lines.append(declarations)
    lines.append("  mov.u32 %t, %tid.x; mov.u32 %s, dynamic_smem;")
    for n, a in args:
        if isinstance(a, TensorMap):
            lines.append(f"  .reg .b64 %{n}; mov.b64 %{n}, p_{n}; cvta.param.u64 %{n}, %{n};")
            continue
        bits = 64 if isinstance(a, Array) else 32
        lines.append(f"  .reg .b{bits} %{n}; ld.param.u{bits} %{n}, [p_{n}];")
        if bits == 64:
            lines.append(f"  cvta.to.global.u64 %{n}, %{n};")
    lines += [f"  {line.strip()}" for line in body.strip().splitlines()]
    lines.append("  ret;\n}\n")
    return Program(
        name,
        "\n".join(lines),
        tuple(a for _, a in args),
        block=block,
        grid=grid,
        cluster=cluster,
        smem=smem,
        check=check,
    )


def _parameter(name: str, arg: Array | TensorMap | int) -> str:
    if isinstance(arg, TensorMap):
        return f".param .align 64 .b8 p_{name}[128]"
    return f".param .u{64 if isinstance(arg, Array) else 32} p_{name}"
