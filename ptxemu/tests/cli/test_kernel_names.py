"""Names of kernels as people read them."""

import pytest

from ptxemu.cli import kernel_names
from ptxemu.cli.kernel_names import file_name, readable, with_readable_names

if kernel_names.demangled("_Z3sumPKiPi") == "_Z3sumPKiPi":
    pytest.skip("the C++ runtime is not there, which reads names", allow_module_level=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("_Z3sumPKiPi", "sum"),
        ("_Z4fillIfLi4EEvPT_", "fill<float, 4>"),
        ("_ZN12_GLOBAL__N_14copyEPfS0_", "(anonymous namespace)::copy"),
        ("axpy", "axpy"),
        ("_Znonsense", "_Znonsense"),
        ("k" * 30 + "m" * 60 + "last_part", "k" * 30 + "m" * 6 + "...last_part"),
    ],
)
def test_parameters_are_left_out_and_long_names_cut(name: str, text: str) -> None:
    assert readable(name) == text


def test_names_inside_a_message_and_for_files() -> None:
    assert with_readable_names("kernel _Z3sumPKiPi: late") == "kernel sum: late"
    assert file_name("_Z4fillIfLi4EEvPT_") == "fill_float_4"
