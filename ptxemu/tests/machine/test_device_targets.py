"""Devices, and the code that they load."""

import pytest

from ptxemu.machine.device import device_for, runs_on


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
