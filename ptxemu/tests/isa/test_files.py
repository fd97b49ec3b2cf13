"""Which files of `ptxemu.isa` an instruction loads."""

import subprocess
import sys

WORDS_OF_FILES = """
import pkgutil, sys
from importlib import import_module
from ptxemu import isa
from ptxemu.isa import forms, registry

found = {}

def noting(function):
    def noted(opcodes, *more):
        frame = sys._getframe()
        while frame.f_code.co_name != "<module>":
            frame = frame.f_back
        words = found.setdefault(frame.f_globals["__name__"].rpartition(".")[2], set())
        words.update(one.partition(".")[0] for one in opcodes)
        return function(opcodes if function is registered else opcodes[0], *more)
    return noted

registered, overload = registry._registered, forms.overload
registry._registered = noting(registered)
forms.overload = lambda opcode, types: noting(overload)((opcode,), types)
for module in pkgutil.iter_modules(isa.__path__):
    import_module("ptxemu.isa." + module.name)
print({name: " ".join(sorted(words)) for name, words in found.items()} == isa.FILES)
"""


def _printed(script: str) -> str:
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_every_file_is_loaded_by_the_words_that_it_defines() -> None:
    assert _printed(WORDS_OF_FILES) == "True"


def test_a_kernel_loads_the_instructions_that_it_uses() -> None:
    script = """
import sys, ptxemu
head = ".version 8.0\\n.target sm_90a\\n.address_size 64\\n.visible .entry k()"
ptxemu.load(head + "{ .reg .b32 %r<2>; shl.b32 %r0, %r1, 1; ret; }").program("k")
used = {"logic", "registry", "forms", "kernel_rules"}
print({m.split(".")[2] for m in sys.modules if m.startswith("ptxemu.isa.")} - used)
print({m for m in sys.modules if m.startswith(("ptxemu.engines.", "ptxemu.check."))})
"""
    assert _printed(script).splitlines() == ["set()", "{'ptxemu.check.findings'}"]


def test_a_command_loads_no_other() -> None:
    script = """
import sys
from ptxemu.cli.main import main
try:
    main(["info", "--help"])
except SystemExit:
    pass
print({m for m in sys.modules if m.endswith("_command") or ".mutate" in m or ".cutedsl" in m})
"""
    assert _printed(script).splitlines()[-1] == "{'ptxemu.cli.info_command'}"
