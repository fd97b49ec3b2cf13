"""`make fingerprints`: one hash a compiled variant, of the PTX that its plan compiles to.

    python tools/fingerprints.py [TEXT ...]     # compares; of names that contain one of the texts
    python tools/fingerprints.py --write [TEXT ...]   # records what is

A commit that moves or renames code changes no line of tests/fingerprints.txt. All variants take ten
minutes of a core. A variant whose hash differs is assembled, too, for each GPU that runs it: ptxas
must take it without spills and without a wgmma that waits for the one before. The exit code is 1
where a hash differs and is not recorded, or ptxas complains, 2 where the record is of another CuTe
DSL, which decides on instructions, too.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from flashdsa.errors import ArgumentValueError
from flashdsa.kernels.catalog import BACKENDS, variants_of
from flashdsa.toolchain import Assembler

RECORD = Path(__file__).parents[1] / "tests" / "fingerprints.txt"
COMPILER = "nvidia-cutlass-dsl"
GPUS = {"sm90": ("sm_90a",), "sm100": ("sm_100a", "sm_103a")}
"""Those that run a backend's kernels."""
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_NOT_CODE = re.compile(r"\s*(//|\.(loc|file|section|version)\b)")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")


class Fingerprint(NamedTuple):
    """A variant: backend and exported name, hash and lines of its PTX.

    Attributes:
        complaints: ptxas's about a variant that is not as recorded.
    """

    name: str
    digest: str
    lines: int
    complaints: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.digest} {self.lines}"


def compiler() -> str:
    """The package that decides on the PTX; its libraries of either CUDA give the same."""
    return f"{COMPILER} {metadata.version(COMPILER)}"


def normalised(ptx: str) -> str:
    """Directives, declarations and instructions in order; kernels are numbered, not named."""
    text = ptx.rstrip("\0")
    for number, name in enumerate(_ENTRY.findall(text)):
        text = re.sub(rf"\b{re.escape(name)}(?=\b|_param_)", f"kernel{number}", text)
    lines = (line.split("//")[0] for line in text.splitlines() if not _NOT_CODE.match(line))
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())


def names() -> list[str]:
    """Names of all variants, as "sm90/mla_fwd"."""
    return sorted(f"{backend}/{name}" for backend in BACKENDS for name in variants_of(backend))


def complaints(ptx: str, gpu: str) -> list[str]:
    """List what is wrong with a module's code: refused, spills, wgmma that wait for each other."""
    assembler = Assembler.find()
    if assembler is None:
        return ["no ptxas: pip install nvidia-cuda-nvcc"]
    try:
        log = assembler.assemble(ptx, gpu).log
    except ArgumentValueError as error:
        return [str(error)]
    spills = [found[0] for found in _SPILLS.finditer(log) if found.groups() != ("0", "0")]
    return spills + [line for line in log.splitlines() if "wgmma" in line]


def fingerprint(name: str, recorded: str | None) -> Fingerprint:
    """Compile a variant, and assemble it if its line is not the recorded one.

    The first one of a process asks CuTe DSL to keep PTX.
    """
    from ptxemu.cutedsl import retention

    retention.install(line_info=False)
    from flashdsa.jit.loader import compile_plan

    backend, _, variant = name.partition("/")
    ptx = str(compile_plan(*variants_of(backend)[variant]).__ptx__)
    code = normalised(ptx)
    digest = hashlib.sha256(code.encode()).hexdigest()[:16]
    found = Fingerprint(name, digest, code.count("\n") + 1)
    if str(found) == recorded:
        return found
    said = [f"{gpu}: {one}" for gpu in GPUS[backend] for one in complaints(ptx, gpu)]
    return found._replace(complaints=tuple(said))


def read_record() -> tuple[str, dict[str, str]]:
    """The compiler that the record is of, and its lines by their variants' names."""
    if not RECORD.exists():
        return "", {}
    first, *lines = RECORD.read_text().splitlines()
    return first, {line.split()[0]: line for line in lines}


def compile_all(
    wanted: Sequence[str], jobs: int, recorded: Mapping[str, str]
) -> dict[str, Fingerprint]:
    """Fingerprints of these variants by name, from `jobs` processes; progress goes to stderr."""
    found = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(fingerprint, name, recorded.get(name)) for name in wanted]
        for done in as_completed(tasks):
            found[done.result().name] = done.result()
            print(f"\r{len(found)} of {len(wanted)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def main() -> None:
    """Compare with the record, or write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="default: all variants")
    parser.add_argument("--write", action="store_true", help="record what is")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args()
    wanted = [
        name for name in names() if not given.texts or any(text in name for text in given.texts)
    ]
    if not wanted:
        parser.error(f"TEXT: no variant's name contains {' or '.join(given.texts)}")
    made_by, recorded = read_record()
    if made_by != compiler() and (given.texts or not given.write):
        print(f"the record is of {made_by or 'nothing'}; here is {compiler()}", file=sys.stderr)
        sys.exit(2)
    found = compile_all(wanted, given.jobs, recorded)
    now = {name: str(one) for name, one in found.items()}
    if given.write:
        kept = {name: line for name, line in recorded.items() if name in names()}
        lines = [compiler(), *(line for _, line in sorted((kept | now).items()))]
        RECORD.write_text("".join(f"{line}\n" for line in lines))
    changed = [
        f"{recorded.get(name, name + ' is new')} -> {line}"
        for name, line in sorted(now.items())
        if recorded.get(name) != line
    ]
    changed += [f"{name} is gone" for name in recorded if name not in names()]
    said = [f"{name}: {text}" for name, one in sorted(found.items()) for text in one.complaints]
    print("\n".join(changed + said) or f"{len(found)} variants are as recorded")
    sys.exit(bool(said or (changed and not given.write)))


if __name__ == "__main__":
    main()
