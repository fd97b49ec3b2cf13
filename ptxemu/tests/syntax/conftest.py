"""Short PTX programs: a header and a kernel around the lines that a test is about."""

import pytest

from ptxemu.syntax.parser import parse_module

HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"
REGISTERS = (
    ".reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<10>; .reg .b64 %rd<10>;"
    " .reg .b128 %q<2>; .reg .f32 %f<10>; .reg .f64 %fd<4>;"
)


def kernel_text(body: str, module: str = "", parameters: str = "") -> str:
    """A module whose kernel k begins with the registers above; the body begins on line 7."""
    head = f"{module}\n.visible .entry k({parameters})\n{{ {REGISTERS}\n"
    return f"{HEADER}{head}{body}\nret;\n}}\n"


@pytest.fixture
def parse_kernel():
    """Parse a body and return the kernel."""

    def parse(body, module="", parameters=""):
        return parse_module(kernel_text(body, module, parameters)).functions["k"]

    return parse


@pytest.fixture
def parse_text():
    """Parse what follows the three lines of the header."""
    return lambda text: parse_module(HEADER + text)


@pytest.fixture
def operands(parse_kernel):
    """The operands of the one instruction given."""

    def first(body, module="", parameters=""):
        return parse_kernel(body, module, parameters).instructions[0].operands

    return first
