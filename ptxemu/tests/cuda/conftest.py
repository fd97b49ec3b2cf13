"""The compilers that tests of CUDA programs need, and a cache of their own for the stand-in."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ptxemu.cuda import nvcc
from ptxemu.cuda.build import Standin, standin

PROGRAMS = Path(__file__).parent / "programs"


def compile_c(source: Path, program: Path, standin: Standin, library: str) -> Path:
    """A program that needs CUDA's library by its own name, as one that was linked elsewhere."""
    options = [f"-L{standin.folder}", "-Wl,--no-as-needed", f"-l:{library}", "-lcuda"]
    command = [shutil.which("cc") or "gcc", str(source), *options, "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="session")
def made_standin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    """The stand-in, compiled in a folder of the tests."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler, with which the stand-in is made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PTXEMU_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield standin()


@pytest.fixture(scope="session")
def runtime_program(made_standin: Standin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """programs/runtime.cu as nvcc makes it by default: the runtime of CUDA is linked in."""
    try:
        compiler, options = nvcc.find_nvcc()
    except nvcc.NvccError as error:
        pytest.skip(str(error))
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler, which nvcc calls for the host's code")
    program = tmp_path_factory.mktemp("program") / "runtime"
    source = PROGRAMS / "runtime.cu"
    made = nvcc.run_nvcc(
        [compiler, *options, "-lineinfo", "-arch=sm_90", str(source), "-o", str(program)]
    )
    assert made == "", made
    return program
