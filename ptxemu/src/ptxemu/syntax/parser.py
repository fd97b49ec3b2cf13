"""PTX text to a Module: the directives of the module and the functions in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ptxemu.errors import PtxSyntaxError, Span
from ptxemu.syntax import declarations, lexer
from ptxemu.syntax.ast import Function, Guard, Instruction, Module, Operand, Symbol, Variable
from ptxemu.syntax.lexer import Statement, StatementError, directive_word
from ptxemu.syntax.operands import call_operands, operands, predicate
from ptxemu.syntax.scopes import RegisterFile, Scope

# The body of a function: its statements in scopes to registers, labels and instructions.

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


_SHOWN = 160
_SHOWN_OF_ANY = 60


def parse_module(text: str, *, name: str = "<ptx>") -> Module:
    """Parse PTX text; `name` says in errors where it is from. Raises PtxSyntaxError."""
    reader = _ModuleReader(name)
    try:
        return reader.read(text)
    except lexer.StatementError as error:
        if not (".version" in text or ".target" in text):  # which begin every PTX text
            begins = next(filter(None, map(str.strip, text.splitlines())), "")[:_SHOWN_OF_ANY]
            message = f"{name}: is this PTX? It begins with {begins!r}"
            raise PtxSyntaxError(message, Span(1)) from None
        raise reader.located(error) from None


class _ModuleReader:
    """Reads the statements of a module one by one."""

    def __init__(self, name: str) -> None:
        self._module = Module((0, 0), "", 64, name=name)
        self._scope = Scope(None, -1, RegisterFile())
        self._variables: list[Variable] = []
        self._seen: set[str] = set()
        self._statement: lexer.Statement | None = None
        self._body: Body | None = None
        self._locations = Locations({})

    def read(self, text: str) -> Module:
        clean = lexer.blank_comments(text)
        self._locations = Locations(lexer.source_files(clean))
        pending = lexer.statements(clean)
        for statement in pending:
            self._statement = statement
            self._read_one(statement, pending)
        self._statement = None
        for directive in ("version", "target"):
            if directive not in self._seen:
                raise lexer.StatementError(f"the text has no .{directive} directive", 1)
        self._check_relocations()
        self._module.variables = tuple(self._variables)
        return self._module

    def located(self, error: lexer.StatementError) -> PtxSyntaxError:
        """The error with the position and the text of the statement that is being read."""
        statement = self._statement
        if self._body is not None and self._body.statement is not None:
            statement = self._body.statement
        message = str(error)
        if self._module.name != "<ptx>":
            message = f"{self._module.name}: {message}"
        if error.line is not None or statement is None:
            return PtxSyntaxError(message, Span(error.line or 1))
        if statement.kind == "statement" and "\n" in statement.text:
            message += " (is a ';' missing?)"
        shown = " ".join(statement.text.split())
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}..."
        span = Span(statement.line) if self._body is None else self._locations.span(statement.line)
        return PtxSyntaxError(f"{message}, in {shown!r}", span)

    def _read_one(self, statement: lexer.Statement, pending: Iterator[lexer.Statement]) -> None:
        kind, text, _ = statement
        self._seen.add(kind)
        if kind == "function":
            self._function(text, pending)
        elif kind == "statement":
            self._declaration(text)
        elif kind == "version":
            major, _, minor = text.partition(".")
            if len(text) > 9:
                raise lexer.StatementError(f"{text!r} is no version")
            self._module.version = (int(major), int(minor))
        elif kind == "target":
            self._module.target = text.split(",")[0].strip()
        elif kind == "address_size":
            if text not in ("32", "64"):
                raise lexer.StatementError(f"{text!r} is no address size")
            self._module.address_size = int(text)
        elif kind == "bad":
            raise lexer.StatementError("this is not a statement that ends with ';'")
        elif kind not in ("empty", "loc"):
            raise lexer.StatementError("this is not expected outside of a function")

    def _declaration(self, text: str) -> None:
        word = lexer.directive_word(text)
        if word == ".pragma":
            return
        if word == ".alias":
            alias, aliased, *rest = (*declarations.names(text, word), "", "")[:3]
            if aliased not in self._module.functions or rest[0]:
                raise lexer.StatementError(f"{aliased!r} is not a function")
            if not self._scope.has(alias):
                self._scope.declare_symbol(alias)
            self._module.functions[alias] = self._module.functions[aliased]
            return
        self._variables += self._declared_variables(text)

    def _declared_variables(self, text: str) -> list[Variable]:
        """New variables; an extern one may be declared again, and defined later."""
        aside = Scope(None, -1, RegisterFile())
        found = declarations.variables(text, aside)
        known = {variable.name: variable for variable in self._variables}
        for variable in found:
            if variable.name in known and known[variable.name].is_extern:
                self._variables.remove(known[variable.name])
            else:
                self._scope.declare_symbol(variable.name)
        return found

    def _function(self, text: str, pending: Iterator[lexer.Statement]) -> None:
        head = declarations.head(text)
        functions = self._module.functions
        if head.name in functions and bool(self._module.functions[head.name].instructions):
            is_again = True
        else:
            is_again = False
            if head.name not in functions:
                self._scope.declare_symbol(head.name)
            functions[head.name] = Function(
                head.name,
                head.is_entry,
                head.parameters,
                directives=head.directives,
                returns=head.returns,
            )
        opening = next(pending, None)
        if opening is not None and opening.kind == "empty":
            return
        if opening is None or opening.kind != "open":
            raise lexer.StatementError("a function's body or ';' is missing")
        if is_again:
            raise lexer.StatementError(f"{head.name} is defined twice")
        self._body = Body(functions[head.name], self._scope, self._locations)
        self._body.read(head, self._enclosed(pending))
        self._body = None

    def _enclosed(self, pending: Iterator[lexer.Statement]) -> list[lexer.Statement]:
        """The statements up to the brace that closes the function."""
        found: list[lexer.Statement] = []
        depth = 1
        for statement in pending:
            if statement.kind == "open":
                depth += 1
            elif statement.kind == "close":
                depth -= 1
                if depth == 0:
                    return found
            elif statement.kind in ("bad", "function"):
                self._statement = statement
                raise lexer.StatementError(
                    "this is not a statement that ends with ';'"
                    if statement.kind == "bad"
                    else "a function begins within a function: a '}' is missing"
                )
            found.append(statement)
        raise lexer.StatementError("the function's body is never closed")

    def _check_relocations(self) -> None:
        for variable in self._variables:
            for relocation in variable.relocations:
                if not self._scope.has(relocation.symbol):
                    raise lexer.StatementError(
                        f"{relocation.symbol}, of which {variable.name} holds the address, "
                        "is not declared",
                        1,
                    )
