"""Runs one pure instruction on lanes, as a block of a kernel would."""

from types import SimpleNamespace

import numpy as np

from ptxemu.isa import registry
from ptxemu.machine.blocks import Block
from ptxemu.machine.lanes import FULL, STORAGE
from ptxemu.syntax.parser import parse_module

LANES = 32
_REGISTER_TYPES = {
    "bool": "pred",
    "uint16": "b16",
    "int16": "b16",
    "float16": "b16",
    "uint32": "b32",
    "int32": "b32",
    "float32": "f32",
    "uint64": "b64",
    "int64": "b64",
    "float64": "f64",
}


def parse(body, registers=""):
    """The kernel with these instructions."""
    return parse_module(
        ".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k()\n{\n"
        f"{registers}\n{body}\nret;\n}}\n"
    ).functions["k"]


def decode(text, registers=""):
    """Decode one instruction."""
    return registry.decode(parse(text, registers).instructions[0])


def run(body, results, mask=FULL, **lanes):
    """Execute instructions; registers start as `lanes` say.

    `results` names the registers to give back and the NumPy type of each: "d": np.float32.
    """
    declared = {name: _REGISTER_TYPES[np.dtype(a.dtype).name] for name, a in lanes.items()}
    for name, dtype in results.items():
        declared.setdefault(name, _REGISTER_TYPES[np.dtype(dtype).name])
    declarations = " ".join(f".reg .{type_} %{name};" for name, type_ in declared.items())
    function = parse(body, declarations)
    registers = [np.zeros(LANES, STORAGE[r.type]) for r in function.registers]
    slots = {r.name: r.slot for r in function.registers}
    for name, values in lanes.items():
        if f"%{name}" in slots:
            storage = STORAGE[declared[name]]
            registers[slots[f"%{name}"]] = np.ascontiguousarray(values).view(storage)
    warp = SimpleNamespace(registers=registers)
    code = [(i, registry.decode(i)) for i in function.instructions[:-1]]
    with np.errstate(all="ignore"):
        block = Block(code)
        block.run(warp, mask)
    found = [registers[slots[f"%{name}"]].view(np.dtype(dtype)) for name, dtype in results.items()]
    return found[0] if len(found) == 1 else found


def apply(opcode, result, *operands, constants=()):
    """Execute `opcode d, operands..., constants...` on any number of lanes.

    `result` is the NumPy type of d.
    """
    size = max(operand.size for operand in operands)
    padded = -(-size // LANES) * LANES
    columns = [np.resize(operand, padded) for operand in operands]
    names = "abcefg"[: len(columns)]
    sources = [f"%{name}" for name in names] + [str(constant) for constant in constants]
    body = f"{opcode} %d, {', '.join(sources)};"
    parts = [
        run(
            body,
            {"d": result},
            **{n: c[at : at + LANES] for n, c in zip(names, columns, strict=True)},
        )
        for at in range(0, padded, LANES)
    ]
    return np.concatenate(parts)[:size]
