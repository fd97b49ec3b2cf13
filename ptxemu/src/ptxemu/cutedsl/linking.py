"""A compiled host object linked, in memory, against functions that are given by address."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from ptxemu.errors import PtxEmuError

# The undefined symbols of an ELF object, so that linking fails by name instead of aborting.


def undefined_symbols(elf: bytes) -> list[str]:
    """Names that a 64-bit little-endian object expects from elsewhere.

    Raises:
        ValueError: not such an object.
    """
    try:
        file: Any = ELFFile(BytesIO(elf))
    except ELFError as error:
        raise ValueError(f"elf: expected an ELF object: {error}") from error
    if file.elfclass != 64 or not file.little_endian:
        raise ValueError("elf: expected a 64-bit little-endian ELF object")
    return [
        symbol.name
        for table in file.iter_sections("SHT_SYMTAB")
        for symbol in table.iter_symbols()
        if symbol["st_shndx"] == "SHN_UNDEF"
        and symbol["st_info"]["bind"] != "STB_LOCAL"
        and symbol.name
    ]


_LINKER_SUPPLIED = {"_GLOBAL_OFFSET_TABLE_"}


class LinkError(PtxEmuError):
    """The host code calls functions that nobody supplies."""


class LinkedObject:
    """Machine code ready to run; it lives as long as this object does."""

    def __init__(self, elf: bytes, resolve: Callable[[str], int | None]) -> None:
        """Link.

        Args:
            elf: the object file.
            resolve: the address of a function by name, or None.

        Raises:
            LinkError: naming every function that `resolve` does not know.
        """
        llvm = _llvm()
        missing = []
        for name in undefined_symbols(elf):
            if name in _LINKER_SUPPLIED:
                continue
            address = resolve(name)
            if address is None:
                missing.append(name)
            else:
                llvm.add_symbol(name, address)
        if missing:
            raise LinkError(
                "the compiled host code calls functions that ptxemu does not emulate: "
                + ", ".join(sorted(missing))
            )
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(elf))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Return the address of the function `name`.

        Raises:
            LinkError: the object has no such function.
        """
        address = int(self._engine.get_function_address(name))
        if address == 0:
            raise LinkError(f"the compiled host code has no function {name}")
        return address


def _llvm() -> Any:
    """llvmlite's binding, ready to make code for this machine."""
    try:
        llvm: Any = importlib.import_module("llvmlite.binding")
    except ImportError as error:
        raise PtxEmuError(
            "running CuTe DSL host code needs llvmlite: pip install 'llvmlite>=0.43'"
        ) from error
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm
