"""tools/fingerprints.py: what a hash sees, and that each variant's is the one on record."""

from __future__ import annotations

from pathlib import Path

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


def module_of(count: int, most_registers: int) -> str:
    """PTX of a kernel that holds `count` values across a barrier."""
    values = range(count)
    load = "".join(f"ld.volatile.global.f32 %f{i}, [%rd0+{4 * i}];\n" for i in values)
    store = "".join(f"st.volatile.global.f32 [%rd0+{4 * i}], %f{i};\n" for i in values)
    return f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) .maxnreg {most_registers}
{{
.reg .f32 %f<{count}>; .reg .b64 %rd<1>;
ld.param.u64 %rd0, [p];
{load}bar.sync 0;
{store}ret;
}}
"""


def test_the_assembler_is_asked_for_spills() -> None:
    pytest.importorskip("nvidia.cu13", reason="ptxas: pip install nvidia-cuda-nvcc")
    assert fingerprints.complaints(module_of(64, 128), "sm_90a") == []
    (spill,) = fingerprints.complaints(module_of(64, 24), "sm_90a")
    assert "bytes spill stores" in spill and not spill.startswith("0 ")
    (refused,) = fingerprints.complaints("not PTX", "sm_90a")
    assert "refuses" in refused


def test_complaints_end_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the hash is recorded."""
    name, record = "sm90/indexer_kl", tmp_path / "fingerprints.txt"
    record.write_text(fingerprints.RECORD.read_text())
    monkeypatch.setattr(fingerprints, "RECORD", record)
    monkeypatch.setattr(fingerprints, "compiler", lambda: fingerprints.read_record()[0])
    monkeypatch.setattr(fingerprints, "names", lambda: sorted(fingerprints.read_record()[1]))
    for said, code in ((("sm_90a: 8 bytes spill stores",), 1), ((), 0)):
        changed = fingerprints.Fingerprint(name, "0" * 16, 7, said)
        monkeypatch.setattr(fingerprints, "compile_all", lambda *_, one=changed: {name: one})
        monkeypatch.setattr("sys.argv", ["fingerprints", "--write", name])
        with pytest.raises(SystemExit) as ended:
            fingerprints.main()
        assert ended.value.code == code
        assert [f"{name}: {text}" in capsys.readouterr().out for text in said] == [True] * code
    assert f"{name} {'0' * 16} 7\n" in record.read_text()


def require_the_records_compiler() -> None:
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")
    made_by, _ = fingerprints.read_record()
    if made_by != fingerprints.compiler():
        pytest.skip(f"the record is of {made_by}; here is {fingerprints.compiler()}")


def test_a_small_kernel_is_as_recorded() -> None:
    require_the_records_compiler()
    _, recorded = fingerprints.read_record()
    name = "sm90/indexer_kl"
    found = fingerprints.compile_all([name], 1, {})[name]  # as if it had changed: assembled, too
    assert str(found) == recorded[name] and found.complaints == ()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kernel_is_as_recorded() -> None:
    """If not, and a kernel was to change: `make fingerprints`' --write."""
    require_the_records_compiler()
    _, recorded = fingerprints.read_record()
    found = fingerprints.compile_all(fingerprints.names(), 2, recorded)
    assert {name: str(one) for name, one in found.items()} == recorded
