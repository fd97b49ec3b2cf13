"""Which parameters the adapters' peers have now: `make peer-signatures`.

Downloads the newest wheel of each package that `tests/adapters/signatures.json` names and prints
functions whose parameters differ from the newest record. `--record` adds a record of them.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[1] / "tests" / "adapters" / "signatures.json"


def main() -> int:
    """Compare, print what changed; the exit code says whether anything did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="add a record of what changed")
    arguments = parser.parse_args()
    records: dict[str, Any] = json.loads(RECORDS.read_text())
    num_changed = 0
    for module, known in records.items():
        newest = known["releases"][-1]
        with tempfile.TemporaryDirectory() as folder:
            wheel = download(known["package"], Path(folder))
            release = wheel.name.split("-")[1]
            found = dict(functions_of(wheel, newest["functions"]))
        changed = {
            name: found.get(name, "gone")
            for name, text in newest["functions"].items()
            if found.get(name) != text
        }
        print(f"{module}: {known['package']} {release}, {len(changed)} changed", flush=True)
        for name, text in changed.items():
            print(f"  {name}\n    was {newest['functions'][name]}\n    is  {text}")
        num_changed += len(changed)
        if changed and arguments.record:
            known["releases"].append({"release": release, "functions": found})
    if arguments.record:
        RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    return 1 if num_changed else 0


def download(package: str, folder: Path) -> Path:
    """Return the newest wheel of a package, for Linux and Python 3.12."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 34, 35, 39)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    command += ["--only-binary=:all:", "--python-version", "3.12"]
    for platform in ("manylinux2014_x86_64", *platforms):
        command += ["--platform", platform]
    subprocess.run([*command, package], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def functions_of(wheel: Path, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name, parameters) of the functions that `known` has.

    Of several with one name, the one that is as known, else the one with the longest list.
    """
    found: dict[str, list[str]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            text = archive.read(name).decode() if name.endswith(".py") else ""
            if any(f"def {one}(" in text for one in known):
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.FunctionDef) and node.name in known:
                        found.setdefault(node.name, []).append(without_annotations(node.args))
    for name, lists in sorted(found.items()):
        yield name, known[name] if known[name] in lists else max(lists, key=len)


def without_annotations(arguments: ast.arguments) -> str:
    """Return a parameter list as text: names and defaults."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for one in [*every, arguments.vararg, arguments.kwarg]:
        if one is not None:
            one.annotation = None
    return ast.unparse(arguments).replace("TopKTieBreak.NONE", "0")


if __name__ == "__main__":
    sys.exit(main())
