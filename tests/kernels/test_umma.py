"""Products of tcgen05.mma as data: descriptors, layouts and limits; nothing compiles."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
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
from flashdsa.hw import TMEM_LANES
from flashdsa.kernels.attention.sm100.bwd import products as bwd
from flashdsa.kernels.attention.sm100.fwd import products as fwd
from flashdsa.kernels.catalog import INDEXER_SM100, MLA_BWD, SPARSE_MLA_FWD_SM100
from ptxemu.descriptors import Tcgen05Descriptor, operand_addresses
from ptxemu.engines.mma_plan import MmaForm, mma_plan
from workbench.lab.kernels.split_heads import mma as split_heads
from workbench.lab.kernels.split_heads.plan import SPLIT_HEADS


def products() -> Iterator[tuple[str, UmmaProduct]]:
    """Every product of the kernels that ship, and of the laboratory's backward."""
    for plan in MLA_BWD.plans:
        of = bwd.products_of(plan)
        scores = (of.p, of.p_rope, of.dp, of.dq, of.dq_rope)
        for product in (*scores, *(one for part in of.dkv for one in part)):
            yield plan.name, product
    for plan in SPLIT_HEADS.plans:
        split = split_heads.products_of(plan)
        for product in (split.p, split.dp, *split.dq, *(one for part in split.dkv for one in part)):
            yield plan.name, product
    for plan in SPARSE_MLA_FWD_SM100.plans:
        forward = fwd.products_of(plan)
        for product in (forward.qk, forward.qk_rope, *forward.pv):
            yield plan.name, product
    for plan in INDEXER_SM100.plans:
        yield plan.name, plan.product


def written(operand: SharedOperand) -> NDArray[np.int64]:
    """The byte offset of each element (mn, k), by the tile."""
    found = np.empty((operand.extent, operand.k), np.int64)
    for mn, k in np.ndindex(*found.shape):
        tile, row, column = operand.place(mn, k)
        found[mn, k] = tile.address(row, column)
    return found


def test_descriptors_are_those_of_compiled_kernels() -> None:
    # from kernels that CuTe DSL compiled out of cute.gemm
    assert instruction_descriptor(256, 256, "K", "MN") == 0x10410490
    assert shared_descriptor(0, 16, 1024, 128) == 0x4000404000010000
    assert shared_descriptor(0, 8192, 1024, 128) == 0x4000404002000000


def test_a_descriptor_finds_the_elements_of_its_tile() -> None:
    seen = set()
    for name, product in products():
        operands = [(product.b, [right for _, right in product.steps()])]
        if isinstance(product.a, SharedOperand):
            operands.append((product.a, [left for left, _ in product.steps()]))
        for operand, descriptors in operands:
            if operand in seen:
                continue
            seen.add(operand)
            addresses, depth = written(operand), operand.element.step_k
            for step, value in enumerate(descriptors):
                read = operand_addresses(
                    Tcgen05Descriptor.decode(value),
                    major=operand.major,
                    shape=(operand.extent, depth),
                    element_bytes=operand.element.bytes,
                )
                expected = addresses[:, depth * step : depth * (step + 1)]
                assert np.array_equal(read, expected), (name, operand, step)
    assert {operand.major for operand in seen} == {"K", "MN"}


def test_the_emulator_reads_the_same_form_and_layout() -> None:
    paths = set()
    for name, product in products():
        form = MmaForm(
            product.element.kind, product.cta_group, product.ws, a_in_tmem=product.a_in_tmem
        )
        plan = mma_plan(form, product.instruction)
        assert (plan.descriptor.m, plan.descriptor.n) == (product.m, product.n), name
        assert plan.path.value == product.data_path, name
        assert plan.descriptor.transpose_b == (product.b.major == "MN"), name
        lanes, columns = accumulator_index(plan.path, product.n)
        cells = 0
        for lane, column in np.ndindex(TMEM_LANES, product.columns):
            element = product.cell(lane, product.column + column)
            if element is not None:
                assert (lanes[element], columns[element]) == (lane, column), name
                cells += 1
        assert cells == lanes.size, name
        paths.add(product.data_path)
    assert paths == {"B", "D", "E", "F", "G"}


def test_a_shape_beyond_the_instruction_names_limit_and_section() -> None:
    for shape, limit in (
        ((64, 32, 1, True), "N = 64, 128 or 256; got 32"),
        ((64, 64, 2, True), ".ws is invalid with .cta_group::2"),
        ((32, 64, 1, False), "M = 64 or 128; got 32"),
        ((64, 64, 2, False), "M = 128 or 256; got 64"),
        ((128, 24, 1, False), "steps of 16; got 24"),
        ((128, 512, 1, False), "to 256"),
    ):
        problem = shape_problem(*shape)
        assert problem is not None and limit in problem
        assert 'PTX ISA, "tcgen05.mma", "Matrix Shape"' in problem


def test_products_that_do_not_fit_are_refused() -> None:
    b = SharedOperand("K", 32, (TilePart(SharedTile("b", 0, 32, 64, 128), 64),))
    with pytest.raises(OperandFormError, match="the same multiple of 16"):
        UmmaProduct(128, 32, TmemOperand(32, 32), b)
    with pytest.raises(OperandFormError, match=r"2 CTAs holds N / 2 columns"):
        UmmaProduct(128, 32, TmemOperand(32, 64), b, cta_group=2)
    with pytest.raises(OperandFormError, match="512 columns"):
        UmmaProduct(128, 32, TmemOperand(500, 64), b)
    with pytest.raises(OperandFormError, match="32, 64 or 128 bytes; got 48"):
        SharedTile("b", 0, 32, 24, 48)
