"""Blocks and weak accesses in a row as threaded code: the interpreter's results, bit for bit."""

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from tests.compiled.random_loops import Author, text
from tests.kernel_run import source

from ptxemu import api, machine_code
from ptxemu.compiled.chain import Chain
from ptxemu.errors import ExecutionError
from ptxemu.memory.global_memory import GlobalMemory

CTAS, THREADS = 2, 48


@pytest.fixture
def ends(monkeypatch):
    """How each chain ended, from the first instruction on: True at its end."""
    found = []
    run = Chain.run

    def noted(*arguments):
        found.append(run(*arguments))
        return found[-1]

    monkeypatch.setattr(Chain, "run", noted)
    monkeypatch.setattr(machine_code, "COLD_INSTRUCTIONS", 0)
    monkeypatch.setattr(machine_code, "WARM_INSTRUCTIONS", 0)
    return found


def outcome(ptx, core, monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", core)
    out = np.zeros(64 * CTAS * 8, np.uint32)
    own = np.arange(64 * CTAS * 64, dtype=np.uint32) * np.uint32(2654435761)
    result = api.load(ptx).launch("k", CTAS, THREADS, args=[out, own])
    return out, own, result.warp_instructions


@pytest.mark.parametrize("seed", range(100, 108))
def test_random_programs_give_the_same_bits_and_counts(seed, ends, monkeypatch):
    ptx = text(Author(seed).body())
    expected = outcome(ptx, "numpy", monkeypatch)
    assert not ends
    found = outcome(ptx, "llvm", monkeypatch)
    assert any(ends)
    for before, after in zip(expected, found, strict=True):
        np.testing.assert_array_equal(before, after)


ROWS = """
mov.u32 %r0, %tid.x; mul.wide.u32 %rd0, %r0, 16; add.u64 %rd0, %rd0, %rd_out;
mov.u32 %r1, 7; mov.u32 %r2, %r0; mov.u32 %r3, 9; mov.u32 %r4, 11; st.global.u32 [%rd0], %r1;
{step}
add.u64 %rd0, %rd0, 512; add.u32 %r1, %r1, 1; st.global.v4.u32 [%rd0], {{%r1, %r2, %r3, %r4}};
"""


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("add.u64 %rd0, %rd0, 2;", "not aligned to 16 bytes"),
        ("add.u64 %rd0, %rd0, 131072;", "illegal global address"),
    ],
)
def test_wrong_addresses_are_named_as_the_interpreter_names_them(step, message, ends, monkeypatch):
    messages, arrays = [], []
    for core in ("numpy", "llvm"):
        monkeypatch.setenv("PTXEMU_CORE", core)
        out = np.zeros(512, np.uint32)
        with pytest.raises(ExecutionError, match=message) as error:
            api.load(source(ROWS.format(step=step), ["out"])).launch("k", 1, 32, args=[out])
        messages.append(str(error.value))
        arrays.append(out)
    assert ends == [False]
    strip = [text.split("0x")[0] + text.split(":")[-1] for text in messages]
    assert strip[0] == strip[1]
    np.testing.assert_array_equal(*arrays)
    assert (arrays[1][::4][:32] == 7).all()


def test_who_listens_hears_every_access(ends, monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    module = api.load(source(ROWS.format(step=""), ["out"]))
    result = module.launch("k", 2, 32, args=[np.zeros(512, np.uint32)], check=True)
    assert not ends
    assert {"same-value-race"} <= {finding.code for finding in result.findings}
    module.launch("k", 2, 32, args=[np.zeros(512, np.uint32)])
    assert ends == [True, True]


def test_memory_without_bounds_is_left_to_the_interpreter(ends, monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    out = np.zeros(512, np.uint32)
    memory = GlobalMemory(allow_unregistered=True)
    address = int(out.ctypes.data).to_bytes(8, "little")
    module = api.load(source(ROWS.format(step=""), ["out"]))
    module.launch("k", 1, 32, args=[address], memory=memory)
    assert not ends
    assert out[128] == 8


def test_read_only_memory_is_not_written(ends, monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    out = np.zeros(512, np.uint32)
    out.flags.writeable = False
    with pytest.raises(ExecutionError, match="read-only"):
        api.load(source(ROWS.format(step=""), ["out"])).launch("k", 1, 32, args=[out])
    assert ends == [False]


def test_lanes_that_take_a_lock_in_turn_get_it(ends, monkeypatch):
    body = """
mov.u32 %r0, 0; mov.u32 %r3, 0;
AGAIN: atom.global.cas.b32 %r1, [%rd_lock], 0, 1; setp.ne.u32 %p0, %r1, 0; @%p0 bra AGAIN;
ld.volatile.global.u32 %r2, [%rd_out]; add.u32 %r2, %r2, 1; st.volatile.global.u32 [%rd_out], %r2;
atom.global.exch.b32 %r1, [%rd_lock], 0; add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 3;
@%p1 bra AGAIN;
"""
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    out, lock = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
    api.load(source(body, ["out", "lock"])).launch("k", 1, 32, args=[out, lock])
    assert out[0] == 3 * 32
