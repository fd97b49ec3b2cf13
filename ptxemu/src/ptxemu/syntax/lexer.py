"""Cut PTX text into statements, and a declaration into tokens, by regular expressions only."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple


class StatementError(Exception):
    """An error in a statement; the parser adds its position, and makes it a PtxSyntaxError."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class Statement(NamedTuple):
    """A piece of the text that stands for itself, without its closing semicolon."""

    kind: str
    """version, target, address_size, loc, function, open, close, empty, label or statement."""
    text: str
    line: int
    """The line it begins on, from 1."""


_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/|/\*|^[ \t]*#[^\n]*', re.DOTALL | re.MULTILINE)

# Groups that may not give back what they took are atomic, (?>(?:...)*): a possessive group,
# (?:...)*+, does not match what it should by Python 3.11.0 to 3.11.4.

# Three levels of braces: a vector, a tensor address, an initialiser of a 3-dimensional array.
_BRACES = r"\{(?>(?:[^{};]++|\{(?>(?:[^{};]++|\{[^{};]*+\})*)\})*)\}"

_STATEMENT = re.compile(
    r"(?P<space>\s++)"
    r"|(?P<label>[A-Za-z_$%][\w$]*+)\s*+:(?!:)"
    r"|\.loc\s++(?P<loc>[0-9]++\s++[0-9]++(?>(?:\s++[0-9]++)?)"
    r"(?>(?:\s*+,\s*+function_name\s++[\w$.]++(?>(?:\s*+\+\s*+[0-9]++)?)"
    r"\s*+,\s*+inlined_at\s++[0-9]++\s++[0-9]++\s++[0-9]++)?))"
    r"|\.version\s++(?P<version>[0-9]++\.[0-9]++)"
    r"|\.target\s++(?P<target>\w++(?>(?:\s*+,\s*+\w++)*))"
    r"|\.address_size\s++(?P<address_size>[0-9]++)"
    r'|\.file\s++(?P<file>[0-9]++\s*+"[^"\n]*+"(?>(?:\s*+,\s*+[0-9]++\s*+,\s*+[0-9]++)?))'
    r"|\.section\s++(?P<section>[^{};]++\{[^}]*+\})"
    r"|(?P<function>(?>(?:\.(?:visible|extern|weak|common)\s*+)*)\.(?:entry|func)\b"
    r'(?>(?:[^{};"]++|"[^"\n]*+"(?>(?:\s*+;)?))*))'
    rf'|(?P<statement>[@.\w$%](?>(?:[^;"{{}}]++|"[^"\n]*+"|{_BRACES})*));'
    r"|(?P<open>\{)"
    r"|(?P<close>\})"
    r"|(?P<empty>;)"
    r"|(?P<bad>[^\n]++)",
    re.ASCII,
)
_SILENT = frozenset(("space", "file", "section"))

_FILE = re.compile(r'\.file\s+([0-9]{1,9})\s*"([^"\n]*)"', re.ASCII)

_WORD = re.compile(r"\.[A-Za-z_]\w*", re.ASCII)

_TOKEN = re.compile(
    r"\s*+(?:"
    r"(?P<token>"
    r"0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b"
    r"|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+"
    r"|[0-9]\w*"
    r"|\.?[A-Za-z_$%][\w$]*"
    r'|"[^"\n]*"'
    r"|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^~!?:;<>()\[\]{},=.@]"
    r")|(?P<bad>\S))",
    re.ASCII,
)


def blank_comments(text: str) -> str:
    """The text without comments, NULs and `#` lines; every line keeps its number."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        if found[0] == '"':
            return found
        if found == "/*":
            line = text.count("\n", 0, match.start()) + 1
            raise StatementError("the comment that opens here is never closed", line)
        return " " + "\n" * found.count("\n")

    return _COMMENT.sub(blank, text.replace("\0", " "))


def source_files(text: str) -> dict[int, str]:
    """The names that `.file` directives give to the numbers in `.loc`, wherever they stand."""
    if ".file" not in text:
        return {}
    return {int(number): name for number, name in _FILE.findall(text)}


def statements(text: str) -> Iterator[Statement]:
    """The statements of a text that has no comments; .file and .section blocks are left out."""
    newlines = [m.start() for m in re.finditer("\n", text)]
    for match in _STATEMENT.finditer(text):
        kind = match.lastgroup
        assert kind is not None
        if kind in _SILENT:
            continue
        line = bisect_right(newlines, match.start()) + 1
        if kind == "bad":
            yield Statement(kind, match.group().strip(), line)
            return
        yield Statement(kind, match.group(kind), line)


def directive_word(text: str) -> str:
    """The directive that a statement begins with, with its dot; blanks need not follow it."""
    match = _WORD.match(text)
    return match.group() if match else ""


def tokens(text: str) -> list[str]:
    """The tokens of a declaration: words (with a leading dot or not), numbers, marks, strings."""
    found: list[str] = []
    for match in _TOKEN.finditer(text.rstrip()):
        if match.lastgroup == "bad":
            raise StatementError(f"{match.group('bad')!r} has no place in a declaration")
        found.append(match.group("token"))
    return found


class Cursor:
    """A position in a list of tokens."""

    def __init__(self, text: str) -> None:
        self._tokens = tokens(text)
        self._at = 0

    @property
    def next(self) -> str:
        """The next token, "" at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    @property
    def after_next(self) -> str:
        """The token after the next one, "" past the end."""
        return self._tokens[self._at + 1] if self._at + 1 < len(self._tokens) else ""

    def take(self) -> str:
        """The next token; the position moves past it."""
        token = self.next
        self._at += 1
        return token

    def accept(self, token: str) -> bool:
        """Take the next token if it is this one."""
        if self.next != token:
            return False
        self._at += 1
        return True

    def expect(self, token: str) -> None:
        """Take the next token, which must be this one."""
        if not self.accept(token):
            raise StatementError(f"expected {token!r}, found {self.next or 'the end'!r}")

    def name(self) -> str:
        """Take an identifier."""
        token = self.take()
        if not token or not (token[0].isalpha() or token[0] in "_$%"):
            raise StatementError(f"expected a name, found {token or 'the end'!r}")
        return token

    def finish(self) -> None:
        """Refuse what is left over."""
        if self.next:
            raise StatementError(f"{self.next!r} is not expected here")
