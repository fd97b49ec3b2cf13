"""Devices with few SMs."""

import pytest
from tests.kernel_run import source

from ptxemu.cli.main import main
from ptxemu.machine.device import device_for, limit_sms


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
