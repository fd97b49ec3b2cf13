"""The body of a function: its statements in scopes to registers, labels and instructions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from ptxemu.errors import Span
from ptxemu.syntax import declarations
from ptxemu.syntax.ast import Function, Guard, Instruction, Operand, Symbol, Variable
from ptxemu.syntax.lexer import Statement, StatementError, directive_word
from ptxemu.syntax.operands import call_operands, operands, predicate
from ptxemu.syntax.scopes import RegisterFile, Scope

_INSTRUCTION = re.compile(
    r"(?>(?:@\s*+(?P<negated>!?)\s*+(?P<guard>[\w$%]++)\s++)?)"
    r"(?P<text>(?P<opcode>[A-Za-z]\w*+(?>(?:\s*+(?:\.|::)\w++)*))(?:\s++|(?=[\[{(!%])|$)(?P<rest>.*))",
    re.ASCII | re.DOTALL,
)

SourcePosition: TypeAlias = tuple[str | None, int | None, str | None]
"""File and line, and those of the library's code that is inlined there."""
_NOWHERE: SourcePosition = (None, None, None)
_LIBRARY = re.compile(
    r"/cuda(-[\d.]+)?/(.*/)?include/|/nvidia/.*/include/|/triton/language/|/nvidia_cutlass_dsl/"
    r"|/include/(cccl|crt|cub|cute|cutlass|cooperative_groups|thrust)/"
)


class Locations:
    """The source file and line that the last `.loc` named.

    Of inlined code it is the innermost line that is in no library: the user's.
    """

    def __init__(self, files: dict[int, str]) -> None:
        self._files = files
        self._users: dict[tuple[str, ...], SourcePosition] = {}
        """The user's line of each `.loc` before, by its words; a library's where there is none."""
        self.current = _NOWHERE

    def reset(self) -> None:
        """Forget the last `.loc`: a function begins."""
        self.current = _NOWHERE

    def move(self, text: str) -> None:
        """`file line column` and, where code was inlined, what follows; line 0 is no line."""
        place, _, after = text.partition(",")
        words, around = tuple(place.split()), tuple(after.split()[-3:])
        own = self._position(words)
        if around and own[0] is not None and _LIBRARY.search(own[0]):
            file, line, _ = self._users.get(around) or self._position(around)
            if file is not None and not _LIBRARY.search(file):
                own = file, line, f"{own[0]}:{own[1]}"
        self.current = self._users[words] = own

    def _position(self, words: tuple[str, ...]) -> SourcePosition:
        number, line = (int(word[:9]) for word in words[:2])
        return (self._files.get(number, f"file {number}"), line, None) if line else _NOWHERE

    def span(self, ptx_line: int) -> Span:
        """The position of a statement that begins on a PTX line."""
        return Span(ptx_line, *self.current)


class Body:
    """Reads one function's body into the function."""

    def __init__(self, function: Function, module_scope: Scope, locations: Locations) -> None:
        self._function = function
        self._locations = locations
        self._file = RegisterFile()
        self._outermost = Scope(module_scope, 0, self._file)
        self._scope = self._outermost
        self._instructions: list[Instruction] = []
        self._variables: list[Variable] = []
        self._opcodes: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._labels: set[str] = set()
        self._label = ""
        """The label that stands directly before the current statement, as resolved."""
        self.statement: Statement | None = None
        """The statement being read, for the message of an error."""

    def read(self, head: declarations.Head, statements: Sequence[Statement]) -> None:
        """The statements between the function's braces; StatementError where one is wrong."""
        names = {p.name for p in head.register_parameters}
        for parameter in (*head.returns, *head.parameters):
            if parameter.name in names:
                self._outermost.declare_register(parameter.name, parameter.type, 1)
            else:
                self._outermost.declare_symbol(parameter.name)
        self._locations.reset()
        self._read_scopes(self._scopes(statements), statements)
        function = self._function
        function.instructions = tuple(self._instructions)
        function.variables = tuple(self._variables)
        function.registers = tuple(self._file.registers)

    def _scopes(self, statements: Sequence[Statement]) -> list[Scope]:
        """The scopes in the order in which they open, with their labels declared."""
        scope = self._outermost
        scopes = [scope]
        for statement in statements:
            kind = statement.kind
            if kind == "label":
                self.statement = statement
                self._labels.add(scope.declare_symbol(statement.text))
            elif kind == "open":
                scope = Scope(scope, len(scopes), self._file)
                scopes.append(scope)
            elif kind == "close":
                assert scope.parent is not None
                scope = scope.parent
        return scopes

    def _read_scopes(self, scopes: Sequence[Scope], statements: Sequence[Statement]) -> None:
        opened = 0
        for statement in statements:
            self.statement = statement
            kind, text, line = statement
            if kind == "statement":
                if text[0] == ".":
                    self._directive(text)
                else:
                    self._instruction(text, line)
                self._label = ""
            elif kind == "label":
                self._label = self._resolved(text)
                self._function.labels[self._label] = len(self._instructions)
            elif kind == "loc":
                self._locations.move(text)
            elif kind == "open":
                opened += 1
                self._scope = scopes[opened]
                self._label = ""
            elif kind == "close":
                assert self._scope.parent is not None
                self._scope = self._scope.parent
            elif kind != "empty":
                raise StatementError("this is not expected in a function's body")

    def _resolved(self, name: str) -> str:
        found = self._scope.find(name)
        if not isinstance(found, Symbol):
            raise StatementError(f"{name} is not declared")
        return found.name

    def _instruction(self, text: str, line: int) -> None:
        match = _INSTRUCTION.fullmatch(text)
        if match is None:
            raise StatementError("this is not an instruction")
        negated, guard_name, plain, opcode, rest = match.groups()
        guard = None
        if guard_name is not None:
            guard = Guard(predicate(guard_name, self._scope), bool(negated))
        known = self._opcodes.get(opcode)
        if known is None:
            joined = "".join(opcode.split())
            known = self._opcodes[opcode] = (joined, tuple(joined.split(".")))
        found = self._operands(known[1][0], rest.rstrip())
        self._instructions.append(
            Instruction(
                known[0],
                known[1],
                found,
                guard,
                len(self._instructions),
                Span(line, *self._locations.current),
                " ".join(plain.split()),
            )
        )

    def _operands(self, base: str, text: str) -> tuple[Operand, ...]:
        """The operands of an instruction, by the first word of its opcode."""
        if base == "call":
            return call_operands(text, self._scope)
        if base == "bra":
            found = operands(text, self._scope)
            self._require_label(found[0].name if isinstance(found[0], Symbol) else text)
            return found
        return operands(text, self._scope) if text else ()

    def _directive(self, text: str) -> None:
        word = directive_word(text)
        if word == ".reg":
            declarations.registers(text, self._scope)
        elif word == ".pragma":
            return
        elif word == ".branchtargets":
            targets = tuple(self._resolved(name) for name in declarations.names(text, word))
            for name in targets:
                self._require_label(name)
            self._function.branch_targets[self._own_label(word)] = targets
        elif word == ".calltargets":
            functions = tuple(self._resolved(name) for name in declarations.names(text, word))
            self._function.call_targets[self._own_label(word)] = functions
        elif word == ".callprototype":
            self._function.prototypes[self._own_label(word)] = declarations.prototype(text)
        else:
            self._variables += declarations.variables(text, self._scope)

    def _require_label(self, name: str) -> None:
        if name not in self._labels:
            raise StatementError(f"{name} is not a label")

    def _own_label(self, directive: str) -> str:
        """The label of a directive that makes a list: it names the list and is no target."""
        if not self._label:
            raise StatementError(f"{directive} needs a label before it")
        del self._function.labels[self._label]
        return self._label
