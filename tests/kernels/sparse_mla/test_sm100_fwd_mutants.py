"""The Blackwell forward with synchronisation removed or weakened: ptxemu notices it.

`make mutate` tries all mutants; here are some of those that it noticed.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from workbench.mutation.tables import read_table

from ptxemu.cli.main import main as ptxemu
from ptxemu.mutate import Equivalents, Replay, Trial, fingerprint, measure, mutations_of
from ptxemu.mutate.runner import CAUGHT, POLICIES
from ptxemu.saved_launch import load_launch
from tests.kernels.sparse_mla.test_sm100_bwd_mutants import RESULTS, ROOT, name_of

QUICK = (POLICIES[2],)
"""Copies at once, which costs a quarter."""
DRAWN = ("proxy-fence#3 removed", "arrive#8 removed", "tcgen05-wait#3 removed")


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """The launch of `make mutate`, of three tiles."""
    folder = tmp_path_factory.mktemp("launches")
    script = str(ROOT / "workbench/launches/launch_sm100_forward.py")
    save = ["--arch", "sm_100a", "--quiet", "--no-check", "--save", str(folder)]
    assert ptxemu(["exec", *save, script, "--topk", "192"]) == 0
    (path,) = folder.glob("forward_kernel*.launch")
    return Replay(load_launch(path))


def test_mutants_are_noticed_and_the_score_is_of_this_kernel(launch: Replay) -> None:
    function = launch.module.syntax.functions[launch.kernel]
    mutants = list(mutations_of(function))
    names = [name_of(m.site.category, m.site.number, m.name) for m in mutants]
    baseline = measure(launch, QUICK)
    assert baseline.faults == set()
    trial = Trial([launch], [baseline], QUICK, mutants, Equivalents(), notes=True)
    verdicts = {name: trial.judge(names.index(name)).verdict for name in DRAWN}
    assert verdicts == dict.fromkeys(DRAWN, CAUGHT)

    score = read_table(RESULTS / "mutation-mla-fwd-sm_100a.json")
    assert score["ptx"] == fingerprint(function)
    scored = [name_of(m["category"], m["number"], m["mutation"]) for m in score["mutants"]]
    assert scored == names
    text = (RESULTS / "equivalent/mla-fwd-sm_100a.txt").read_text(encoding="utf-8")
    assert Equivalents.parse(text).strangers(mutants) == []
