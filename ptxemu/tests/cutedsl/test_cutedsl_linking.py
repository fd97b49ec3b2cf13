"""Objects are linked against given functions; what is missing is named."""

import ctypes

import pytest

from ptxemu.cutedsl.elf import undefined_symbols
from ptxemu.cutedsl.linking import LinkedObject, LinkError
from ptxemu.cutedsl.patching import Patches

llvm = pytest.importorskip("llvmlite.binding", reason="llvmlite is not installed")

CODE = """
declare i32 @supplied(i32)
define i32 @entry(i32 %x) {
  %y = call i32 @supplied(i32 %x)
  %z = add i32 %y, 1
  ret i32 %z
}
"""


@pytest.fixture(scope="module")
def elf():
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic")
    return machine.emit_object(llvm.parse_assembly(CODE))


def test_undefined_symbols_are_those_of_the_object(elf):
    assert [name for name in undefined_symbols(elf) if not name.startswith("_")] == ["supplied"]


def test_a_file_that_is_no_object_is_refused():
    with pytest.raises(ValueError, match="ELF"):
        undefined_symbols(b"not an object")


def test_linked_code_calls_what_it_was_given(elf):
    callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(lambda x: 10 * x)
    linked = LinkedObject(elf, lambda _: ctypes.cast(callback, ctypes.c_void_p).value)
    entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(linked.address("entry"))
    assert entry(4) == 41
    with pytest.raises(LinkError, match="no function other"):
        linked.address("other")


def test_a_missing_function_is_named_instead_of_ending_the_process(elf):
    with pytest.raises(LinkError, match="supplied"):
        LinkedObject(elf, lambda _: None)


def test_patches_are_undone_in_reverse_and_inherited_attributes_stay_inherited():
    class Base:
        value = 1

    class Derived(Base):
        pass

    patches = Patches()
    assert patches.replace(Derived, "value", 2) == 1
    patches.replace(Derived, "value", 3)
    assert Derived.value == 3
    patches.undo()
    assert Derived.value == 1 and "value" not in vars(Derived)
