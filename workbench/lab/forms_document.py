"""The report of the operand forms as one JSON document, and descriptors field by field."""

from __future__ import annotations

from typing import Any

from flashdsa.dsl.umma import SharedOperand, UmmaProduct
from workbench.lab.forms import FormRow, FormsReport
from workbench.lab.forms_refused import Refusal
from workbench.lab.forms_together import InstructionClass, Together, classes_of
from workbench.lab.forms_witnesses import PROVENANCE


def document(report: FormsReport) -> dict[str, Any]:
    """Everything, ready for JSON."""
    return {
        "arch": report.arch,
        "seed": report.seed,
        "ptxas": report.ptxas,
        "failed": report.failed,
        "seconds": report.seconds,
        "forms": [_row(row) for row in report.rows],
        "not_in_the_isa": [_refusal(refusal) for refusal in report.refused],
        "together": None if report.together is None else _together(report.together),
    }


def instruction_fields(product: UmmaProduct) -> dict[str, Any]:
    """The instruction descriptor, decoded by ptxemu."""
    from ptxemu.descriptors import InstructionDescriptor

    decoded = InstructionDescriptor.decode(product.instruction, "f16")
    return {
        "M": decoded.m,
        "N": decoded.n,
        "D": decoded.dtype,
        "A": decoded.atype,
        "B": decoded.btype,
        "A major": "MN" if decoded.transpose_a else "K",
        "B major": "MN" if decoded.transpose_b else "K",
    }


def shared_fields(product: UmmaProduct, value: int, operand: str) -> dict[str, Any]:
    """A shared memory descriptor of A or B, decoded by ptxemu; addresses count from the arena."""
    from ptxemu.descriptors import Tcgen05Descriptor

    decoded = Tcgen05Descriptor.decode(value)
    matrix = product.a if operand == "A" else product.b
    assert isinstance(matrix, SharedOperand)
    return {
        "descriptor": f"{value:#018x}",
        "start": decoded.start_address,
        "leading": decoded.leading_dimension_byte_offset,
        "stride": decoded.stride_dimension_byte_offset,
        "base_offset": decoded.base_offset,
        "swizzle": decoded.swizzle.name.removeprefix("B").replace("NONE", "none"),
        "major": matrix.major,
    }


def _row(row: FormRow) -> dict[str, Any]:
    plan, measured = row.form.plan, row.emulated
    return {
        "name": row.form.name,
        "title": row.form.title,
        "users": row.form.users,
        "passed": row.passed,
        "ptxas": None
        if row.assembled is None
        else {"accepted": row.assembled.accepted, "message": row.assembled.message},
        "emulated": None
        if measured is None
        else {
            "max_abs_integers": measured.integers,
            "max_abs_random": measured.random,
            "limit_random": measured.limit,
            "idle_cells_untouched": measured.untouched,
            "findings": list(measured.findings),
        },
        "refused_by_emulator": row.refusal or None,
        "confirmed_by": {
            "kernel": row.confirmed.kernel,
            "exact": row.confirmed.exact,
            "n": row.confirmed.n or None,
            "provenance": PROVENANCE.get(row.confirmed.kernel),
        },
        "products": [_product(product) for product in plan.products],
        "a_route": plan.route,
        "classes": [one.name for one in sorted(classes_of(plan))],
        "seconds": row.seconds,
    }


def _product(product: UmmaProduct) -> dict[str, Any]:
    steps = []
    for left, right in product.steps():
        a: Any = {"tmem_column": left} if product.a_in_tmem else shared_fields(product, left, "A")
        steps.append({"A": a, "B": shared_fields(product, right, "B")})
    return {
        "m": product.m,
        "n": product.n,
        "k": product.k,
        "cta_group": product.cta_group,
        "ws": product.ws,
        "data_path": product.data_path,
        "d_columns": [product.column, product.column + product.columns],
        "a_columns": [product.a_columns.start, product.a_columns.stop],
        "instruction_descriptor": f"{product.instruction:#010x}",
        "instruction": instruction_fields(product),
        "steps": steps,
    }


def _refusal(refusal: Refusal) -> dict[str, Any]:
    return {
        "name": refusal.form.name,
        "title": refusal.form.title,
        "users": refusal.form.users,
        "clause": refusal.form.clause,
        "passed": refusal.passed,
        "ptxas": refusal.ptxas,
        "emulator": refusal.emulator,
    }


def _together(together: Together) -> dict[str, Any]:
    def names(classes: tuple[InstructionClass, ...]) -> list[str]:
        return [one.name for one in classes]

    return {
        "ptxas": together.version,
        "classes": names(together.classes),
        "groups": [names(group) for group in together.groups],
        "refused": [
            {"pair": names(pair), "message": message} for pair, message in together.refused.items()
        ],
        "plan_in_one_kernel": together.plan,
    }
