"""What a kernel's fingerprint depends on."""

import pytest
from tests.producer_consumer import TEXT

from ptxemu import api
from ptxemu.mutate import fingerprint


def of(text: str) -> str:
    return fingerprint(api.load(text).syntax.functions["k"])


def test_comments_blank_lines_and_names_do_not_count() -> None:
    assert of("// built elsewhere\n\n" + TEXT) == of(TEXT)
    renamed = TEXT.replace(".entry k(", ".entry other(")
    assert fingerprint(api.load(renamed).syntax.functions["other"]) == of(TEXT)


def test_the_function_s_number_in_its_module_does_not_count() -> None:
    first, fifth = (TEXT.replace("READY", f"$L__BB{number}_2") for number in (0, 4))
    assert of(first) == of(fifth)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sub.u32 %r8, 508", "sub.u32 %r8, 504"),  # an instruction
        ("@!%p1 bra", "@%p1 bra"),  # a guard
        ("READY:\n    bar.sync 0;", "bar.sync 0;\nREADY:"),  # where a branch goes
    ],
)
def test_code_counts(old: str, new: str) -> None:
    assert old in TEXT
    assert of(TEXT.replace(old, new, 1)) != of(TEXT)
