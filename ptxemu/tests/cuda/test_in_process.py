"""Python packages that load CUDA by name find the stand-in in their own process."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ptxemu.cuda.build import SOURCES, Standin
from ptxemu.cuda.in_process import PTXAS, InProcess
from ptxemu.launch_log import Log

# In the place of a package that binds the driver with ctypes, as PyCUDA and others do in C.
PACKAGE = '''
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry twice(.param .u64 x)
{
.reg .b32 %r<3>; .reg .b64 %rd<3>;
ld.param.u64 %rd0, [x]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 4; add.s64 %rd2, %rd0, %rd1;
ld.global.u32 %r1, [%rd2]; add.u32 %r2, %r1, %r1; st.global.u32 [%rd2], %r2; ret;
}
"""

def check(status):
    assert status == 0, status

def twice(address, threads):
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuInit(0))
    check(driver.cuModuleLoadData(ctypes.byref(module), PTX))
    check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"twice"))
    pointer = ctypes.c_uint64(address)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    shape = (1, 1, 1, threads, 1, 1, 0)
    check(driver.cuLaunchKernel(function, *shape, None, arguments, None))
'''
SCRIPT = """
import ctypes
import pycuda
x = ctypes.c_uint64()
pycuda.check(pycuda.driver.cuMemAlloc_v2(ctypes.byref(x), ctypes.c_size_t(256)))
pycuda.check(pycuda.driver.cuMemsetD32_v2(x, 21, ctypes.c_size_t(64)))
pycuda.twice(x.value, 64)
host = (ctypes.c_uint32 * 64)()
pycuda.check(pycuda.driver.cuMemcpyDtoH_v2(host, x, ctypes.c_size_t(256)))
print(set(host))
try:
    import torch
except ImportError:
    raise SystemExit(0)
tensor = torch.full((64,), 4, dtype=torch.int32, device="cuda")
pycuda.twice(tensor.data_ptr(), 64)
print(tensor.cpu().unique().tolist(), tensor.device)
pycuda.twice(tensor.data_ptr(), 96)
"""


def test_a_script_launches_on_driver_memory_and_on_tensors(
    made_standin: Standin, tmp_path: Path
) -> None:
    (tmp_path / "pycuda.py").write_text(PACKAGE)
    (tmp_path / "script.py").write_text(SCRIPT)
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "ptxemu", "exec", "--arch", "sm_90a", "--json", str(report)]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[:2] == ["{42}", "[8] cuda:0"], done.stderr
    # The last launch leaves its tensor: an error of the kernel, which the launch does not return.
    facts = json.loads(report.read_text())
    assert (done.returncode, facts["exit_code"], len(facts["launches"])) == (1, 0, 2)
    (failure,) = facts["failures"]
    assert "illegal global address" in failure and "a tensor (64,)" in failure


def test_what_links_machine_code_finds_no_linker(made_standin: Standin) -> None:
    """As numba-cuda does, which then asks the driver."""
    pathfinder = pytest.importorskip("cuda.pathfinder")
    load = pathfinder.load_nvidia_dynamic_lib
    context = InProcess(Log(), "sm_90a")
    with context:
        context._hide_linker()
        with pytest.raises(pathfinder.DynamicLibNotFoundError):
            pathfinder.load_nvidia_dynamic_lib("nvJitLink")
    assert pathfinder.load_nvidia_dynamic_lib is load
    device = ctypes.c_int(7)
    library = ctypes.CDLL(str(made_standin.library))
    assert library["cuCtxGetDevice_v2"](ctypes.byref(device), None) == 0 and device.value == 0


def test_ptx_stays_ptx_where_a_package_calls_ptxas(tmp_path: Path) -> None:
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(PTXAS)
    ptxas.chmod(0o755)
    (tmp_path / "in.ptx").write_text(".version 8.0\n")
    subprocess.run(
        [
            ptxas,
            "-lineinfo",
            "-v",
            "--gpu-name=sm_90a",
            tmp_path / "in.ptx",
            "-o",
            tmp_path / "out",
        ],
        check=True,
    )
    assert (tmp_path / "out").read_bytes() == b".version 8.0\n\0"
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    assert "release 13.0" in said


def test_extensions_of_torch_find_its_functions_for_cuda(made_standin: Standin) -> None:
    """By their names in C++; a stream is two words that registers hold."""
    assert (made_standin.folder / "libc10_cuda.so").resolve() == made_standin.library.resolve()
    library = ctypes.CDLL(str(made_standin.library))
    assert library["_ZN3c104cuda12device_countEv"]() & 0xFF == 1
    device = ctypes.c_int8(7)
    assert library["_ZN3c104cuda9GetDeviceEPa"](ctypes.byref(device)) == 0 and device.value == 0

    class Stream(ctypes.Structure):
        _fields_ = (("type", ctypes.c_int8), ("device", ctypes.c_int8), ("id", ctypes.c_int64))

    current = library["_ZN3c104cuda20getCurrentCUDAStreamEa"]
    current.restype = Stream
    stream = current(0)
    assert (stream.type, stream.device, stream.id) == (1, 0, 0)  # DeviceType::CUDA is 1
    header = SOURCES / "torch_headers" / "ptxemu_torch.h"
    assert "#define is_cuda is_cpu" in header.read_text()
