"""transformers' own common tests over enabled models: `make test-transformers`.

Takes the source archive of the installed release from the registry, runs its common model tests on
DeepSeek-V3.2, GLM-5, GLM-5.3 and DeepSeek-V4 with flashdsa, and what failed once more without.
The exit code says whether a test fails only with flashdsa that `MEANT` does not name.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = "tests/integrations/common_model_tests.py"
NEEDED = "parameterized==0.9.0"
"""Package that the archive's tests import beside our pins."""
NO_WEIGHTS = "an enabled model has no attention weights to return, as with sdpa"
OTHER_NAME = "asks which implementation a new model has; these are enabled when they are built"
MEANT = {
    "*::test_attention_outputs": NO_WEIGHTS,
    "*::test_retain_grad_hidden_states_attentions": NO_WEIGHTS,
    "*::test_can_set_attention_dynamically": OTHER_NAME,
    "*::test_sdpa_can_dispatch_non_composite_models": OTHER_NAME,
    "DeepseekV4Test::test_model_outputs_equivalence": "output_attentions is refused",
    "Glm5NextTest::test_eager_matches_sdpa_inference_*": "absorbed weights round otherwise",
}
"""Tests that fail only with flashdsa, by patterns of their names, and why that is meant."""
MEANT_OF_FP8 = {"*::test_eager_matches_*": "indexer='fp8' may pick other keys"}
OUTCOME = re.compile(r"^(?:SUB)?FAILED(?:\[[^]]*\])? \S+::(\w+::\w+)", re.MULTILINE)


def main() -> int:
    """Run the tests with flashdsa, repeat failures without, print what is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the archive is kept")
    parser.add_argument("--indexer", nargs="+", default=["model", "exact", "fp8"])
    parser.add_argument("--only", default="", help="pytest's -k")
    arguments = parser.parse_args()
    archive = unpack(arguments.folder)
    failed_without: dict[str, bool] = {}
    wrong = 0
    for indexer in arguments.indexer:
        failed, summary = run(archive, indexer, ["-k", arguments.only])
        print(f"indexer={indexer}: {summary}", flush=True)
        unknown = sorted(failed - failed_without.keys())
        if unknown:
            own, _ = run(archive, "none", [f"{TESTS}::{test}" for test in unknown])
            failed_without.update({test: test in own for test in unknown})
        for test in sorted(failed):
            meant = MEANT | MEANT_OF_FP8 if indexer == "fp8" else MEANT
            reason = next((meant[name] for name in meant if fnmatch(test, name)), None)
            if failed_without[test]:
                reason = "fails without flashdsa, too"
            wrong += reason is None
            print(f"  {test}: {reason or 'FAILS ONLY WITH FLASHDSA'}", flush=True)
    return 1 if wrong else 0


def unpack(folder: Path) -> Path:
    """Return the folder of the installed release's source archive, and get it if need be."""
    name = f"transformers-{version('transformers')}"
    if not (folder / name / "tests").exists():
        pip = [sys.executable, "-m", "pip"]
        get = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
        subprocess.run([*pip, *get, name.replace("-", "==")], check=True)
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        add = ["install", "--quiet", "--no-deps", "--target", str(folder / "site"), NEEDED]
        subprocess.run([*pip, *add], check=True)
    return folder / name


def run(archive: Path, indexer: str, selection: Iterable[str]) -> tuple[set[str], str]:
    """Return names of failed tests, "Class::test", and pytest's last line."""
    environment = os.environ | {
        "FLASHDSA_TRANSFORMERS_ARCHIVE": str(archive.resolve()),
        "FLASHDSA_COMMON_INDEXER": indexer,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str((archive.parent / "site").resolve()), os.environ.get("PYTHONPATH", "")]
        ),
    }
    given = list(selection)
    if not any(one.startswith(TESTS) for one in given):
        given.append(TESTS)
    # Their marks are not ours, and our conftest is not theirs.
    options = ["-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "-q", "--tb=line"]
    options += ["-W", "ignore", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *given]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        sys.exit(ended.stdout[-3000:] + ended.stderr[-3000:])
    return set(OUTCOME.findall(ended.stdout)), ended.stdout.strip().rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(main())
