"""Engines for a machine without network: archives that are carried there, and unpacked there.

The machine has Python 3.12, torch 2.11 for CUDA 13.0, triton 3.6, transformers 5.17 and nvcc.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from flashdsa.errors import ArgumentValueError
from flashdsa.jit.loader import compile_plan, installed_hash, installed_object
from flashdsa.jit.manifest import write_manifest
from flashdsa.jit.shared_object import build_shared_object, is_from
from flashdsa.kernels.catalog import variants_of
from workbench.engines.fat_binary import keep_architecture

HEADERS = (".h", ".hpp", ".cuh", ".inl")
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC), "manylinux2014_x86_64",
    "manylinux1_x86_64",
)  # fmt: skip
HOPPER = 90
LEFT = ("*/tests/*", "*/test/*", "*.pyc", "*/", "*.dist-info/sboms/*", "*.data/*")
"""Files that no engine needs."""


class Written(NamedTuple):
    """A file that is written on the machine.

    Attributes:
        unless: not where this module is installed.
    """

    path: str
    text: str
    unless: str = ""


class Engine(NamedTuple):
    """The parts of an engine that are carried.

    Attributes:
        name: also of a file beside this one, with the wheels.
        packages: those of which only `extensions` and `headers` are carried of compiled files.
        extensions: with Hopper's code alone. headers: folders that are compiled with there.
        left: files that its path on Hopper does not load.
        apart: an extension with an archive of its own, and that one's name.
        libraries: of this machine, which that one lacks, for LD_LIBRARY_PATH.
        written, entry_points: made on the machine; the first flashdsa on its path has the latter.
    """

    name: str
    packages: tuple[str, ...]
    extensions: tuple[str, ...]
    headers: tuple[str, ...]
    left: tuple[str, ...]
    entry_points: str
    written: tuple[Written, ...]
    apart: tuple[str, str] | None = None
    libraries: tuple[str, ...] = ()

    @property
    def needs(self) -> Path:
        """The requirements: the engine, and what the machine lacks."""
        return Path(__file__).with_name(f"{self.name}_needs.txt")

    @property
    def archives(self) -> tuple[str, ...]:
        """Their names."""
        apart = () if self.apart is None else (self.apart[1],)
        return f"{self.name}.tar.xz", *apart, "flashdsa.tar.xz"

    def is_wanted(self, name: str) -> bool:
        """Whether a wheel's file is carried: of the extensions and headers few."""
        if any(fnmatch(name, one) for one in (*LEFT, *self.left)):
            return False
        if not name.startswith(self.packages):
            return True
        if name.endswith(".so"):
            return name in self.extensions or (self.apart is not None and name == self.apart[0])
        return not name.endswith(HEADERS) or name.startswith(self.headers)


# vLLM's extensions keep to torch's stable ABI: those of a wheel for torch 2.14 load under 2.11.
VLLM = Engine(
    "vllm",
    packages=("vllm/",),
    extensions=(
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/_flashmla_C.abi3.so",
        "vllm/_flashmla_extension_C.abi3.so",
        "vllm/cumem_allocator.abi3.so",
        "vllm/spinloop.abi3.so",
        "vllm/fs_io_C.abi3.so",
        "vllm/third_party/deep_gemm/_C_extension.abi3.so",
    ),
    headers=("vllm/third_party/deep_gemm/include/",),
    left=(
        "vllm/third_party/fmha_sm100/*", "vllm/entrypoints/serve/instrumentator/static/*",
        "vllm/vllm-rs", "vllm/kernels/helion/configs/*",
    ),
    entry_points="[vllm.general_plugins]\nflashdsa = flashdsa.integrations.vllm:register\n",
    # Imported on every CUDA machine, of use on Blackwell only.
    written=(
        Written(
            "vllm/models/deepseek_v32/nvidia/ops/fused_q_cutedsl.py",
            '''"""Written by flashdsa's workbench: this machine has no CuTe DSL."""


def is_fused_q_cutedsl_supported(*arguments, **named):
    return False


fused_q_cutedsl = None
''',
            unless="cutlass",
        ),
    ),
    # vLLM's dense prefill; without it vllm.vllm_flash_attn does not import.
    apart=("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "fa3.tar.xz"),
)  # fmt: skip
SGLANG = Engine(
    "sglang",
    packages=("sgl_kernel/", "sglang/", "deep_gemm/"),
    extensions=(
        "sgl_kernel/sm90/common_ops.abi3.so",
        "sgl_kernel/flashmla_ops.abi3.so",
        "deep_gemm/_C.so",
    ),
    headers=("sglang/jit_kernel/", "deep_gemm/include/"),
    left=(
        "sglang/multimodal_gen/*", "sglang/benchmark/*", "sglang/eval/*",
        "torch_memory_saver_*.so", "_mscclpp*", "lib/*",
        "triton_kernels/*", "include/*", "lib64/*", "tools/*",
    ),
    entry_points=(
        "[sglang.srt.plugins]\n"
        "flashdsa = flashdsa.integrations.sglang:register\n"
        "flashdsa_indexer = flashdsa.integrations.sglang:register_indexer\n"
        "flashdsa_counts = workbench.engines.sglang_process:count_calls\n"
    ),
    # transformers 5.8, which SGLang wants, refuses the machine's tokenizers for their version.
    # FlashInfer's functions are imported by name, and left alone if it is said not to be there.
    written=(
        *(
            Written(f"flashinfer/{name}.py", "def __getattr__(name):\n    return None\n")
            for name in ("__init__", "fused_moe", "gemm", "sampling")
        ),
        Written(
            "transformers/dependency_versions_check.py",
            "def dep_version_check(*arguments, **named): ...\n",
        ),
    ),
    libraries=("/lib/x86_64-linux-gnu/libnuma.so.1",),
)  # fmt: skip
OTHER_KERNELS = re.compile(
    "_(512|joined|v32_no_rope|v4|v41|h32|h16|bf16|mxfp4|blocks|listed|bwd|kl|target)"
    "|^(indexer_scores|compress|quantize|write)"
)
"""Names of variants for other models, and for training."""
KERNELS = "flashdsa_kernels"
LIBRARIES = "libraries"


def pack(folder: Path, engine: Engine) -> dict[str, int]:
    """Download wheels into `folder`, compile kernels there, once, and write the archives; bytes
    by their names.

    Raises:
        UnsupportedError: no CuTe DSL or no C compiler.
    """
    wheels, kernels = folder / f"{engine.name}_wheels", folder / "kernels"
    if len(list(wheels.glob("*.whl"))) < len(engine.needs.read_text().splitlines()) - 1:
        _download(engine.needs, wheels)
    _compile(kernels / "sm90.so")
    files = dict(_thinned(engine, wheels.glob("*.whl")))
    files |= {f"{LIBRARIES}/{Path(one).name}": Path(one).read_bytes() for one in engine.libraries}
    contents = [files]
    if engine.apart is not None:
        contents.append({engine.apart[0]: files.pop(engine.apart[0])})
    contents.append({f"{KERNELS}/{path.name}": path.read_bytes() for path in kernels.iterdir()})
    archives = dict(zip(engine.archives, contents, strict=True))
    return {name: _write(folder / name, held) for name, held in archives.items()}


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


def _download(needs: Path, folder: Path) -> None:
    """Wheels for Python 3.12 by this Python's pip, without what they need in turn."""
    platforms = [word for one in PLATFORMS for word in ("--platform", one)]
    target = ("--python-version", "3.12", "--implementation", "cp", *platforms)
    flags = ("--quiet", "--no-deps", "--only-binary=:all:", *target, "--dest", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "download", *flags, "-r", needs], check=True)


def _thinned(engine: Engine, wheels: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """The wheels' files that are wanted, extensions with Hopper's code alone."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in filter(engine.is_wanted, archive.namelist()):
                data = bytearray(archive.read(name))
                if name.startswith(engine.packages) and name.endswith(".so"):
                    keep_architecture(data, HOPPER)
                yield name, bytes(data)


def _write(path: Path, files: dict[str, bytes]) -> int:
    """Write an archive; its bytes."""
    with lzma.open(path, "wb") as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in sorted(files.items()):
            about = tarfile.TarInfo(name)
            about.size, about.mode = len(data), 0o755
            archive.addfile(about, io.BytesIO(data))
    return path.stat().st_size


def unpack(archives: Path, folder: Path, engine: Engine) -> None:
    """Unpack an engine into `folder`, for PYTHONPATH, unless it is there; flashdsa's kernels into
    this checkout; make the plugins known.

    Raises:
        ArgumentValueError: an archive is missing, or its kernels are of other sources.
    """
    ready = folder / ".ready"
    if ready.exists():
        return
    missing = [name for name in engine.archives if not (archives / name).exists()]
    if missing:
        raise ArgumentValueError(f"--packed: {archives} has no {', '.join(missing)}; see --pack")
    for name in engine.archives:
        with tarfile.open(archives / name) as archive:
            archive.extractall(folder, filter="data")
    installed = installed_object("sm90")
    shutil.copytree(folder / KERNELS, installed.parent, dirs_exist_ok=True)
    if not is_from(installed, installed_hash("sm90")):
        raise ArgumentValueError(f"--packed: {archives} has kernels of other sources; --pack again")
    for path, text, unless in engine.written:
        if not unless or find_spec(unless) is None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    about = folder / "flashdsa-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flashdsa\nVersion: 0\n")
    (about / "entry_points.txt").write_text(engine.entry_points)
    ready.touch()
