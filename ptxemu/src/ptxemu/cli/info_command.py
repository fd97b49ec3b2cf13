"""`ptxemu info`: what a PTX file holds, which instructions it needs, and which are missing."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ptxemu import api
from ptxemu.cli.help_text import HelpFormatter
from ptxemu.cli.kernel_names import demangled
from ptxemu.cli.kinds import SOURCE, ptx_of
from ptxemu.cli.terminal import write_out
from ptxemu.cuda.fatbin import ptx_of_program
from ptxemu.errors import IllegalInstructionError, UnsupportedInstructionError
from ptxemu.isa import registry
from ptxemu.machine.layout import Layout
from ptxemu.saved_launch import is_saved_launch, load_launch
from ptxemu.syntax.ast import Function, Instruction, Parameter

_CONTROL = ("bra", "brx", "call", "ret", "exit")
_TENSOR_MAP_BYTES = 128

_HELP = """\
List the kernels of a PTX file: parameters, shared memory, directives, the opcodes they use with
their counts, and the instructions that ptxemu does not have.

Exit code 1 if an instruction is missing, so that CI can ask "would this run?"."""


def add_parser(commands: Any, name: str) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        name,
        help="list kernels, parameters, opcodes, and what is missing",
        description=_HELP,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("ptx", type=Path, help="PTX, a saved launch, a source (.cu), a program")
    parser.add_argument("--kernel", help="only this entry point")
    parser.add_argument("--opcodes", action="store_true", help="also list every opcode with count")
    parser.add_argument("--json", action="store_true", help="machine-readable, complete")
    parser.set_defaults(carry_out=carry_out)


def carry_out(options: argparse.Namespace) -> int:
    """Print the facts; 1 if an instruction is missing."""
    file = str(options.ptx)
    with ptx_of(options) if options.ptx.suffix == SOURCE else nullcontext():
        modules = _load(options.ptx)
    known = [(one, name) for one in modules for name in one.kernels]
    chosen = [pair for pair in known if options.kernel in (None, pair[1])]
    if options.kernel and not chosen:
        names = ", ".join(name for _, name in known)
        raise ValueError(f"--kernel: expected one of {names}; got {options.kernel!r}")
    kernels = [describe(module, module.syntax.kernels[name]) for module, name in chosen]
    facts = {
        "file": file,
        "version": "{}.{}".format(*modules[0].syntax.version),
        "target": modules[0].syntax.target,
        "kernels": kernels,
    }
    if options.json:
        write_out(json.dumps(facts, indent=2) + "\n")
    else:
        write_out(_text(facts, with_opcodes=options.opcodes))
    return 1 if any(kernel["missing"] for kernel in kernels) else 0


def _load(path: Path) -> list[api.Module]:
    if is_saved_launch(path):
        return [load_launch(path).module]
    return list(map(api.load, ptx_of_program(str(path)))) or [api.load(path)]


def describe(module: api.Module, function: Function) -> dict[str, Any]:
    """The facts about one kernel, ready for JSON."""
    layout = Layout(module.syntax, function, 0)
    dynamic = [v.name for v in (*module.syntax.variables, *function.variables) if v.is_extern]
    opcodes = Counter(instruction.opcode for instruction in function.instructions)
    return {
        "name": function.name,
        "instructions": len(function.instructions),
        "registers": len(function.registers),
        "parameters": [_parameter(p) for p in function.parameters],
        "static_shared_bytes": layout.static_shared_bytes,
        "dynamic_shared": dynamic,
        "local_bytes": layout.local_bytes,
        "directives": {key: list(value) for key, value in function.directives.items()},
        "opcodes": dict(sorted(opcodes.items())),
        "missing": _missing(function),
    }


def _parameter(parameter: Parameter) -> dict[str, Any]:
    facts = {
        "name": parameter.name,
        "type": parameter.type,
        "size": parameter.size,
        "align": parameter.align,
        "offset": parameter.offset,
    }
    if parameter.size == _TENSOR_MAP_BYTES and parameter.align >= 64:
        facts["looks_like"] = "tensor map"
    return facts


def _missing(function: Function) -> list[dict[str, Any]]:
    """Instructions that do not decode, one entry an opcode and reason."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for instruction in function.instructions:
        reason = why_missing(instruction)
        if reason is None:
            continue
        entry = found.setdefault(
            (instruction.opcode, reason),
            {"opcode": instruction.opcode, "why": reason, "count": 0, "lines": []},
        )
        entry["count"] += 1
        if len(entry["lines"]) < 5:
            entry["lines"].append(instruction.span.ptx_line)
    return list(found.values())


def why_missing(instruction: Instruction) -> str | None:
    """Why ptxemu cannot run an instruction, or None if it can."""
    if instruction.modifiers[0] in _CONTROL:
        return None
    try:
        registry.decode(instruction)
    except (UnsupportedInstructionError, IllegalInstructionError) as error:
        text = str(error)
        return text.split(f"{instruction.opcode}: ", 1)[-1]
    return None


def _text(facts: dict[str, Any], *, with_opcodes: bool) -> str:
    lines = [f"{facts['file']}: PTX {facts['version']}, target {facts['target']}"]
    for kernel in facts["kernels"]:
        lines += _kernel_text(kernel, with_opcodes=with_opcodes)
    return "\n".join(lines) + "\n"


def _kernel_text(kernel: dict[str, Any], *, with_opcodes: bool) -> list[str]:
    lines = ["", f"kernel {demangled(kernel['name'])}"]
    forms, bases = len(kernel["opcodes"]), len({op.split(".")[0] for op in kernel["opcodes"]})
    lines.append(
        f"  {kernel['instructions']} instructions, {forms} forms of {bases} opcodes, "
        f"{kernel['registers']} registers"
    )
    shared = f"{kernel['static_shared_bytes']} bytes static"
    if kernel["dynamic_shared"]:
        shared += f", dynamic behind it ({', '.join(kernel['dynamic_shared'])})"
    lines.append(f"  shared memory: {shared}; local: {kernel['local_bytes']} bytes a thread")
    for key, value in kernel["directives"].items():
        lines.append(f"  .{key} {', '.join(map(str, value))}".rstrip())
    for index, parameter in enumerate(kernel["parameters"]):
        guess = f"  ({parameter['looks_like']})" if "looks_like" in parameter else ""
        lines.append(
            f"  parameter {index}: .{parameter['type']} "
            f"{parameter['name'].removeprefix(kernel['name'] + '_')}, "
            f"{parameter['size']} bytes, align {parameter['align']}{guess}"
        )
    if with_opcodes:
        lines += [f"  {count:7}  {opcode}" for opcode, count in kernel["opcodes"].items()]
    if not kernel["missing"]:
        lines.append("  every instruction is known")
    for entry in kernel["missing"]:
        where = ", ".join(map(str, entry["lines"]))
        lines.append(
            f"  MISSING {entry['opcode']}: {entry['why']} ({entry['count']} times; line {where})"
        )
    return lines
