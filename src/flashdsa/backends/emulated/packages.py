"""The packages that backends need besides flashdsa's own, and how to install those that lack."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from flashdsa.errors import UnsupportedError

PACKAGES = {
    "ptxemu": "ptxemu",
    "cutlass": "nvidia-cutlass-dsl>=4.8,<5",
    "llvmlite": "llvmlite>=0.43",
    "tvm_ffi": "apache-tvm-ffi>=0.1.11,<0.2",
    "triton": "triton",
}
"""The emulator, the kernels' compilers, and what catches their launches -> pip's names of them."""
ROOT = Path(__file__).parents[4]
"""The checkout, if these sources are in one."""


def missing_packages(backend: str = "emulate-sm90") -> list[str]:
    """Return the `PACKAGES` that a backend needs and that cannot be imported.

    A folder without `__init__.py` is no package: in a checkout `ptxemu/` is one.
    """
    by_triton = backend.endswith("triton")
    needed = [*PACKAGES] if backend.startswith("emulate") else ["triton"] * by_triton
    specs = {name: find_spec(name) for name in needed if by_triton or name != "triton"}
    return [name for name, spec in specs.items() if spec is None or spec.origin is None]


def say_missing(missing: Sequence[str]) -> str:
    """Say which `PACKAGES` are needed, and the command that installs all of them."""
    which = f"package{'s' * (len(missing) > 1)} {', '.join(missing)}"
    return f"needs the Python {which}; {install_command(missing)}"


def install_command(missing: Sequence[str]) -> str:
    """Say how to install these `PACKAGES`; ptxemu, which no registry has, as flashdsa was."""
    emulator = _emulator() if "ptxemu" in missing else None
    needed = [emulator, *(PACKAGES[name] for name in missing if name != "ptxemu")]
    command = " ".join(["pip install", *(f"'{one}'" for one in needed if one)])
    if "ptxemu" in missing and emulator is None:
        return f"{command}, and ptxemu from where flashdsa came from"
    return command


def _emulator() -> str | None:
    """ptxemu's folder beside flashdsa's sources, its wheel beside flashdsa's, or its repository."""
    try:
        origin = json.loads(distribution("flashdsa").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    if "vcs_info" in origin:
        commit = origin["vcs_info"]["commit_id"]
        return f"ptxemu @ git+{origin['url']}@{commit}#subdirectory=ptxemu"
    url = urlsplit(origin.get("url", ""))
    local = [Path(unquote(url.path))] if url.scheme == "file" else []
    folders = (place / "ptxemu" for place in (ROOT, *local))
    found = [folder for folder in folders if (folder / "pyproject.toml").is_file()]
    found += [wheel for place in local for wheel in place.parent.glob("ptxemu-*.whl")]
    return str(found[0]) if found else None


def require_packages() -> None:
    """Do nothing if the emulator can run.

    Raises:
        UnsupportedError: a package is missing.
    """
    missing = missing_packages()
    if missing:
        raise UnsupportedError(f"the emulator {say_missing(missing)}")
