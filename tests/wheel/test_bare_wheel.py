"""A wheel with kernels: what is in it, and that it works where neither CuTe DSL nor a compiler is.

The objects hold two kernels, so that they are made in seconds; `make wheel` checks one with all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import distribution as metadata_of
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from flashdsa.kernels.catalog import variants_of
from tests.support.distributions import with_needs
from tests.support.houses import ROOT, copy_build_files
from tools.check_wheel import problems

pytestmark = pytest.mark.slow
KERNELS = {"sm90": "write_index_k_bfloat16", "sm100": "sm100_indexer_logits_h16"}
LIST_AND_CALL = """
import json, sys
from importlib.util import find_spec
import flashdsa
assert find_spec("cutlass") is None and "torch" not in sys.modules
import torch
from flashdsa.jit.loader import load
from flashdsa.kernels.catalog import variants_of
said = {}
for backend, name in json.loads(sys.argv[1]).items():
    function = load(*variants_of(backend)[name])
    try:
        function()
    except TypeError as error:
        said[name] = str(error)
write = load(*variants_of("sm90")["write_index_k_bfloat16"])
k, slots, cache = torch.zeros(2, 128).bfloat16(), torch.zeros(2).int(), torch.zeros(2, 8448).byte()
try:
    write(k, slots, cache)
except (ValueError, TypeError) as error:
    said["on the CPU"] = str(error)
try:
    load(*variants_of("sm90")["rank_scores"])
except NotImplementedError as error:
    said["a kernel that is not in it"] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy of the tree."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "_kernels")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignored)
    copy_build_files("flashdsa", tree)
    objects = tree / "src" / "flashdsa" / "_kernels"
    for backend, name in KERNELS.items():
        target = ["--target", str(objects / f"{backend}.so")]
        command = [sys.executable, "tools/build_kernels.py", "--arch", backend, "--only", name]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        subprocess.run([*command, *target], check=True, cwd=ROOT, env=environment)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "--wheel-dir", str(out), str(tree)], check=True)
    (made,) = out.glob("*.whl")
    return made


def requirements(wheel: Path) -> list[str]:
    """What the wheel's metadata requires, extras among it."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    marked = "Requires-Dist: "
    return [line.removeprefix(marked) for line in lines if line.startswith(marked)]


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that holds the wheel and its requirements, this one's, and nothing else."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    for name in with_needs(requirements(wheel)):
        distribution = metadata_of(name)
        for file in distribution.files or ():
            if ".." not in file.parts and file.parts[0] != "__pycache__":
                link = packages / file.parts[0]
                if not link.exists():
                    link.symlink_to(distribution.locate_file(file.parts[0]))
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", str(wheel)], check=True)
    return venv / "bin" / "python"


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without a compiler, and away from the source tree."""
    environment = {"PATH": str(python.parent), "HOME": str(python.parent)}
    return subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=python.parent,
    )


def test_the_wheel_is_what_it_says(wheel: Path) -> None:
    assert problems(wheel, every_function=False) == []
    lacking = problems(wheel)
    assert len(lacking) == 2 and all(": lacks " in line for line in lacking)


def test_functions_load_and_know_their_arguments_without_a_compiler(python: Path) -> None:
    done = run(python, "-c", LIST_AND_CALL, json.dumps(KERNELS))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for name in KERNELS.values():
        assert said[name].startswith("Expects ")
    assert "device" in said["on the CPU"]
    assert "CuTe DSL" in said["a kernel that is not in it"]


def test_info_says_where_kernels_come_from(python: Path) -> None:
    done = run(python, "-m", "flashdsa", "info", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    for row in document["kernels"]:
        name = KERNELS[row["backend"]]
        assert row["state"] == "used" and row["functions"][name] == "installed"
        others = {origin for other, origin in row["functions"].items() if other != name}
        assert others == {"not here"} and set(row["functions"]) == set(variants_of(row["backend"]))
        assert "nvidia-cutlass-dsl" in row["built_with"]
    (why,) = {
        "; ".join(row["why_not"])
        for row in document["implementations"]
        if row["backend"] == "sm90" and row["implemented"]
    }
    assert why == "needs a GPU of compute capability 9.0; found no GPU"
    text = " ".join(run(python, "-m", "flashdsa", "info").stdout.split())  # lines are folded
    assert "1 installed" in text and "not compiled: pip install" in text


def test_the_cpu_backend_computes(python: Path) -> None:
    code = (
        "import torch, flashdsa\n"
        "out, lse = flashdsa.sparse_mla_fwd(torch.randn(2, 3, 576), torch.randn(9, 576),"
        " torch.arange(8).int().view(2, 4))\n"
        "print(tuple(out.shape), bool(lse.isfinite().all()))\n"
    )
    assert run(python, "-c", code).stdout.split("\n")[0] == "(2, 3, 512) True"


def test_check_runs_and_nothing_of_the_workshop_is_there(python: Path) -> None:
    """No package for pictures, colours or cubins, and none that draws or reads them."""
    absent = ("rich", "matplotlib", "numpy", "elftools")
    code = f"from importlib.util import find_spec; print([n for n in {absent} if find_spec(n)])"
    assert run(python, "-c", code).stdout == "[]\n"
    done = run(python, "-m", "flashdsa", "check", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within their limits" in done.stdout and "Warning" not in done.stderr
    done = run(python, "-m", "flashdsa", "plan", "mla_bwd", "--json")
    assert done.returncode == 2 and done.stderr.endswith("run: python -m workbench plan\n")


def changed(
    wheel: Path, folder: Path, change: Callable[[str, bytes], bytes | None], name: str = ""
) -> Path:
    """A wheel whose files went through `change`; None leaves one out."""
    target = folder / (name or wheel.name)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.namelist():
            content = change(entry, old.read(entry))
            if content is not None:
                new.writestr(entry, content)
    return target


def test_a_broken_wheel_is_noticed(wheel: Path, tmp_path: Path) -> None:
    """An object that is lacking, one that differs, a function less, a requirement less."""

    def without(entry: str, content: bytes) -> bytes | None:
        return None if entry.endswith("sm100.so") else content

    def other(entry: str, content: bytes) -> bytes:
        return content + b"\0" if entry.endswith("sm90.so") else content

    def hidden(entry: str, content: bytes) -> bytes:
        name = f"__tvm_ffi_{KERNELS['sm90']}".encode()
        return content.replace(name, name[:-1] + b"X") if entry.endswith("sm90.so") else content

    def unrequired(entry: str, content: bytes) -> bytes:
        return content.replace(b"Requires-Dist: apache-tvm-ffi", b"Requires-Dist: some-other")

    for change, expected in (
        (without, "sm100.so is not in it"),
        (other, "sm90.so: not what the manifest says"),
        (hidden, "sm90.so: exports __tvm_ffi_"),
        (unrequired, "does not require apache-tvm-ffi"),
    ):
        found = problems(changed(wheel, tmp_path, change), every_function=False)
        assert any(line.startswith(expected) for line in found), (expected, found)
    renamed = changed(wheel, tmp_path, lambda _, content: content, "flashdsa-0-py3-none-any.whl")
    assert problems(renamed, every_function=False)[0].startswith("name: ")


def test_without_tvm_ffi_the_error_names_it(python: Path) -> None:
    """The last test: the environment is not whole behind it."""
    for link in python.parents[1].glob("lib/python*/site-packages/*tvm_ffi*"):
        link.unlink()
    code = (
        "from flashdsa.jit.loader import load\n"
        "from flashdsa.kernels.catalog import variants_of\n"
        f"load(*variants_of('sm90')[{KERNELS['sm90']!r}])\n"
    )
    done = run(python, "-c", code)
    assert "UnsupportedError" in done.stderr and "pip install 'apache-tvm-ffi" in done.stderr
