"""PTX text to a Module: the directives of the module and the functions in it."""

from __future__ import annotations

from collections.abc import Iterator

from ptxemu.errors import PtxSyntaxError, Span
from ptxemu.syntax import declarations, lexer
from ptxemu.syntax.ast import Function, Module, Variable
from ptxemu.syntax.body import Body, Locations
from ptxemu.syntax.scopes import RegisterFile, Scope

_SHOWN = 160


def parse_module(text: str, *, name: str = "<ptx>") -> Module:
    """Parse PTX text; `name` says in errors where it is from. Raises PtxSyntaxError."""
    reader = _ModuleReader(name)
    try:
        return reader.read(text)
    except lexer.StatementError as error:
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
        if head.name in functions and self._is_defined(head.name):
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

    def _is_defined(self, name: str) -> bool:
        return bool(self._module.functions[name].instructions)

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
