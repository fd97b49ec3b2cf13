"""A kernel whose compiled function gives 7: what the loader does, without a compiler's seconds."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from flashdsa.plan import Role
from flashdsa.plan.kernel_spec import KernelSpec

COMPILED = "FLASHDSA_TEST_COMPILED"
"""Environment variable: a file that gets a line for each time `compile_seven` is called."""
SEVEN = """
#include <stdint.h>
struct any { int32_t type; uint32_t padding; int64_t value; };
int __tvm_ffi_%s(void *self, const struct any *arguments, int32_t count, struct any *result)
{
    result->type = 1; /* kTVMFFIInt */
    result->padding = 0;
    result->value = 7;
    return 0;
}
"""


class Seven:
    """What `cute.compile` returns, as far as `build_shared_object` looks: a function giving 7."""

    def export_to_c(self, path: str, *, function_name: str) -> None:
        """As CuTe DSL's: an object file."""
        source = Path(path).with_suffix(".c")
        source.write_text(SEVEN % function_name)
        subprocess.run(["gcc", "-c", "-fPIC", "-o", path, str(source)], check=True)


@dataclass(frozen=True)
class SevenPlan:
    """Its only choice is its name."""

    name: str
    roles: tuple[Role, ...] = ()
    smem_bytes: int = 0


def compile_seven(plan: SevenPlan) -> Seven:
    """Takes longer than processes that start together are apart."""
    if COMPILED in os.environ:
        with Path(os.environ[COMPILED]).open("a") as file:
            file.write(f"{plan.name} in {os.getpid()}\n")
        time.sleep(1.5)
    return Seven()


SPEC = KernelSpec(
    name="sevens",
    arch="sm_90a",
    operations=(),
    plans=(SevenPlan("known"), SevenPlan("unknown"), SevenPlan("seven")),
    build="tests.jit.fake_kernel:compile_seven",
    entry="none",
)
KNOWN, UNKNOWN, SEVEN_PLAN = SPEC.plans
