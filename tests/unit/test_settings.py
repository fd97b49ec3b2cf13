"""FLASHDSA_* variables are read, defaulted and refused with a message that names them."""

from __future__ import annotations

import pytest

from flashdsa.settings import Settings


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHDSA_BACKEND", raising=False)
    monkeypatch.delenv("FLASHDSA_CHECK", raising=False)
    assert Settings.from_environment() == Settings(backend="auto", check=False)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("0", False), ("", False)]
)
def test_check_is_a_flag(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("FLASHDSA_CHECK", text)
    assert Settings.from_environment().check is value


@pytest.mark.parametrize(
    ("variable", "text"), [("FLASHDSA_BACKEND", "gpu"), ("FLASHDSA_CHECK", "perhaps")]
)
def test_unknown_value_names_variable_and_value(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=rf"{variable}: expected .*; got '{text}'"):
        Settings.from_environment()


def test_rows_name_every_variable_with_its_value() -> None:
    rows = Settings(backend="cpu", check=True).rows()
    assert [row[:2] for row in rows] == [("FLASHDSA_BACKEND", "cpu"), ("FLASHDSA_CHECK", "1")]
