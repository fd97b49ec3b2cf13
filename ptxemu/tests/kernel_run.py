"""Runs tiny kernels: a body of a few lines on arrays, with registers declared for it."""

import re
from dataclasses import dataclass, replace

import numpy as np

from ptxemu import api
from ptxemu.events import Observer
from ptxemu.launch_setup import LaunchSetup
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.sched.policy import Policy

_HEADER = ".version 9.0\n.target {arch}\n.address_size 64\n"
_REGISTERS = {
    "p": "pred",
    "h": "b16",
    "r": "b32",
    "f": "f32",
    "rd": "b64",
    "fd": "f64",
    "rq": "b128",
}
"""Register names by prefix: %r0, %rd3..."""


class Recorder(Observer):
    """Keeps what the machine tells, and sets up every CTA by `fill`."""

    def __init__(self, fill=lambda cta: None):
        self.fill = fill
        self.ctas = []
        self.accesses = []
        self.complaints = []
        self.missed = []
        self.sync = []
        self.issued = []
        self.joined = []
        self.touched = []
        self.used = []

    def cta_started(self, cta):
        self.ctas.append(cta)
        self.fill(cta)

    def accessed(self, access):
        self.accesses.append(access)

    def released(self, agent, token, scope):
        self.sync.append(("released", agent.label, token, scope))

    def acquired(self, agent, token, scope):
        self.sync.append(("acquired", agent.label, token, scope))

    def fenced(self, agent, fence, instruction):
        self.sync.append(("fenced", agent.label, fence, instruction.opcode))

    def async_issued(self, operation, issuer):
        self.issued.append(operation)

    def async_joined(self, agent, operation, reads_only):
        self.joined.append((operation, reads_only))

    def async_result_touched(self, agent, operation):
        self.touched.append(operation)

    def async_result_used(self, agent, operation):
        self.used.append(operation)

    def phases_missed(self, agent, owner, offset, last, phase, instruction):
        self.missed.append((last, phase))

    def complained(self, level, code, message, agent, instruction):
        self.complaints.append((level, code, message))

    @property
    def codes(self):
        """The codes of the complaints."""
        return [code for _, code, _ in self.complaints]

    @property
    def by_operations(self):
        """The accesses that no warp made."""
        return [a for a in self.accesses if not a.agent.label.startswith("cta")]


@dataclass
class Ran:
    """What a run left: arrays by name, the observer, the launch's result."""

    arrays: dict
    seen: Recorder
    result: object

    def __getattr__(self, name):
        try:
            return self.__dict__["arrays"][name]
        except KeyError:
            raise AttributeError(name) from None


def source(body, arrays=(), *, arch="sm_90a", shared=0, before="", directives=""):
    """PTX text of kernel `k`.

    Each array `x` is a parameter; its global address is in register %rd_x. Registers %p0..., %r0...
    (see _REGISTERS) are declared as they are used. `smem` is shared memory of `shared` bytes.
    """
    loads = "".join(f"ld.param.u64 %rd_{name}, [p_{name}];\n" for name in arrays)
    declared = []
    for prefix, type_ in _REGISTERS.items():
        for number in sorted(set(re.findall(rf"%{prefix}(\d+)\b", body))):
            declared.append(f".reg .{type_} %{prefix}{number};")
    declared += [f".reg .b64 %rd_{name};" for name in arrays]
    parameters = ", ".join(f".param .u64 p_{name}" for name in arrays)
    variable = f".shared .align 1024 .b8 smem[{shared}];\n" if shared else ""
    return (
        _HEADER.format(arch=arch)
        + before
        + f".visible .entry k({parameters}) {directives}\n{{\n"
        + "\n".join(declared)
        + f"\n{variable}{loads}{body}\nret;\n}}\n"
    )


def run(
    body,
    *,
    block=32,
    grid=1,
    cluster=None,
    arch="sm_90a",
    shared=0,
    before="",
    directives="",
    policy=None,
    device=None,
    **arrays,
):
    """Run a body on arrays; the arrays are copied, what it wrote is in the result.

    A number stands for an array of that many zeros (uint32). Shared memory and TMEM begin as zeros.
    """
    own = {
        name: aligned(np.zeros(a, np.uint32) if isinstance(a, int) else a)
        for name, a in arrays.items()
    }
    text = source(body, own, arch=arch, shared=shared, before=before, directives=directives)
    module = api.load(text)
    if device is not None:
        module.device = device
    seen = Recorder()
    result = module.launch(
        "k", grid, block, args=list(own.values()), cluster=cluster,
        policy=replace(policy or Policy(), fill=0), observer=seen,
    )  # fmt: skip
    return Ran(own, seen, result)


def assert_leaves(body, expected, codes=None, **how):
    """Run a body; each array named in `expected` has the numbers then.

    `codes`: of the complaints, all of them; None: whatever they are.
    """
    ran = run(body, **how)
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(ran, name), values, err_msg=name)
    if codes is not None:
        assert ran.seen.codes == codes


def setup(text, arrays, *, block=64, grid=1):
    """The launch of a module's kernel `k` on arrays."""
    return LaunchSetup(api.load(text), "k", grid, block, tuple(arrays), GlobalMemory())


def aligned(array, alignment=256):
    """A copy whose first byte is as aligned as device memory is."""
    buffer = np.zeros(array.nbytes + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


TID = "mov.u32 %r0, %tid.x;\n"
"""%r0 = the thread's number."""


def store(array, register, index="%r0", type_="u32", size=4):
    """PTX that stores `register` in element `index` of `array`; uses %rd90 and %rd91."""
    return (
        f"mul.wide.u32 %rd90, {index}, {size};\nadd.s64 %rd91, %rd_{array}, %rd90;\n"
        f"st.global.{type_} [%rd91], {register};\n"
    )


def load(register, array, index="%r0", type_="u32", size=4):
    """PTX that loads element `index` of `array`; uses %rd92 and %rd93."""
    return (
        f"mul.wide.u32 %rd92, {index}, {size};\nadd.s64 %rd93, %rd_{array}, %rd92;\n"
        f"ld.global.{type_} {register}, [%rd93];\n"
    )
