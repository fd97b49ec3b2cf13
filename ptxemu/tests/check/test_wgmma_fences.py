"""wgmma.fence: needed before the first product, and after others used a product's registers."""

import pytest

from ptxemu import api

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"
FENCE = "wgmma.fence.sync.aligned;"
WAIT = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
D = "{%d0, %d1, %d2, %d3}"
PRODUCT = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {D}, %rd0, %rd0, 1, 1, 1, 0, 0;"
WITH_A = PRODUCT.replace("%rd0", "{%a0, %a1, %a2, %a3}", 1).replace("1, 0, 0;", "1, 0;")
OTHER_SHAPE = (
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
    "{%d0, %d1, %d2, %d3, %d4, %d5, %d6, %d7}, %rd0, %rd0, 1, 1, 1, 0, 0;"
)


def missing(body: str) -> list[str]:
    """Why fences are missing, of a kernel of one warpgroup; each reason once."""
    text = f"""{HEADER}
.visible .entry k() {{
  .reg .pred %p; .reg .b32 %d<8>; .reg .b32 %a<4>; .reg .b32 %r<4>; .reg .b64 %rd<2>;
  .shared .align 128 .b8 smem[4096]; mov.u32 %r0, smem; shr.u32 %r1, %r0, 4;
  cvt.u64.u32 %rd0, %r1;
  {body}
  {WAIT}
  ret;
}}
"""
    result = api.load(text).launch("k", 1, 128, check=True)
    found = [f.message for f in result.findings if f.code == "wgmma-fence-missing"]
    return [message.split("needs wgmma.fence before it: ")[1] for message in found]


def test_the_first_product_needs_one() -> None:
    assert missing(PRODUCT) == ["no wgmma.fence was executed before it"]
    assert missing(FENCE + PRODUCT) == []


def test_products_on_one_accumulator_need_none_in_between() -> None:
    assert missing(FENCE + PRODUCT + WAIT + PRODUCT) == []


@pytest.mark.parametrize(
    ("use", "verb"),
    [
        ("add.u32 %d1, %d1, 1;", "written"),
        ("add.u32 %r2, %d1, 1;", "read"),
        ("st.shared.b32 [%r0], %d1;", "used"),
    ],
)
def test_an_accumulator_that_was_used_needs_one(use: str, verb: str) -> None:
    (why,) = missing(FENCE + PRODUCT + WAIT + use + PRODUCT)
    assert why.startswith(f"%d1 was {verb} (PTX line ")
    assert missing(FENCE + PRODUCT + WAIT + use + FENCE + PRODUCT) == []


def test_a_fragment_of_a_that_was_written_needs_one() -> None:
    write = "add.u32 %a2, %r0, 1;"
    (why,) = missing(FENCE + write + WITH_A)
    assert why.startswith("%a2 was written")
    assert missing(write + FENCE + WITH_A) == []


def test_constants_and_copies_are_values_under_another_name() -> None:
    zero = "mov.b32 %r2, 0; mov.b32 %d0, %r2; mov.b32 %d1, 0f00000000;"
    assert missing(FENCE + zero + PRODUCT) == []
    before = "add.u32 %r2, %r0, 1;"
    copy = "mov.b32 %a0, %r2;"
    assert missing(before + FENCE + copy + WITH_A) == []
    (why,) = missing(FENCE + before + copy + WITH_A)
    assert why.startswith("%r2 was written")


def test_a_product_of_another_shape_on_the_accumulator_needs_one() -> None:
    (why,) = missing(FENCE + PRODUCT + WAIT + OTHER_SHAPE)
    assert why.startswith("a product of another shape (PTX line ")
    assert missing(FENCE + PRODUCT + WAIT + FENCE + OTHER_SHAPE) == []
