"""LLVM modules as machine code of this computer."""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding as llvm


@cache
def _host() -> tuple[str, str]:
    """Name and features of this machine's processor; LLVM is ready to make code for it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def machine_code(module: Any, name: str) -> tuple[int, Any]:
    """The address of a function of a module, and what keeps it alive."""
    cpu, features = _host()
    # The engine owns its target machine: each has one of its own.
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=1, jit=True
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), target)
    engine.finalize_object()
    return int(engine.get_function_address(name)), engine


def add_symbol(name: str, address: int) -> None:
    """Code that is made from now on may call the function at `address` by this name."""
    llvm.add_symbol(name, address)
