"""`make wheel`'s judge: is a wheel with kernels what it says, and all that it needs to be?

    python tools/check_wheel.py WHEEL [--of-manifest]

Looks at the files alone; tests/wheel/ installs it. Prints what is wrong and exits with 1.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from flashdsa.jit.elf import exported_symbols, undefined_symbols
from flashdsa.jit.manifest import describe
from flashdsa.kernels.catalog import BACKENDS, variants_of

MAX_BYTES = 20_000_000
GLIBC = (2, 28)
"""The limit of manylinux_2_28."""
LIBRARIES = {"libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
NAME = re.compile(r"flashdsa-[^-]+-py3-none-manylinux_2_28_(x86_64|aarch64)\.whl")
KERNELS = "flashdsa/_kernels/"
CUDA_MACHINE = 190
"""The machine number of ELF files with a GPU's code."""
NEW_ABI = 8
"""The ELF version from which e_flags of GPU code have the architecture in their second byte."""


def problems(wheel: Path, *, every_function: bool = True) -> list[str]:
    """List the faults of a wheel.

    Args:
        every_function: all of the catalog's must be in it; otherwise those of its manifest.
    """
    found = [] if NAME.fullmatch(wheel.name) else [f"name: {wheel.name}"]
    if wheel.stat().st_size > MAX_BYTES:
        found.append(f"size: {wheel.stat().st_size} bytes, more than {MAX_BYTES}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        found += [f"not for users: {n}" for n in names if n.endswith((".o", ".pyc", ".ptx"))]
        found += _wrong_records(archive)
        found += _wrong_requirements(archive)
        if f"{KERNELS}manifest.json" not in names:
            return [*found, "no manifest of kernels"]
        manifest = json.loads(archive.read(f"{KERNELS}manifest.json"))
        if "nvidia-cutlass-dsl-libs-cu12" not in manifest["built_with"]:
            found.append("built_with: cubins of CUDA 13's tools need a driver of 580")
        for backend in BACKENDS:
            name = f"{KERNELS}{backend}.so"
            if name not in names or f"{backend}.so" not in manifest["objects"]:
                found.append(f"{backend}.so is not in it")
                continue
            path = Path(archive.extract(name, folder))
            found += _wrong_object(path, manifest["objects"][path.name], backend, every_function)
    return found


def _wrong_records(archive: zipfile.ZipFile) -> list[str]:
    """Files whose hash is not the one in RECORD, that are not listed, or listed and not there."""
    (record,) = (n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
    listed = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(record).decode()))}
    wrong = [f"not in RECORD: {n}" for n in archive.namelist() if n not in listed and n[-1] != "/"]
    wrong += [f"not there: {name}" for name in listed if name not in archive.namelist()]
    for name, value in listed.items():
        if value and name in archive.namelist():
            digest = hashlib.sha256(archive.read(name)).digest()
            own = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            wrong += [] if value == f"sha256={own}" else [f"another hash than in RECORD: {name}"]
    return wrong


def _wrong_requirements(archive: zipfile.ZipFile) -> list[str]:
    """A plain install must bring what calls kernels, and no compiler."""
    (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    plain = {
        re.split(r"[^\w.-]", line.removeprefix("Requires-Dist: "))[0].lower()
        for line in lines
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    wrong = [] if "apache-tvm-ffi" in plain else ["does not require apache-tvm-ffi"]
    return wrong + [f"requires {name}" for name in plain if name.startswith(("nvidia", "cuda"))]


def _wrong_object(
    path: Path, said: dict[str, Any], backend: str, every_function: bool
) -> list[str]:
    """List differences from the manifest, and needs that users may lack."""
    found = [f"{path.name}: not what the manifest says"] if describe(path) != said else []
    wanted = set(variants_of(backend)) if every_function else set(said["functions"])
    lacking = sorted(wanted - set(said["functions"]))
    found += [f"{path.name}: lacks {', '.join(lacking)}"] if lacking else []
    names = {f"__tvm_ffi_{name}" for name in said["functions"]}
    strange = set(exported_symbols(path)) - names
    strange = {name for name in strange if not name.startswith("flashdsa_")}
    found += [f"{path.name}: exports {', '.join(sorted(strange))}"] if strange else []
    unknown = [name for name in undefined_symbols(path) if not name.startswith("TVMFFI")]
    found += [f"{path.name}: needs {', '.join(unknown)}"] if unknown else []
    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic = elf.get_section_by_name(".dynamic")
        needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
        versions = elf.get_section_by_name(".gnu.version_r")
        glibc = [
            aux.name.removeprefix("GLIBC_")
            for _, auxiliaries in versions.iter_versions()
            for aux in auxiliaries
            if aux.name.startswith("GLIBC_")
        ]
    if needed - LIBRARIES:
        found.append(f"{path.name}: needs the libraries {', '.join(sorted(needed - LIBRARIES))}")
    too_new = [v for v in glibc if tuple(int(part) for part in v.split(".")[:2]) > GLIBC]
    found += [f"{path.name}: needs glibc {', '.join(too_new)}"] if too_new else []
    if cubin_archs(path) != [backend]:
        found.append(f"{path.name}: its cubins are for {', '.join(cubin_archs(path)) or 'nothing'}")
    if b"\n.version " in path.read_bytes() and b".entry " in path.read_bytes():
        found.append(f"{path.name}: has PTX in it")
    return found


def cubin_archs(path: Path) -> list[str]:
    """The architectures of the GPU code in an object, "sm90" for sm_90a."""
    text, found = path.read_bytes(), set()
    at = text.find(b"\x7fELF", 1)
    while at >= 0:
        if int.from_bytes(text[at + 18 : at + 20], "little") == CUDA_MACHINE:
            flags = int.from_bytes(text[at + 48 : at + 52], "little")
            # The version of the ABI says where in e_flags the architecture stands.
            found.add(f"sm{flags & 0xFF if text[at + 8] < NEW_ABI else flags >> 8 & 0xFF}")
        at = text.find(b"\x7fELF", at + 1)
    return sorted(found)


def main() -> None:
    """Print what is wrong, or that nothing is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--of-manifest", action="store_true", help="not the catalog's functions")
    arguments = parser.parse_args()
    found = problems(arguments.wheel, every_function=not arguments.of_manifest)
    size = arguments.wheel.stat().st_size
    print("\n".join(found) or f"{arguments.wheel.name}: {size} bytes, nothing wrong")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
