"""FLASHDSA_* variables are read, defaulted and refused with a message that names them."""

from __future__ import annotations

import os

import pytest

from flashdsa.settings import Settings, raw_settings


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHDSA_BACKEND", raising=False)
    monkeypatch.delenv("FLASHDSA_CHECK", raising=False)
    monkeypatch.delenv("FLASHDSA_MAX_CLUSTER", raising=False)
    assert Settings.from_environment() == Settings(backend="auto", check=False)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("0", False), ("", False)]
)
def test_check_is_a_flag(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("FLASHDSA_CHECK", text)
    assert Settings.from_environment().check is value


@pytest.mark.parametrize(
    ("variable", "text"),
    [("FLASHDSA_BACKEND", "gpu"), ("FLASHDSA_CHECK", "perhaps"), ("FLASHDSA_MAX_CLUSTER", "17")],
)
def test_unknown_value_names_variable_and_value(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=rf"{variable}: expected .*; got '{text}'"):
        Settings.from_environment()


def test_rows_name_every_variable_with_its_value() -> None:
    rows = Settings(backend="cpu", check=True).rows()
    assert [row[:2] for row in rows] == [
        ("FLASHDSA_BACKEND", "cpu"),
        ("FLASHDSA_CHECK", "1"),
        ("FLASHDSA_MAX_CLUSTER", ""),
    ]
    assert Settings(max_cluster=8).rows()[-1][:2] == ("FLASHDSA_MAX_CLUSTER", "8")


def test_raw_settings_change_with_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps what follows from them sees each change, through `os.environ` in any way."""
    monkeypatch.delenv("FLASHDSA_BACKEND", raising=False)
    monkeypatch.delenv("FLASHDSA_CHECK", raising=False)
    assert raw_settings() == (None, None)
    monkeypatch.setenv("FLASHDSA_BACKEND", "cpu")
    with_backend = raw_settings()
    monkeypatch.setitem(os.environ, "FLASHDSA_CHECK", "1")
    with_both = raw_settings()
    assert with_backend[0] is not None and with_backend[1] is None
    assert with_both[0] == with_backend[0] and with_both[1] is not None
    os.environ.update(FLASHDSA_BACKEND="sm90")
    assert raw_settings()[0] not in (None, with_backend[0])
    os.environ.pop("FLASHDSA_CHECK")
    assert raw_settings()[1] is None
