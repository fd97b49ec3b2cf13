"""Operands: the text between the commas of an instruction to its AST."""

from __future__ import annotations

import re

from ptxemu.syntax import ast
from ptxemu.syntax.constants import evaluate, integer, number
from ptxemu.syntax.lexer import StatementError
from ptxemu.syntax.scopes import Scope

# The names of PTX's special registers, which need no declaration.

_VECTORS = (
    *("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid"),
    *("cluster_nctaid",),
)
_SCALARS = (
    *("laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid", "is_explicit_cluster"),
    *("cluster_ctarank", "cluster_nctarank", "lanemask_eq", "lanemask_le", "lanemask_lt"),
    *("lanemask_ge", "lanemask_gt", "clock", "clock_hi", "clock64", "globaltimer"),
    *("globaltimer_lo", "globaltimer_hi", "reserved_smem_offset_begin", "reserved_smem_offset_end"),
    *("reserved_smem_offset_cap", "reserved_smem_offset_0", "reserved_smem_offset_1"),
    *("total_smem_size", "aggr_smem_size", "dynamic_smem_size", "current_graph_exec"),
)

SPECIAL_REGISTERS: frozenset[str] = frozenset(
    [f"%{name}" for name in _SCALARS]
    + [f"%{name}{component}" for name in _VECTORS for component in ("", ".x", ".y", ".z", ".w")]
    + [f"%pm{index}{suffix}" for index in range(8) for suffix in ("", "_64")]
    + [f"%envreg{index}" for index in range(32)]
)
"""Every special register as written, components of vector registers included."""


_PIECE = re.compile(r"(?>(?:[^,()\[\]{}]++|\[[^\[\]]*+\]|\{[^{}]*+\}|\([^()]*+\))+)")
_NAME = re.compile(r"[A-Za-z_$%][\w$]*(?:\.[a-z]+)?", re.ASCII)
_PAIR = re.compile(r"([A-Za-z_$%][\w$]*)\s*\|\s*([A-Za-z_$%][\w$]*)", re.ASCII)
_BASE = re.compile(r"([A-Za-z_$%][\w$]*(?:\.[xyzwrgba])?)\s*(?:([+-])\s*(\S.*))?", re.ASCII | re.S)
_INDEXED = re.compile(r"[A-Za-z_$%][\w$]*\s*\[[^\[\]]*\]", re.ASCII)
_SINK = ast.Sink()


def split(text: str) -> list[str]:
    """Cut at the commas that stand outside of brackets, braces and parentheses."""
    if "[" not in text and "{" not in text and "(" not in text:
        return text.split(",")
    pieces = _PIECE.findall(text)
    if ",".join(pieces) != text:
        pieces = _split_nested(text)
    return pieces


def _split_nested(text: str) -> list[str]:
    """The same for any depth, which constant expressions may have."""
    pieces: list[str] = []
    depth = start = 0
    for match in re.finditer(r"[,()\[\]{}]", text):
        mark = match.group()
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
            if depth < 0:
                raise StatementError(f"{mark!r} closes nothing")
        elif depth == 0:
            pieces.append(text[start : match.start()])
            start = match.end()
    if depth:
        raise StatementError("a bracket, brace or parenthesis is not closed")
    return [*pieces, text[start:]]


def operands(text: str, scope: Scope) -> tuple[ast.Operand, ...]:
    """The operands of an instruction other than `call`."""
    known = scope.operands
    found: list[ast.Operand] = []
    for piece in split(text):
        piece = piece.strip()
        operand = known.get(piece)
        if operand is None:
            operand = known[piece] = _operand(piece, scope)
        found.append(operand)
    return tuple(found)


def call_operands(text: str, scope: Scope) -> tuple[ast.Operand, ...]:
    """`(returns), target, (arguments), prototype`, of which only the target must be there."""
    pieces = [piece.strip() for piece in split(text)]
    if not text:
        raise StatementError("a call names no function")
    returns = _list(pieces.pop(0), scope) if pieces[0].startswith("(") else ast.Vector(())
    if not pieces:
        raise StatementError("a call names no function")
    target = scalar(pieces.pop(0), scope)
    if not isinstance(target, ast.Symbol | ast.Register):
        raise StatementError("a call's target is neither a function nor a register")
    has_arguments = bool(pieces) and pieces[0].startswith("(")
    arguments = _list(pieces.pop(0), scope) if has_arguments else ast.Vector(())
    if len(pieces) > 1:
        raise StatementError(f"{pieces[1]!r} is not expected in a call")
    return (returns, target, arguments, *(scalar(piece, scope) for piece in pieces))


def _list(text: str, scope: Scope) -> ast.Vector:
    if not text.endswith(")"):
        raise StatementError(f"{text!r} is not a list in parentheses")
    inner = text[1:-1].strip()
    return ast.Vector(
        tuple(scalar(piece.strip(), scope) for piece in split(inner)) if inner else ()
    )


def register(name: str, scope: Scope) -> ast.Register:
    """The register of that name."""
    found = scope.find(name)
    if not isinstance(found, ast.Register):
        raise StatementError(f"register {name} is not declared")
    return found


def predicate(name: str, scope: Scope) -> ast.Register:
    """The register of that name, which must be a predicate."""
    found = register(name, scope)
    if found.type != "pred":
        raise StatementError(f"{name} is .{found.type}, not a predicate")
    return found


def scalar(text: str, scope: Scope) -> ast.Scalar:
    """An operand, or an element of one, that is neither a vector nor an address."""
    known = scope.operands.get(text)
    if known is None:
        known = scope.operands[text] = _operand(text, scope)
    if isinstance(known, ast.Vector | ast.Pair | ast.Address):
        raise StatementError(f"{text!r} cannot be an element here")
    return known


def _operand(text: str, scope: Scope) -> ast.Operand:
    if not text:
        raise StatementError("an operand is missing")
    first = text[0]
    if first in "0123456789-.":
        literal = number(text)
        return literal if literal is not None else ast.IntImmediate(evaluate(text))
    if first == "[":
        return _address(text, scope)
    if first == "{":
        return _vector(text, scope)
    if _NAME.fullmatch(text):
        return _named(text, scope)
    if first == "!":
        name = text[1:].lstrip()
        if _NAME.fullmatch(name):
            return ast.NegatedRegister(predicate(name, scope))
    pair = _PAIR.fullmatch(text)
    if pair is not None:
        return ast.Pair(_destination(pair[1], scope), _destination(pair[2], scope))
    if _INDEXED.fullmatch(text):
        raise StatementError(f"{text} indexes a variable; only [name+bytes] is known here")
    if _BASE.fullmatch(text) and not text.startswith("WARP_SZ"):
        base, offset = _based(text, scope)
        if not isinstance(base, ast.Symbol):
            raise StatementError(f"{text!r} is not an operand")
        return ast.Symbol(base.name, offset)
    return ast.IntImmediate(evaluate(text))


def _named(name: str, scope: Scope) -> ast.Operand:
    found = scope.find(name)
    if found is not None:
        return found
    if name == "_":
        return _SINK
    if name in SPECIAL_REGISTERS:
        return ast.SpecialRegister(name)
    if name == "WARP_SZ":
        return ast.IntImmediate(evaluate(name))
    what = "register " if name.startswith("%") else ""
    raise StatementError(f"{what}{name} is not declared")


def _destination(name: str, scope: Scope) -> ast.Register | ast.Sink:
    return _SINK if name == "_" else register(name, scope)


def _vector(text: str, scope: Scope) -> ast.Vector:
    if not text.endswith("}"):
        raise StatementError(f"{text!r} is not a vector")
    return ast.Vector(tuple(scalar(piece.strip(), scope) for piece in split(text[1:-1])))


def _address(text: str, scope: Scope) -> ast.Address:
    if not text.endswith("]"):
        raise StatementError(f"{text!r} is not an address")
    inner, *rest = (piece.strip() for piece in split(text[1:-1]))
    coordinates = None
    if rest:
        if len(rest) > 1 or not rest[0].startswith("{"):
            raise StatementError(f"{text!r} is not [address] nor [tensor map, {{coordinates}}]")
        coordinates = _vector(rest[0], scope).elements
    if inner[:1].isdigit() or inner[:1] in ("-", "(", ""):
        return ast.Address(ast.IntImmediate(evaluate(inner)), 0, coordinates)
    base, offset = _based(inner, scope)
    return ast.Address(base, offset, coordinates)


def _based(text: str, scope: Scope) -> tuple[ast.Register | ast.Symbol, int]:
    """`base`, `base+constant` or `base-constant`."""
    match = _BASE.fullmatch(text)
    if match is None:
        raise StatementError(f"{text!r} is not an address")
    name, sign, constant = match.groups()
    base = scalar(name, scope)
    if not isinstance(base, ast.Register | ast.Symbol):
        raise StatementError(f"{name} is no base of an address")
    if constant is None:
        return base, 0
    value = integer(constant)
    if value is None:
        return base, evaluate(f"{sign}{constant}")
    return base, value if sign == "+" else -value
