"""The Hopper forward with synchronisation removed or weakened: ptxemu notices it.

`make mutate` tries all mutants; here are some of those that it noticed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from ptxemu.cli.main import main as ptxemu
from ptxemu.mutate import Equivalents, Trial, measure, mutations_of
from ptxemu.mutate.runner import CAUGHT, POLICIES
from ptxemu.saved_launch import load_launch
from tests.kernels.sparse_mla.test_sm100_bwd_mutants import Replay, name_of

ROOT = Path(__file__).parents[3]
EQUIVALENT = ROOT / "workbench/results/mutation/equivalent/mla-fwd-sm_90a.txt"
QUICK = (POLICIES[2],)
"""Copies at once, which costs a quarter."""
DRAWN = ("mbarrier-wait#11 true at once", "group-wait#3 removed", "proxy-fence#4 removed")


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """Two work items of one step, by one CTA."""
    folder = tmp_path_factory.mktemp("launches")
    script = str(ROOT / "workbench/launches/launch_sm90_forward.py")
    save = ["--arch", "sm_90a", "--quiet", "--no-check", "--save", str(folder)]
    assert ptxemu(["exec", *save, script, "--queries", "2", "--topk", "128"]) == 0
    (path,) = folder.glob("forward_kernel*.launch")
    return Replay(load_launch(path))


def test_mutants_are_noticed(launch: Replay) -> None:
    mutants = mutations_of(launch.module.syntax.functions[launch.kernel])
    names = [name_of(m.site.category, m.site.number, m.name) for m in mutants]
    baseline = measure(launch, QUICK)
    assert baseline.faults == set()
    trial = Trial([launch], [baseline], QUICK, mutants, Equivalents(), notes=True)
    verdicts = {name: trial.judge(names.index(name)).verdict for name in DRAWN}
    assert verdicts == dict.fromkeys(DRAWN, CAUGHT)
    assert Equivalents.parse(EQUIVALENT.read_text(encoding="utf-8")).strangers(mutants) == []
