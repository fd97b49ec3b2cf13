"""Sizes and classes of PTX's types."""

import pytest

from ptxemu.syntax.types import FUNDAMENTAL, TYPES, is_type


@pytest.mark.parametrize(
    ("name", "size", "kind"),
    [
        ("pred", 1, "pred"),
        ("b8", 1, "bits"),
        ("b128", 16, "bits"),
        ("s16", 2, "int"),
        ("u64", 8, "int"),
        ("f16", 2, "float"),
        ("bf16x2", 4, "float"),
        ("f32x2", 8, "float"),
        ("tf32", 4, "float"),
        ("e4m3x2", 2, "float"),
        ("e2m1", 1, "float"),
        ("e2m1x2", 1, "float"),
        ("e3m2x4", 4, "float"),
        ("u16x2", 4, "int"),
    ],
)
def test_size_and_class(name, size, kind):
    assert TYPES[name].size == size
    assert TYPES[name].kind == kind


def test_names():
    assert is_type("f32")
    assert not is_type("shared")
    assert set(TYPES) >= FUNDAMENTAL
    assert [name for name, entry in TYPES.items() if entry.name != name] == []
    assert TYPES["s8"].signed
    assert not TYPES["u8"].signed
