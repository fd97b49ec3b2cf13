"""vLLM for a machine without network: archives that are carried there, and unpacked there.

The machine has Python 3.12, torch 2.11 for CUDA 13.0, triton 3.6, transformers 5.17 and nvcc.
vLLM's extensions keep to torch's stable ABI, so those of a wheel for torch 2.14 load under 2.11.
"""

from __future__ import annotations

import io
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashdsa.errors import ArgumentValueError
from flashdsa.jit.loader import compile_plan, installed_hash, installed_object
from flashdsa.jit.manifest import write_manifest
from flashdsa.jit.shared_object import build_shared_object, is_from
from flashdsa.kernels.catalog import variants_of
from workbench.engines.fat_binary import keep_architecture

NEEDS = Path(__file__).with_name("vllm_needs.txt")
"""vLLM, and requirements that the machine lacks."""
EXTENSIONS = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/cumem_allocator.abi3.so",
    "vllm/spinloop.abi3.so",
    "vllm/fs_io_C.abi3.so",
    "vllm/third_party/deep_gemm/_C_extension.abi3.so",
)
"""Those of vLLM that its Hopper path loads."""
FLASH_ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
"""vLLM's dense prefill; without it vllm.vllm_flash_attn does not import."""
LEFT = (
    "vllm/third_party/fmha_sm100/*", "*/tests/*", "*/test/*", "*.pyc", "*/",
    "vllm/entrypoints/serve/instrumentator/static/*", "vllm/vllm-rs", "*.dist-info/sboms/*",
    "vllm/kernels/helion/configs/*",
)  # fmt: skip
HEADERS = (".h", ".hpp", ".cuh", ".inl")
NEEDED_HEADERS = "vllm/third_party/deep_gemm/include/"
"""DeepGEMM compiles with them on the machine."""
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC), "manylinux2014_x86_64",
    "manylinux1_x86_64",
)  # fmt: skip
HOPPER = 90
CUTE_DSL_QUERY = "vllm/models/deepseek_v32/nvidia/ops/fused_q_cutedsl.py"
"""Imported on every CUDA machine, of use on Blackwell only."""
NO_CUTE_DSL_QUERY = '''"""Written by flashdsa's workbench: this machine has no CuTe DSL."""


def is_fused_q_cutedsl_supported(*arguments, **named):
    return False


fused_q_cutedsl = None
'''
ENTRY_POINT = "[vllm.general_plugins]\nflashdsa = flashdsa.integrations.vllm:register\n"
OTHER_KERNELS = re.compile(
    "_(512|joined|v32_no_rope|v4|v41|h32|h16|bf16|mxfp4|blocks|listed|bwd|kl|target)"
    "|^(indexer_scores|compress|quantize|write)"
)
"""Names of variants for other models, and for training."""
KERNELS = "flashdsa_kernels"
ARCHIVES = ("vllm.tar.xz", "fa3.tar.xz", "flashdsa.tar.xz")


def pack(folder: Path) -> dict[str, int]:
    """Download wheels into `folder`, compile kernels there, once, and write the archives; bytes
    by their names.

    Raises:
        UnsupportedError: no CuTe DSL or no C compiler.
    """
    wheels, kernels = folder / "wheels", folder / "kernels"
    if len(list(wheels.glob("*.whl"))) < len(NEEDS.read_text().splitlines()) - 1:
        _download(wheels)
    _compile(kernels / "sm90.so")
    files = dict(_thinned(wheels.glob("*.whl")))
    attention = {FLASH_ATTENTION: files.pop(FLASH_ATTENTION)}
    own = {f"{KERNELS}/{path.name}": path.read_bytes() for path in kernels.iterdir()}
    contents = dict(zip(ARCHIVES, (files, attention, own), strict=True))
    return {name: _write(folder / name, held) for name, held in contents.items()}


def needed_kernels() -> dict[str, Any]:
    """Variants that a model of 64 attention and 64 index heads with 576 columns may take."""
    found = variants_of("sm90")
    return {name: variant for name, variant in found.items() if not OTHER_KERNELS.search(name)}


def _compile(target: Path) -> None:
    """Compile the kernels that are needed, unless `target` is of these sources."""
    sources = installed_hash("sm90")
    if not is_from(target, sources):
        compiled = {name: compile_plan(*variant) for name, variant in needed_kernels().items()}
        build_shared_object(target, compiled, sources)
    write_manifest(target.parent)


def _download(folder: Path) -> None:
    """Wheels for Python 3.12 by this Python's pip, without what they need in turn."""
    platforms = [word for one in PLATFORMS for word in ("--platform", one)]
    target = ("--python-version", "3.12", "--implementation", "cp", *platforms)
    flags = ("--quiet", "--no-deps", "--only-binary=:all:", *target, "--dest", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "download", *flags, "-r", NEEDS], check=True)


def _thinned(wheels: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """The wheels' files that are wanted, extensions with Hopper's code alone."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in filter(is_wanted, archive.namelist()):
                data = bytearray(archive.read(name))
                if name in (*EXTENSIONS, FLASH_ATTENTION):
                    keep_architecture(data, HOPPER)
                yield name, bytes(data)


def is_wanted(name: str) -> bool:
    """Whether a wheel's file is carried: of vLLM's extensions and headers few."""
    if any(fnmatch(name, one) for one in LEFT):
        return False
    if not name.startswith("vllm/"):
        return True
    if name.endswith(".so"):
        return name in (*EXTENSIONS, FLASH_ATTENTION)
    return not name.endswith(HEADERS) or name.startswith(NEEDED_HEADERS)


def _write(path: Path, files: dict[str, bytes]) -> int:
    """Write an archive; its bytes."""
    with lzma.open(path, "wb") as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in sorted(files.items()):
            about = tarfile.TarInfo(name)
            about.size, about.mode = len(data), 0o755
            archive.addfile(about, io.BytesIO(data))
    return path.stat().st_size


def unpack(archives: Path, folder: Path) -> None:
    """Unpack vLLM into `folder`, for PYTHONPATH, unless it is there; flashdsa's kernels into this
    checkout. The plugin is made known where flashdsa is not installed.

    Raises:
        ArgumentValueError: an archive is missing.
    """
    ready = folder / ".ready"
    if ready.exists():
        return
    missing = [name for name in ARCHIVES if not (archives / name).exists()]
    if missing:
        raise ArgumentValueError(f"--packed: {archives} has no {', '.join(missing)}; see --pack")
    for name in ARCHIVES:
        with tarfile.open(archives / name) as archive:
            archive.extractall(folder, filter="data")
    shutil.copytree(folder / KERNELS, installed_object("sm90").parent, dirs_exist_ok=True)
    if find_spec("cutlass") is None:
        (folder / CUTE_DSL_QUERY).write_text(NO_CUTE_DSL_QUERY)
    if not entry_points(group="vllm.general_plugins", name="flashdsa"):
        about = folder / "flashdsa-0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flashdsa\nVersion: 0\n")
        (about / "entry_points.txt").write_text(ENTRY_POINT)
    ready.touch()
