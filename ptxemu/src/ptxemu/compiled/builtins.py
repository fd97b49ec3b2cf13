"""Machine code as builtin functions of the interpreter: calls of 0.1 us, through ctypes 1 us."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from ptxemu.compiled.loops import I64, Value, constant, require

# LLVM modules as machine code of this computer.


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


# Builtin functions of such code.

_OBJECT = ir.IntType(8).as_pointer()
_FASTCALL = 0x0080
"""METH_FASTCALL: (self, array of arguments, how many)."""
_keep: list[Any] = []


class _MethodDef(ctypes.Structure):
    """PyMethodDef of the C API."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("method", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def make_builtin(
    name: str,
    num_arguments: int,
    write: Callable[[Any, Sequence[Value]], None],
    *,
    buffers: Collection[int] = (),
    objects: Collection[int] = (),
) -> Callable[..., int]:
    """A function of 64-bit words that gives a word.

    Args:
        write: writes the body with a builder and the arguments, `ret` included.
        buffers: positions of arguments that are `bytes`; the code gets their address, and may read
            there until it returns.
        objects: positions of arguments of which the code gets the address of the object itself. The
            others are integers, of which the lowest 64 bits count.
    """
    module = ir.Module(name=name)
    body = ir.Function(module, ir.FunctionType(I64, [I64] * num_arguments), name=f"{name}_body")
    body.linkage = "internal"
    inside = ir.IRBuilder(body.append_basic_block("entry"))
    write(inside, [Value(inside, argument) for argument in body.args])
    type_ = ir.FunctionType(_OBJECT, [_OBJECT, _OBJECT.as_pointer(), I64])
    wrapper = ir.Function(module, type_, name=name)
    b = ir.IRBuilder(wrapper.append_basic_block("entry"))
    refused = wrapper.append_basic_block("refused")
    _, given, count = wrapper.args
    require(Value(b, count) == num_arguments, refused)
    words = []
    for position in range(num_arguments):
        argument = b.load(b.gep(given, [constant(position)]))
        if position in buffers:
            address = b.call(_imported(module, "PyBytes_AsString", _OBJECT, _OBJECT), [argument])
            words.append(b.ptrtoint(address, I64))
            require(Value(b, words[-1]) != 0, refused)
        elif position in objects:
            words.append(b.ptrtoint(argument, I64))
        else:
            function = _imported(module, "PyLong_AsUnsignedLongLongMask", I64, _OBJECT)
            words.append(b.call(function, [argument]))
    error = b.call(_imported(module, "PyErr_Occurred", _OBJECT), [])
    require(Value(b, b.ptrtoint(error, I64)) == 0, refused)
    result = b.call(body, words)
    b.ret(b.call(_imported(module, "PyLong_FromLongLong", _OBJECT, I64), [result]))
    b.position_at_end(refused)
    b.call(_imported(module, "PyErr_BadArgument", ir.IntType(32)), [])
    b.ret(ir.Constant(_OBJECT, None))
    address, engine = machine_code(module, name)
    definition = _MethodDef(name.encode(), address, _FASTCALL, None)
    _keep.extend((engine, definition))
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.argtypes, new.restype = [ctypes.c_void_p] * 3, ctypes.py_object
    made: Callable[..., int] = new(ctypes.addressof(definition), None, None)
    return made


def _imported(module: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A function of the C API, declared in a module."""
    found = module.globals.get(name)
    if found is None:
        function = getattr(ctypes.pythonapi, name)
        add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value or 0)
        found = ir.Function(module, ir.FunctionType(result, arguments), name=name)
    return found
