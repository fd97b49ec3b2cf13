"""Words of a launch's parameters that may be addresses: those that the kernel reads whole."""

import struct

import pytest

from ptxemu.cutedsl.parameter_words import address_words
from ptxemu.syntax.parser import parse_module

FIRST, SECOND, THIRD = 0x7F79_0000_0010, 0x7F79_0000_0020, 0x7F79_0000_0030
VIEW = struct.pack("<QQQ", FIRST, SECOND, THIRD)


def words_of(body: str, value: bytes = VIEW, align: int = 8) -> list[int]:
    """The words of a kernel's one parameter."""
    text = (
        ".version 9.0\n.target sm_90a\n.address_size 64\n"
        f".visible .entry k(.param .align {align} .b8 p[{len(value)}])\n"
        f"{{ .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .b128 %rq<2>; {body} ret; }}"
    )
    return list(address_words(parse_module(text).functions["k"], [value]))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", []),
        ("ld.param.b64 %rd0, [p];", [FIRST]),
        ("ld.param.u64 %rd0, [p+16];", [THIRD]),
        ("ld.param.v2.b64 {%rd0, %rd1}, [p];", [FIRST, SECOND]),
        ("ld.param.b128 %rq0, [p];", [FIRST, SECOND]),
        ("ld.param.b32 %r0, [p]; ld.param.v2.b32 {%r1, %r2}, [p+8];", []),
        ("ld.param.b64 %rd0, [p]; ld.param.b64 %rd1, [p];", [FIRST]),
        ("mov.b64 %rd0, p;", [FIRST, SECOND, THIRD]),
        ("ld.param.b64 %rd0, [p]; mov.b64 %rd0, p;", [FIRST, SECOND, THIRD]),
    ],
)
def test_words_that_are_read_whole(body: str, expected: list[int]) -> None:
    """Padding holds what the host's stack had there, and sizes lie two in a word."""
    assert words_of(body) == expected


def test_words_that_no_process_has_as_addresses() -> None:
    value = struct.pack("<QQQ", 5, 1 << 63, FIRST)
    assert words_of("mov.b64 %rd0, p;", value) == [FIRST]


def test_a_tensor_map_begins_with_its_address() -> None:
    value = struct.pack("<16Q", *range(FIRST, FIRST + 16))
    assert words_of("mov.b64 %rd0, p;", value, align=64) == [FIRST]
