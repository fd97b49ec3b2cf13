"""The parts of kernel names that people recognise."""

from __future__ import annotations

import ctypes
import os
import re
from functools import cache

_WIDTH = 48
_FILE_NAME_WIDTH = 60


@cache
def demangled(name: str) -> str:
    """A C++ name as in the source, with its types; as it is where it cannot be read."""
    library = _runtime()
    if library is None or not name.startswith("_Z"):
        return name
    status = ctypes.c_int(0)
    text = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        return ctypes.string_at(text).decode()
    finally:
        _free()(text)


def readable(name: str, width: int = _WIDTH) -> str:
    """The function's name and its first template arguments, without parameters, cut to `width`.

    Names that are not C++'s, or cannot be read, lose their middle.
    """
    text = demangled(name)
    if text == name:
        return name if len(name) <= width else f"{name[: width - 12]}...{name[-9:]}"
    text = _without_parameters(text).removeprefix("void ")
    return text if len(text) <= width else f"{text[: width - 3]}..."


def for_people(text: str) -> str:
    """A message with the C++ names in it made readable, and paths from this folder on."""
    named = re.sub(r"\b_Z\w+", lambda found: readable(found[0]), text)
    return named.replace(f"{os.getcwd()}{os.sep}", "")


def file_name(kernel: str) -> str:
    """Return the part of a kernel's name that people recognise, fit for a file name.

    CuTe DSL's and C++'s names hold all types of all arguments: the class or function is enough.
    """
    name = kernel if demangled(kernel) == kernel else readable(kernel, _FILE_NAME_WIDTH)
    name = re.sub(r"^kernel_cutlass_(kernel_+(main__)?)?", "", name).split("_object_at_")[0]
    return re.sub(r"\W+", "_", name).strip("_")[:_FILE_NAME_WIDTH]


def _without_parameters(text: str) -> str:
    """`void f<(int)3>(float*)` up to the parenthesis that opens the parameters."""
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += (text[at] == ")") - (text[at] == "(")
        if text[at] == "(" and depth == 0:
            return text[:at]
    return text


@cache
def _runtime() -> ctypes.CDLL | None:
    """The C++ runtime of this machine."""
    for name in ("libstdc++.so.6", "libc++abi.so.1"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.__cxa_demangle.restype = ctypes.c_void_p
        library.__cxa_demangle.argtypes = (ctypes.c_char_p,) + (ctypes.c_void_p,) * 3
        return library
    return None


@cache
def _free() -> ctypes._NamedFuncPointer:
    free = ctypes.CDLL(None).free
    free.restype = None
    free.argtypes = (ctypes.c_void_p,)
    return free
