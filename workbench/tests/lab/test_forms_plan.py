"""What the plans of the operand forms promise: descriptors, layouts, limits; nothing compiles."""

from __future__ import annotations

import numpy as np
import pytest
from tests.accumulator_index import accumulator_index

from flashdsa.dsl.umma import (
    OperandFormError,
    SharedOperand,
    SharedTile,
    TilePart,
    TmemOperand,
    UmmaProduct,
    instruction_descriptor,
    shape_problem,
    shared_descriptor,
)
from ptxemu import descriptors
from ptxemu.engines.mma_plan import MmaForm, mma_plan
from workbench.lab.forms_catalog import OperandForm, catalog, form_named
from workbench.lab.forms_inputs import cell_index, make_inputs, operand_addresses
from workbench.lab.forms_together import classes_of
from workbench.lab.forms_witnesses import EMULATOR_ONLY, PROVENANCE, WITNESSES, confirmation
from workbench.lab.kernels.operand_forms.sm100.plan import FormPlan

FORMS = catalog()
PRODUCTS = [(f"{f.name}-{i}", p) for f in FORMS for i, p in enumerate(f.plan.products)]


def test_names_are_unique() -> None:
    assert len({form.name for form in FORMS}) == len(FORMS)


def test_descriptors_are_those_of_compiled_kernels() -> None:
    # from kernels that CuTe DSL compiled out of cute.gemm
    assert instruction_descriptor(256, 256, "K", "MN") == 0x10410490
    assert shared_descriptor(0, 16, 1024, 128) == 0x4000404000010000
    assert shared_descriptor(0, 8192, 1024, 128) == 0x4000404002000000


@pytest.mark.parametrize(
    ("name", "operand", "starts", "leading", "stride"),
    [
        ("ts-m128-n256-mn128", "b", (0, 2048), 4096, 1024),
        ("ts-m128-n32-mn64", "b", (0, 1024), 2048, 512),
        ("ss-m128-n32-amn", "a", tuple(range(0, 16384, 2048)), 16384, 1024),
        ("ss-m128-n32-amn", "b", tuple(range(32768, 40960, 1024)), 8192, 512),
        ("ss-m64-n32-amn", "a", tuple(range(0, 16384, 2048)), 16384, 1024),
        ("pair-ts-m128-n64-half", "b", (8192, 8192 + 64), 2048, 1024),
    ],
)
def test_the_design_documents_descriptors(
    name: str, operand: str, starts: tuple[int, ...], leading: int, stride: int
) -> None:
    product = form_named(name).plan.product
    decoded = [
        descriptors.Tcgen05Descriptor.decode(step[operand == "b"]) for step in product.steps()
    ]
    assert tuple(d.start_address for d in decoded) == starts
    assert {d.leading_dimension_byte_offset for d in decoded} == {leading}
    assert {d.stride_dimension_byte_offset for d in decoded} == {stride}


@pytest.mark.parametrize(("_", "product"), PRODUCTS, ids=[name for name, _ in PRODUCTS])
def test_a_descriptor_finds_what_the_tile_holds(_: str, product: UmmaProduct) -> None:
    steps = [right for _, right in product.steps()]
    operands = [(product.b, steps)]
    if isinstance(product.a, SharedOperand):
        operands.append((product.a, [left for left, _ in product.steps()]))
    for operand, values in operands:
        written = operand_addresses(operand)
        for step, value in enumerate(values):
            read = descriptors.operand_addresses(
                descriptors.Tcgen05Descriptor.decode(value),
                major=operand.major,
                shape=(operand.extent, 16),
                element_bytes=2,
            )
            assert np.array_equal(read, written[:, 16 * step : 16 * step + 16])


@pytest.mark.parametrize(("_", "product"), PRODUCTS, ids=[name for name, _ in PRODUCTS])
def test_the_emulator_reads_the_same_form_and_layout(_: str, product: UmmaProduct) -> None:
    form = MmaForm("f16", product.cta_group, product.ws, a_in_tmem=product.a_in_tmem)
    plan = mma_plan(form, product.instruction)
    assert (plan.descriptor.m, plan.descriptor.n) == (product.m, product.n)
    assert plan.path.value == product.data_path
    assert plan.descriptor.transpose_b == (product.b.major == "MN")
    lanes, columns = accumulator_index(plan.path, product.n)
    row, column = cell_index(product)
    assert np.array_equal(row[lanes, columns], np.indices(lanes.shape)[0])
    assert np.array_equal(column[lanes, columns], np.indices(lanes.shape)[1])
    assert (row >= 0).sum() == lanes.size


def test_tile_addresses_are_those_of_its_elements() -> None:
    tile = SharedTile("t", 2048, 16, 128, 128)
    operand = SharedOperand("MN", 128, (TilePart(tile, 16),))
    found = operand_addresses(operand)
    assert found[70, 5] == tile.address(5, 70) == 2048 + 16 * 128 + 5 * 128 + (12 ^ (5 << 4))


def test_expected_cells_of_two_different_a_come_from_their_own_lanes() -> None:
    form = form_named("ws-ts-m64-two-a")
    inputs = make_inputs(form.plan, "integers", 3)
    assert inputs.rows.shape == (1, 128, 32)
    product = form.plan.product
    a = (inputs.rows[0].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    image = inputs.image[0].view(np.uint16)[operand_addresses(product.b) // 2]
    b = (image.astype(np.uint32) << 16).view(np.float32)
    assert inputs.expected[0, 64 + 5, 7] == a[64 + 5].astype(float) @ b[64 + 7].astype(float)
    assert inputs.expected[0, 5, 7] == a[5].astype(float) @ b[7].astype(float)


@pytest.mark.parametrize(
    ("shape", "limit"),
    [
        ((64, 32, 1, True), "N = 64, 128 or 256; got 32"),
        ((64, 64, 2, True), ".ws is invalid with .cta_group::2"),
        ((32, 64, 1, False), "M = 64 or 128; got 32"),
        ((64, 64, 2, False), "M = 128 or 256; got 64"),
        ((128, 24, 1, False), "steps of 16; got 24"),
        ((128, 512, 1, False), "to 256"),
    ],
)
def test_a_shape_that_the_instruction_does_not_take_names_limit_and_section(
    shape: tuple[int, int, int, bool], limit: str
) -> None:
    problem = shape_problem(*shape)
    assert problem is not None
    assert limit in problem
    assert 'PTX ISA, "tcgen05.mma", "Matrix Shape"' in problem


def test_plans_that_do_not_fit_are_refused() -> None:
    tile = SharedTile("b", 0, 32, 64, 128)
    b = SharedOperand("K", 32, (TilePart(tile, 64),))
    with pytest.raises(OperandFormError, match="the same multiple of 16"):
        UmmaProduct(128, 32, TmemOperand(32, 32), b)
    with pytest.raises(OperandFormError, match=r"2 CTAs holds N / 2 columns"):
        UmmaProduct(128, 32, TmemOperand(32, 64), b, cta_group=2)
    with pytest.raises(OperandFormError, match="512 columns"):
        UmmaProduct(128, 32, TmemOperand(500, 64), b)
    with pytest.raises(OperandFormError, match="32, 64 or 128 bytes; got 48"):
        SharedTile("b", 0, 32, 24, 48)
    with pytest.raises(OperandFormError, match="route"):
        FormPlan(UmmaProduct(128, 32, TmemOperand(32, 64), b))


def test_every_class_of_form_that_the_issue_names_is_there() -> None:
    names = {one.name for form in FORMS for one in classes_of(form.plan)}
    assert names == {
        "1-CTA SS", "1-CTA TS", "1-CTA .ws SS", "1-CTA .ws TS", "1-CTA tcgen05.cp",
        "2-CTA SS", "2-CTA TS",
    }  # fmt: skip
    assert {form.plan.product.data_path for form in FORMS} == {"B", "D", "E", "F", "G"}
    assert {one.cta_group for f in FORMS if f.is_of_plan for one in classes_of(f.plan)} == {1}


def test_confirmations_are_exact_or_say_the_other_n_or_nobody() -> None:
    found = {form.name: confirmation(form) for form in FORMS}
    assert found["ss-m128-n32-amn"].text == "CUTLASS dense_gemm"
    assert found["ws-ts-m64-two-a"].text == "cuDNN DSA fwd h64"
    assert found["ts-m128-n256-mn128"].text.endswith(", N=128")
    for name in ("ws-ts-m32-n256", "pair-ts-m128-n64-half", "pair-ts-exchange"):
        assert found[name].text == EMULATOR_ONLY
    assert {witness.kernel for witness in WITNESSES} == set(PROVENANCE)


def test_a_in_both_halves_is_not_confirmed_by_two_different_ones() -> None:
    form = form_named("ws-ts-m64-two-a")
    product = form.plan.product
    same = UmmaProduct(
        product.m, product.n, TmemOperand(64, product.k), product.b, cta_group=1, ws=True
    )
    twice = OperandForm("twice", "", "seed: none", FormPlan(same, "rows"))
    assert confirmation(twice).text == EMULATOR_ONLY
