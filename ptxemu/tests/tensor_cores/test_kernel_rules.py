"""Kernels that ptxas refuses as a whole are refused at load, unless told otherwise."""

import numpy as np
import pytest
from tests.tensor_cores.tensor_core_run import HEADER

from ptxemu import api
from ptxemu.errors import ExecutionError, IllegalInstructionError, LaunchError

KERNEL = """
.visible .entry k()
{{
  .reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p<2>;
  {body}
  ret;
}}
"""
ALLOC = "tcgen05.alloc.cta_group::{g}.sync.aligned.shared::cta.b32 [%r0], 32;"


def load(body: str, *, target: str = "sm_100a", allow_illegal: bool = False) -> api.Module:
    """A module with one kernel."""
    text = HEADER.format(target=target) + KERNEL.format(body=body)
    return api.load(text, allow_illegal=allow_illegal)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (".version 99.9\n.target sm_90a", "no such version is known"),
        (".version 7.0\n.target sm_90a", ".target sm_90a needs .version 8.0, not 7.0"),
        (".version 8.0\n.target sm_100a", ".target sm_100a needs .version 8.6"),
        (".version 8.0\n.target sm_90a\n.address_size 32", "sm_90a has 64-bit addresses"),
    ],
)
def test_what_ptxas_refuses_in_a_modules_directives_is_refused(header: str, message: str) -> None:
    text = header + "\n.visible .entry k() { ret; }\n"
    with pytest.raises(IllegalInstructionError, match=message):
        api.load(text)
    assert api.load(text, allow_illegal=True).kernels == ["k"]


def test_a_variable_that_nobody_defines_is_refused_where_it_is_used() -> None:
    body = "mov.u64 %rd1, x; ld.global.u32 %r1, [x];"
    extern = ".extern .global .align 4 .u32 x;\n"
    text = HEADER.format(target="sm_100a") + extern + KERNEL.format(body=body)
    with pytest.raises(LaunchError, match=r"x is \.extern, and defined nowhere"):
        api.load(text).launch("k", 1, 32)
    api.load(text).launch("k", 1, 32, symbols={"x": np.zeros(1, np.uint32)})
    api.load(text.replace(body, "")).launch("k", 1, 32)


def test_two_cta_groups_in_a_kernel_are_refused() -> None:
    body = ALLOC.format(g=1) + "\n" + ALLOC.format(g=2)
    with pytest.raises(IllegalInstructionError) as caught:
        load(body).program("k")
    assert ".cta_group::1 at PTX line 9 and .cta_group::2 at PTX line 10" in str(caught.value)
    assert "PTX ISA" in str(caught.value)
    load(body, allow_illegal=True).program("k")


def test_one_cta_group_is_accepted() -> None:
    load(ALLOC.format(g=2) * 2).program("k")


def test_ws_with_two_ctas_is_refused_and_has_no_meaning() -> None:
    body = "tcgen05.mma.ws.cta_group::2.kind::f16 [%r0], %rd0, %rd0, %r1, %p0;"
    with pytest.raises(IllegalInstructionError, match=r"\.ws is invalid with \.cta_group::2"):
        load(body).program("k")
    with pytest.raises(ExecutionError, match=r"\.ws with \.cta_group::2 is invalid"):
        load(body, allow_illegal=True).launch("k", 2, 32, cluster=2)


@pytest.mark.parametrize(
    ("body", "target"), [(ALLOC.format(g=1), "sm_90a"), ("wgmma.fence.sync.aligned;", "sm_100a")]
)
def test_tensor_cores_of_another_architecture_are_refused(body: str, target: str) -> None:
    with pytest.raises(IllegalInstructionError, match=f"the target is {target}"):
        load(body, target=target).program("k")


MMA = "tcgen05.mma.cta_group::1.kind::{} [%r0], %rd0, %rd1, %r1, %p0;"
SCALED = (
    "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.{} [%r0], %rd0, %rd1, %r1, [%r2], [%r3], %p0;"
)


@pytest.mark.parametrize(
    ("body", "targets"),
    [
        (MMA.format("i8"), {"sm_100a"}),
        ("tcgen05.shift.cta_group::1.down [%r0];", {"sm_100a", "sm_103a"}),
        (SCALED.format("scale_vec::2X"), {"sm_100a", "sm_103a"}),
        (SCALED.format("block32"), {"sm_100a", "sm_100f", "sm_103a", "sm_103f"}),
        (MMA.format("f16"), {"sm_100a", "sm_100f", "sm_103a", "sm_103f"}),
    ],
)
def test_targets_lack_what_ptxas_says_they_lack(body: str, targets: set[str]) -> None:
    for target in ("sm_100a", "sm_100f", "sm_103a", "sm_103f"):
        if target in targets:
            load(body, target=target).program("k")
        else:
            with pytest.raises(IllegalInstructionError, match=f"the target is {target}"):
                load(body, target=target).program("k")
