"""tools/fingerprints.py: what a hash sees, and that each variant's is the one on record."""

from __future__ import annotations

import pytest

from tools import fingerprints

PTX = """\
.version 9.0
.target sm_90a
// Begin
.visible .entry kernel_cutlass_old_name(.param .u64 kernel_cutlass_old_name_param_0)
{
    .loc 1 7 3
    add.s32 \t%r1, %r2, 1; // one more
    ret;
}
"""


def test_names_lines_and_comments_are_not_seen() -> None:
    moved = PTX.replace("old_name", "new").replace("1 7 3", "2 9 1").replace("one more", "1")
    assert fingerprints.normalised(moved) == fingerprints.normalised(PTX)


@pytest.mark.parametrize(
    ("old", "new"),
    [("%r2, 1", "%r2, 2"), ("sm_90a", "sm_100a"), (".u64 k", ".u32 k"), ("    ret;\n", "")],
)
def test_an_instruction_and_a_declaration_are(old: str, new: str) -> None:
    changed = PTX.replace(old, new)
    assert changed != PTX
    assert fingerprints.normalised(changed) != fingerprints.normalised(PTX)


def test_the_record_has_every_variant() -> None:
    _, recorded = fingerprints.read_record()
    assert sorted(recorded) == fingerprints.names()


def require_the_records_compiler() -> None:
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")
    made_by, _ = fingerprints.read_record()
    if made_by != fingerprints.compiler():
        pytest.skip(f"the record is of {made_by}; here is {fingerprints.compiler()}")


def test_a_small_kernel_is_as_recorded() -> None:
    require_the_records_compiler()
    _, recorded = fingerprints.read_record()
    found = fingerprints.compile_all(["sm90/indexer_kl"], 1)
    assert found == {"sm90/indexer_kl": recorded["sm90/indexer_kl"]}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kernel_is_as_recorded() -> None:
    """If not, and a kernel was to change: `make fingerprints`' --write."""
    require_the_records_compiler()
    _, recorded = fingerprints.read_record()
    assert fingerprints.compile_all(fingerprints.names(), 2) == recorded
