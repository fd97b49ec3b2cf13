"""`ptxemu trace` on the command line: its files and what it prints."""

import json

import pytest
from tests.kernel_run import source

from ptxemu.cli.kernel_names import file_name
from ptxemu.cli.main import main
from tests import producer_consumer

LAUNCH = ["--block", "128", "--arg", "u32[128]=arange", "--arg", "u32[128]=zeros", "--quiet"]


def trace(folder, *options, text=producer_consumer.TEXT):
    path = folder / "kernel.ptx"
    path.write_text(text)
    return main(["trace", str(path), "--out", str(folder / "out"), *options])


def test_three_files_and_the_counts(tmp_path, capsys):
    assert trace(tmp_path, *LAUNCH, "--role", "copy=0", "--role", "compute=1-3") == 0
    out = capsys.readouterr().out
    assert "compute (1-3)" in out
    assert "wait" in out
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"0-k.trace.json", "0-k.memory.svg", "0-k.counts.json"}
    document = json.loads((tmp_path / "out" / "0-k.trace.json").read_text())
    names = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert "warp 0 (copy)" in names
    assert "<svg" in (tmp_path / "out" / "0-k.memory.svg").read_text()


def test_json_has_the_counts_of_each_role(tmp_path, capsys):
    assert trace(tmp_path, *LAUNCH, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    (launch,) = report["launches"]
    first = launch["roles"][0]
    assert first["role"] == "load+store"
    assert first["bytes"]["global -> shared (bulk load)"] == producer_consumer.BYTES


def test_a_deadlock_still_leaves_the_trace(tmp_path, capsys):
    body = """
        mov.u32 %r1, smem;
        mbarrier.init.shared.b64 [%r1], 2;
        W: mbarrier.try_wait.parity.shared.b64 %p0, [%r1], 0;
        @!%p0 bra W;
    """
    code = trace(tmp_path, "--block", "1", "--quiet", text=source(body, {}, shared=64))
    assert code == 1
    assert "deadlock" in capsys.readouterr().err
    assert "never ends" in (tmp_path / "out" / "0-k.trace.json").read_text()


@pytest.mark.parametrize("role", ["mma", "mma=x", "mma=1-"])
def test_a_role_of_another_form_is_an_error(tmp_path, capsys, role):
    assert trace(tmp_path, *LAUNCH, "--role", role) == 2
    assert "name=first-last" in capsys.readouterr().err


def test_names_of_cute_dsl_kernels_are_cut_to_what_a_person_knows():
    name = "kernel_cutlass_kernel___main__PersistentDenseGemmKernel_object_at__TiledMMA_Thr"
    assert file_name(name) == "PersistentDenseGemmKernel"
    assert file_name("axpy") == "axpy"
