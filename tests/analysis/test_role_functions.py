"""Functions of one role, found from the names in a kernel's row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashdsa.analysis.role_functions import Lines, role_functions
from flashdsa.kernels.catalog import MLA_BWD_DKV


def functions(lines: tuple[Lines, ...]) -> set[str]:
    """Names of the functions and classes at these lines."""
    found = set()
    for one in lines:
        own = Path(one.file).read_text().splitlines()[one.first - 1 : one.last]
        found |= {
            line.split("(")[0].split()[1] for line in own if line.startswith(("def", "class"))
        }
    return found


def test_a_role_has_what_only_it_runs() -> None:
    found = {role: functions(lines) for role, lines in role_functions(MLA_BWD_DKV).items()}
    # From the entry on, across files, to the DSL.
    assert {"multiply_all", "multiply_tile", "add_tile", "add4_if"} <= found["multiply"]
    assert {"load_matrices", "matrix_offset"} <= found["matrices"]
    assert {"copy_all", "copy_part"} <= found["rows"]
    # Two roles run these, and every role is constructed with a context by the kernel.
    for shared in ("first_tile", "locate", "Context"):
        assert not any(shared in of_role for of_role in found.values())


def test_a_name_that_the_kernel_does_not_know_is_an_error() -> None:
    with pytest.raises(KeyError, match="multiply_some"):
        role_functions(replace(MLA_BWD_DKV, roles={"multiply": ("multiply_some",)}))
