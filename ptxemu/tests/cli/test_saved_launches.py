"""Saved launches: what runs again is what was saved, at its addresses, with NumPy alone."""

import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from tests.cli.test_ptxemu_cli import AXPY

import ptxemu
from ptxemu.cli.main import main
from ptxemu.errors import LaunchError
from ptxemu.launch_setup import LaunchSetup
from ptxemu.memory.global_memory import GlobalMemory
from tests import producer_consumer

N = 64


def axpy_setup(memory=None):
    x = np.arange(N, dtype=np.float32)
    y = np.ones(N, dtype=np.float32)
    args = (x, y, 2.0, N)
    return LaunchSetup(ptxemu.load(AXPY), "axpy", 1, N, args, memory or GlobalMemory()), y


def test_a_loaded_launch_gives_the_results_of_the_original(tmp_path):
    setup, y = axpy_setup()
    ptxemu.save_launch(setup, tmp_path / "a.launch")
    setup.launch()
    again = ptxemu.load_launch(tmp_path / "a.launch")
    before = {a.base: a.data.copy() for a in again.memory.allocations}
    assert again.launch(check=True).findings == []
    (written,) = [
        a
        for a in again.memory.allocations
        if a.base in before and not np.array_equal(a.data, before[a.base])
    ]
    assert written.base == y.ctypes.data
    assert np.array_equal(written.data.view(np.float32), y)
    assert y[3] == 7.0


def test_the_inputs_are_those_from_before_the_launch_whatever_happens_to_the_arrays(tmp_path):
    setup, y = axpy_setup()
    ptxemu.save_launch(setup, tmp_path / "a.launch")
    y[:] = 99
    again = ptxemu.load_launch(tmp_path / "a.launch")
    assert 99 not in np.concatenate([a.data.view(np.float32) for a in again.memory.allocations])


def test_a_launch_that_has_run_saves_nothing_of_the_emulator(tmp_path):
    setup, _ = axpy_setup()
    setup.launch()
    ptxemu.save_launch(setup, tmp_path / "a.launch")
    again = ptxemu.load_launch(tmp_path / "a.launch")
    assert [len(a.data) for a in again.memory.allocations] == [4 * N, 4 * N]


def test_memory_above_the_emulators_windows_is_saved_too(tmp_path):
    """Large arrays are mapped at the top of the process, above the windows of parameters."""
    memory = GlobalMemory()
    memory.register(np.arange(8, dtype=np.uint8), "mapped", base=0x7FFF_0000_0000)
    setup, _ = axpy_setup(memory)
    ptxemu.save_launch(setup, tmp_path / "a.launch")
    found = ptxemu.load_launch(tmp_path / "a.launch").memory.find(0x7FFF_0000_0004)
    assert found is not None and found.data[4] == 4


def test_equal_launches_give_equal_files(tmp_path):
    setup, _ = axpy_setup()
    for name in ("a", "b"):
        ptxemu.save_launch(setup, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_memory_of_unknown_size_cannot_be_saved_and_its_address_is_named(tmp_path):
    setup, _ = axpy_setup(GlobalMemory(allow_unregistered=True))
    pointer = (0x7123_4567_8900).to_bytes(8, "little")
    setup = LaunchSetup(setup.module, "axpy", 1, N, (pointer, *setup.args[1:]), setup.memory)
    with pytest.raises(LaunchError, match=r"axpy: cannot be saved: .*: 0x712345678900$"):
        ptxemu.save_launch(setup, tmp_path / "a.launch")


@pytest.mark.parametrize("content", [b"", b"PK\3\4 truncated", b"text"])
def test_what_is_no_saved_launch_is_refused(tmp_path, content):
    path = tmp_path / "a.launch"
    path.write_bytes(content)
    with pytest.raises(LaunchError, match=r"a.launch: not a launch that `ptxemu exec --save`"):
        ptxemu.load_launch(path)


def test_an_archive_of_something_else_is_refused(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", data=np.ones(3))
    assert main(["run", str(tmp_path / "x.npz")]) == 2
    assert "not a launch" in capsys.readouterr().err


def test_another_version_of_the_format_is_refused(tmp_path, monkeypatch):
    setup, _ = axpy_setup()
    monkeypatch.setattr("ptxemu.saved_launch.VERSION", 7)
    ptxemu.save_launch(setup, tmp_path / "a.launch")
    monkeypatch.undo()
    with pytest.raises(LaunchError, match=r"version 7 of the format.*save the launch again"):
        ptxemu.load_launch(tmp_path / "a.launch")


@pytest.fixture
def saved(tmp_path):
    data = np.arange(128, dtype=np.uint32)
    module = ptxemu.load(producer_consumer.TEXT)
    kernel = module.kernels[0]
    setup = LaunchSetup(module, kernel, 1, 128, (data, np.zeros_like(data)), GlobalMemory())
    path = tmp_path / "kernel.0.launch"
    ptxemu.save_launch(setup, path)
    return path


def test_every_command_takes_a_saved_launch(saved, tmp_path, capsys):
    for command in ("run", "check", "info"):
        assert main([command, str(saved)]) == 0
    assert "512 bytes changed" in capsys.readouterr().out
    assert main(["trace", str(saved), "--quiet", "--out", str(tmp_path / "trace")]) == 0
    assert list((tmp_path / "trace").glob("*.trace.json"))
    capsys.readouterr()
    assert main(["mutate", str(saved), "--only", "barrier", "--json", "-", "--jobs", "1"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["categories"]["barrier"]["caught"] == 3


def test_mutants_of_a_saved_launch_are_caught_in_other_processes_too(saved, capsys):
    main(["mutate", str(saved), "--only", "barrier", "--json", "-", "--jobs", "2", "--quiet"])
    assert json.loads(capsys.readouterr().out)[0]["share"] == 1.0


@pytest.mark.parametrize("option", ["--grid", "--block", "--smem", "--sms", "--arg", "--arch"])
def test_what_a_saved_launch_fixes_cannot_be_chosen(saved, capsys, option):
    value = {"--arg": "i32=1", "--arch": "sm_90a"}.get(option, "2")
    assert main(["run", str(saved), option, value]) == 2
    assert f"no choice of {option}" in capsys.readouterr().err
    main(["info", str(saved)])  # takes back --sms


def test_a_saved_launch_needs_numpy_only(saved):
    code = (
        "import sys; import ptxemu; "
        f"ptxemu.load_launch({str(saved)!r}).launch(check=True); "
        "print({'torch', 'cutlass', 'llvmlite'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


def test_a_saved_launch_holds_no_pickle(saved):
    with zipfile.ZipFile(saved) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                assert np.lib.format.read_array(file, allow_pickle=False).dtype == np.uint8
