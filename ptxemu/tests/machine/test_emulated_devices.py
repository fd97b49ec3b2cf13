"""Devices, the code that they load; waits that end by themselves, loops that never end."""

import re

import numpy as np
import pytest
from tests.kernel_run import TID, run, source

import ptxemu
from ptxemu import api
from ptxemu.cli.main import main
from ptxemu.machine.device import device_for, limit_sms, runs_on
from ptxemu.sched.policy import Policy

# Devices, and the code that they load.


def test_a_device_of_the_family_has_its_own_capability_and_sm_100a_s_limits():
    first, second = device_for("sm_100a"), device_for("sm_103a")
    assert (first.capability, second.capability) == ((10, 0), (10, 3))
    assert (second.num_sms, second.shared_bytes_per_cta) == (148, first.shared_bytes_per_cta)


@pytest.mark.parametrize(
    ("target", "devices"),
    [
        ("sm_90a", {"sm_90a"}),
        ("sm_100a", {"sm_100a"}),
        ("sm_103a", {"sm_103a"}),
        ("sm_100f", {"sm_100a", "sm_103a"}),
        ("sm_103f", {"sm_103a"}),
        ("sm_90", {"sm_90a", "sm_100a", "sm_103a"}),
        ("sm_80", {"sm_90a", "sm_100a", "sm_103a"}),
    ],
)
def test_code_runs_on_its_device_or_its_family(target, devices):
    assert {d for d in ("sm_90a", "sm_100a", "sm_103a") if runs_on(target, d)} == devices


# Devices with few SMs.


@pytest.fixture(autouse=True)
def unlimited():
    yield
    limit_sms(None)


def test_a_limit_holds_until_it_is_lifted():
    limit_sms(3)
    assert {device_for(arch).num_sms for arch in ("sm_90a", "sm_100a")} == {3}
    limit_sms(None)
    assert device_for("sm_100a").num_sms == 148


def test_a_limit_is_a_positive_number():
    with pytest.raises(ValueError, match="sms"):
        limit_sms(0)


def test_the_command_line_sets_what_the_kernel_sees(tmp_path, capsys):
    path = tmp_path / "k.ptx"
    path.write_text(source("mov.u32 %r0, %nsmid;\nst.global.u32 [%rd_out], %r0;", {"out": None}))
    assert main(["run", str(path), "--block", "1", "--sms", "5", "--arg", "u32[1]=zeros"]) == 0
    assert "min 5, max 5" in capsys.readouterr().out


# Waits that end by themselves: clocks, locks between lanes; and loops that never end.

CLOCK = """
mov.u64 %rd0, {0};
L: {1}mov.u64 %rd1, {0}; sub.u64 %rd2, %rd1, %rd0; setp.lt.u64 %p0, %rd2, 1000000; @%p0 bra L;
"""


@pytest.mark.parametrize("sleep", ["", "nanosleep.u32 100;\n"])
@pytest.mark.parametrize("clock", ["%clock64", "%globaltimer"])
def test_a_wait_for_a_clock_ends(clock: str, sleep: str) -> None:
    run(CLOCK.format(clock, sleep), block=64)


@pytest.mark.parametrize(("sleep", "most"), [("", 10_000), ("nanosleep.u32 100;\n", 2_000)])
def test_asynchronous_work_that_comes_late_comes_when_warps_sleep(sleep: str, most: int) -> None:
    """Warp 1 polls until warp 0 has waited for twenty copies, one behind the other."""
    copies = f"""
    {TID} setp.ge.u32 %p0, %r0, 32; mov.u32 %r1, smem; add.u32 %r2, %r1, 16;
    setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [%r1+8], 0;
    @%p1 mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
    @%p0 bra POLL; mov.u32 %r3, 0;
    COPY: @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r2], [%rd_x], 128, [%r1];
    and.b32 %r4, %r3, 1;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r4; @!%p2 bra WAIT;
    add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 20; @%p3 bra COPY;
    @%p1 st.relaxed.cta.shared.u32 [%r1+8], 1; bra END;
    POLL: {sleep} ld.relaxed.cta.shared.u32 %r5, [%r1+8]; setp.eq.u32 %p2, %r5, 0; @%p2 bra POLL;
    END:
    """
    late = Policy(asynchronous="late", warps="round_robin")
    result = run(copies, block=64, shared=256, policy=late, x=32).result
    assert result.async_operations == 20
    assert most / 2 < result.warp_instructions < most


def test_a_loop_that_looks_at_a_clock_and_never_ends_is_a_livelock() -> None:
    with pytest.raises(ptxemu.DeadlockError, match="livelock"):
        run("L: mov.u64 %rd0, %clock64;\nsetp.ge.u64 %p0, %rd0, 0;\n@%p0 bra L;\n")


def test_the_lanes_of_a_warp_take_a_spin_lock_one_by_one() -> None:
    lock = """
    L: atom.acquire.gpu.global.cas.b32 %r1, [%rd_f], 0, 1; setp.ne.u32 %p0, %r1, 0; @%p0 bra L;
    ld.global.b32 %r2, [%rd_x]; add.u32 %r2, %r2, 1; st.global.b32 [%rd_x], %r2;
    atom.release.gpu.global.exch.b32 %r3, [%rd_f], 0;
    """
    assert run(lock, f=1, x=1).x[0] == 32


def test_a_loop_that_counts_for_ever_is_stopped() -> None:
    text = source("L: add.u32 %r1, %r1, 1;\nst.global.b32 [%rd_x], %r1;\nbra L;\n", ["x"])
    module = api.load(text)
    with pytest.raises(ptxemu.StepLimitError, match=r"stopped after .*--step-limit") as error:
        module.launch("k", 1, 32, args=[np.zeros(1, np.uint32)], policy=Policy(limit=10_000))
    assert re.search("warp 0 is near PTX line", str(error.value))


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        ((1, 65536, 1), 32, "grid: at most 65535 along y; got 65536"),
        ((1, 1, 65536), 32, "grid: at most 65535 along z; got 65536"),
        (1, (1, 1, 65), "block: at most 64 along z; got 65"),
    ],
)
def test_the_limits_of_the_device(grid, block, message) -> None:
    module = api.load(source(TID, []))
    with pytest.raises(ptxemu.LaunchError, match=message):
        module.launch("k", grid, block)


def test_an_older_target_says_how_to_run_it() -> None:
    text = source(TID, [], arch="sm_80")
    with pytest.raises(ptxemu.UnknownDeviceError, match="arch='sm_90a'"):
        api.load(text)
    api.load(text, arch="sm_90a").launch("k", 1, 32)
