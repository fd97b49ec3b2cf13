"""Sees to it that CuTe DSL keeps the PTX (and line numbers) of what it compiles.

CuTe DSL keeps PTX only if asked when it compiles. Whichever of it and `ptxemu.cutedsl` is imported
first, every compilation after both are there is asked, through the options object that all of
them pass; artifacts that the user asked for stay as they are.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any

# Makes CuTe DSL look up the source line of each place in the code once a compilation.
#
# It looks the line up for every operation that it builds, in the position table of the caller's
# code, after a walk past its own frames: a seventh of a compilation's time. 70,000 operations of a
# kernel come from some 3,000 places.

_OPERATIONS_MODULE = "cutlass._mlir_helpers.op"
_FRAME_INFO, _IS_LIBRARY_FRAME = "_fast_frameinfo", "_is_framework_stack_frame"

_found: list[dict[Any, Any]] = []


def begin_compilation() -> None:
    """Forget the places of the compilation before, whose code is made anew for each; the first call
    replaces the look-ups of CuTe DSL. One without these functions stays as it is."""
    module = sys.modules.get(_OPERATIONS_MODULE)
    if not _found and module is not None:
        _replace(module, _FRAME_INFO, lambda frame: (id(frame.f_code), frame.f_lasti))
        _replace(module, _IS_LIBRARY_FRAME, lambda frame: id(frame.f_code))
    for answers in _found:
        answers.clear()


def _replace(module: Any, name: str, place_of: Callable[[FrameType], Any]) -> None:
    look_up: Callable[[FrameType], Any] | None = getattr(module, name, None)
    if look_up is None:
        return
    # The code is kept: no other may get its id.
    answers: dict[Any, tuple[CodeType, Any]] = {}

    def look_up_once(frame: FrameType) -> Any:
        place = place_of(frame)
        found = answers.get(place)
        if found is None:
            found = answers[place] = frame.f_code, look_up(frame)
        return found[1]

    setattr(module, name, look_up_once)
    _found.append(answers)


_COMPILER_MODULE = "cutlass.base_dsl.compiler"
_SINGLETONS_MODULE = "cutlass.base_dsl.dsl"
_MARK = "_ptxemu_keeps_ptx"

_directory: str | None = None


def install(*, line_info: bool = True) -> None:
    """Keep the PTX of every compilation from now on.

    Args:
        line_info: also ask for `.loc` directives, so that findings name Python lines.
    """
    _Settings.line_info = line_info
    module = sys.modules.get(_COMPILER_MODULE)
    if module is not None:
        _patch(module)
        _forget_compiled()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def keeps_lines() -> bool:
    """Whether compilations have `.loc` directives now."""
    return _Settings.line_info


class _Settings:
    line_info = True


def _patch(compiler: ModuleType) -> None:
    options_class = compiler.CompileOptions
    if getattr(options_class.apply_envar_settings, _MARK, False):
        return
    original = options_class.apply_envar_settings

    def apply_envar_settings(self: Any, envar: Any, function_name: str) -> None:
        keep = self.options[compiler.KeepPTX]
        # CuTe DSL reuses an options object: a value that was set here is not the user's wish.
        asked = (bool(keep.value) and not getattr(keep, _MARK, False)) or envar.keep_ptx
        if not asked:
            setattr(keep, _MARK, True)
        keep.value = True
        envar.disable_file_caching = True  # what the disk cache holds comes without PTX
        if _Settings.line_info:
            self.options[compiler.GenerateLineInfo].value = True
            begin_compilation()
        original(self, envar, function_name)
        if not asked or not os.path.isdir(os.path.dirname(keep.dump_path) or "."):
            arch = self.options[compiler.GPUArch].value or envar.arch
            keep.dump_path = os.path.join(_scratch(), function_name)
            keep.full_ptx_path = f"{keep.dump_path}.{arch}.ptx"

    setattr(apply_envar_settings, _MARK, True)
    options_class.apply_envar_settings = apply_envar_settings


def _forget_compiled() -> None:
    """Clear the caches of direct calls of jit functions: they were compiled without PTX."""
    module = sys.modules.get(_SINGLETONS_MODULE)
    if module is None:
        return
    for dsl in module.DSLSingletonMeta._instances.values():
        cache = getattr(dsl, "jit_cache", None)
        if cache is not None:
            cache.clear()


def _scratch() -> str:
    """A directory for the PTX files; CuTe DSL reads each one back at once."""
    global _directory
    if _directory is None or not os.path.isdir(_directory):
        _directory = tempfile.mkdtemp(prefix="ptxemu-")
        atexit.register(shutil.rmtree, _directory, ignore_errors=True)
    return _directory


class _Finder(importlib.abc.MetaPathFinder):
    """Patches CuTe DSL's compiler module right after it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with the patch appended to its loading."""
        if fullname != _COMPILER_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(importlib.abc.Loader):
    """Loads as the original loader does, then patches."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as the original loader does."""
        created: ModuleType | None = self._original.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with the original loader and keep that loader, to find the source."""
        self._original.exec_module(module)
        module.__loader__ = self._original
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        _patch(module)
