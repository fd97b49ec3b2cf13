"""Devices, the code that they load, and their number of SMs."""

import pytest
from tests.kernel_run import source

from ptxemu.cli.main import main
from ptxemu.machine.device import device_for, limit_sms, runs_on

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
