"""The documents: their code runs, their links lead somewhere, their numbers are current."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import flashdsa
from tests.docs.test_five_documents import COMMANDS, in_this_process
from tests.support.subtests import CaseLoop
from tools import api_page, result_tables

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "workbench").glob("*.md")]
)


GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def commands(path: Path) -> list[str]:
    """Of the blocks for a shell, a line each."""
    blocks = re.findall(r"^```(?:bash|console|sh)\n(.*?)^```", path.read_text(), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    without_comments = (re.sub(r"(^| +)#.*", "", line) for line in lines)
    return [line for line in without_comments if line]


def prose(path: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(path: Path) -> list[str]:
    text = prose(path)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [t.partition("#")[0] for t in targets if not t.startswith(("http", "#", "mailto:"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


Names = dict[str, Any]


def judge_readme(names: Names) -> None:
    assert names["out"].shape == (16, 8, 512)
    assert names["q"].grad.isfinite().all() and names["kv"].grad.any()


def judge_quick_start(names: Names) -> None:
    assert (names["picked"] >= 0).all()


def judge_training(names: Names) -> None:
    assert (names["to_q"].weight.grad != 0).any()
    # The first query of each of the two sequences sees itself alone.
    assert (names["kl"] == 0).nonzero().flatten().tolist() == [0, 24]
    assert (names["kl"] >= 0).all()


def judge_serving(names: Names) -> None:
    assert names["out"].shape == (2, 64, 512)
    assert (names["ids"] >= 0).sum().item() == 3500


def judge_operand(names: Names) -> None:
    assert names["operand"].shape == (256, 16, 2)


JUDGES: dict[str, Callable[[Names], object]] = {
    "README.md": judge_readme,
    "docs/guides/quickstart.md": judge_quick_start,
    "docs/guides/indexer-training.md": judge_training,
    "docs/guides/serving.md": judge_serving,
    "docs/guides/wrong-mma-result.md": judge_operand,
}
"""What holds for the names that a page's Python made."""
PROGRAMS = {"docs/guides/context-parallel.md": "examples/context_parallel.py"}
"""Pages whose Python is a file's, which a command of the page runs, and test_ranks.py."""


def test_python_runs(subtests: CaseLoop) -> None:
    for path in GUIDES:
        page, blocks = name(path), python_blocks(path)
        if not blocks or (page.endswith("migration.md") and find_spec("transformers") is None):
            continue
        with subtests.test(page):
            if page in PROGRAMS:
                program = (ROOT / PROGRAMS[page]).read_text()
                assert program.partition('"""\n\n')[2] == "\n".join(blocks)
                assert any(PROGRAMS[page] in line for line in commands(path))
                continue
            names: Names = {"__name__": "__main__"}  # torch.compile imports a function's module
            for block in blocks:
                exec(compile(block, page, "exec"), names)
            JUDGES.get(page, bool)(names)


NOT_RUN = {
    "pip install": "installs; tests/wheel does",
    "make": "installs, or takes minutes",
    "vllm serve": "vLLM, a Hopper GPU and a model",
    "SGLANG_PLUGINS=": "SGLang, a Hopper GPU and a model",
    "git clone": "the address is the reader's",
    "export PIP_": "of one shell",
    "python3 -m venv": "makes an environment; tests/wheel does",
    "flashdsa bench": "writes into the checkout; tests/bench runs it elsewhere",
    "flashdsa -v check --backend sm90": "a Hopper GPU",
    "python -m examples.dense_to_sparse --out out/large": "a Hopper GPU",
    "python -m examples.dense_to_sparse --start": "tests/examples makes a checkpoint",
    "torchrun --nproc-per-node 2 -m examples.dense_to_sparse": "two Hopper GPUs",
    "python -m workbench lab majorness --arch sm_90a --on gpu": "a Hopper GPU",
}
"""Beginnings of commands that no test runs as they stand, and why."""
SLOW = (
    "torchrun --standalone",
    "flashdsa check",
    "python -m workbench inspect",
    "python -m examples.dense_to_sparse --small",
    "python -m workbench lab hazards",
    "python -m workbench lab majorness --arch sm_90a --compile-to",
)
"""Beginnings of those that are marked slow, and run by a shell; others in the tests' process."""


def all_commands() -> list[str]:
    return [line for path in GUIDES for line in commands(path)]


def runnable() -> list[Any]:
    """The commands that a test runs, as parameters; but those of the five documents' own test."""
    run = dict.fromkeys(one for one in all_commands() if not one.startswith(tuple(NOT_RUN)))
    for command in COMMANDS:
        run.pop(command.values[0], None)
    return [pytest.param(one, marks=[pytest.mark.slow] * one.startswith(SLOW)) for one in run]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, which commands may write to."""
    copy = tmp_path_factory.mktemp("clone")
    for name in ("docs", "examples", "ptxemu", "src", "workbench"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.parametrize("command", runnable())
def test_commands_run(
    command: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not command.startswith(SLOW):
        monkeypatch.chdir(tmp_path)
        in_this_process(command)
        return
    clone: Path = request.getfixturevalue("clone")
    sources = os.pathsep.join(str(clone / folder) for folder in ("src", "ptxemu/src"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=clone,
        env=os.environ | {"PATH": path, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout
    if "context_parallel.py" in command:  # whose ranks have one terminal
        assert re.fullmatch(r"O \[.*\], decoded \[.*\]\n", done.stdout)


def test_the_tables_of_commands_are_current() -> None:
    for beginning in (*NOT_RUN, *SLOW):
        assert any(one.startswith(beginning) for one in all_commands()), beginning


def test_the_first_example_is_short() -> None:
    (block,) = python_blocks(ROOT / "README.md")
    assert len(block.strip().splitlines()) <= 12


def test_tables_are_those_of_the_results() -> None:
    """`tools/result_tables.py` writes them."""
    texts = [page.read_text() for page in result_tables.PAGES]
    assert [result_tables.updated(text) for text in texts] == texts
    assert all(f"<!-- {name} -->" in "".join(texts) for name in result_tables.TABLES)
    name, table = next(iter(result_tables.TABLES.items()))
    updated = result_tables.updated(f"<!-- {name} -->\n| old |\n<!-- /{name} -->")
    assert table() in updated and "| old |" not in updated


def test_the_site_begins_as_readme_does() -> None:
    """From title to "In Python", with links of its own folder."""
    index = (ROOT / "docs" / "index.md").read_text()
    assert "make demo" in index and "[Quick start](guides/quickstart.md)" in index
    assert "](docs/" not in index and "](workbench/" not in index
    assert index.count("<!--") == 2


GENERATED = re.compile(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", re.DOTALL)
SPEED = re.compile(
    r"\bour time|times (as fast|as long|our)|\d tokens/s"
    r"|[\d.]+ (to [\d.]+ )?(ms|us|µs|TFLOPS)\b.*\bH[12]00"
)
"""A speed beside something else, or on a machine."""
DATE = re.compile(r"20\d\d-\d\d-\d\d")


def undated_speeds(text: str) -> list[str]:
    """Paragraphs with a speed that say neither when it was measured nor a result's file.

    A table counts as part of the paragraph before it.
    """
    paragraphs = re.sub(r"\n\n(?=\|)", "\n", GENERATED.sub("", text)).split("\n\n")
    return [one for one in paragraphs if SPEED.search(one) and not DATE.search(one)]


def test_speeds_have_a_date(subtests: CaseLoop) -> None:
    """Or stand between markers, where a tool writes the date."""
    assert undated_speeds("It takes 3 us (one H200).\n\nOthers: 1.2 times as long.\n\n3 us.") == [
        "It takes 3 us (one H200).",
        "Others: 1.2 times as long.",
    ]
    assert not undated_speeds("One H200, 2026-11-21:\n\n| 5 tokens/s |\n")
    for page in GUIDES:
        if "decisions" in page.parts:
            continue  # each is of its own day
        with subtests.test(name(page)):
            assert undated_speeds(page.read_text()) == []


ONE_BACKEND = re.compile(
    r"GPUs (pick|take)|Hopper\S* has kernels|the CPU runs all|; kernels take \d"
    r"|[Pp]lain torch serves|on Hopper GPUs and on any CPU"
)
"""What was true of all GPUs before Triton's kernels."""


def test_pages_know_each_backend(subtests: CaseLoop) -> None:
    for page in [*DOCUMENTS, ROOT / "pyproject.toml", ROOT / "CITATION.cff"]:
        if page.name != "CHANGELOG.md" and "decisions" not in page.parts:
            with subtests.test(name(page)):
                assert not ONE_BACKEND.search(page.read_text())
    for page in ("README.md", "docs/index.md", "pyproject.toml", "CITATION.cff"):
        text = (ROOT / page).read_text()
        assert all(word in text for word in ("Triton", "GLM-5.3", "Hopper")), page


def test_links_lead_to_files(subtests: CaseLoop) -> None:
    for path in DOCUMENTS:
        with subtests.test(name(path)):
            assert [target for target in links(path) if not (path.parent / target).exists()] == []
            # `make docs` would take the second pair of brackets for a link by reference.
            assert not re.findall(r"\]\[[^\]]*\]", re.sub(r"`[^`]*`", "", prose(path)))


@pytest.mark.parametrize("docs", ["docs", "ptxemu/docs"])
def test_links_of_the_site_stay_on_it(docs: str) -> None:
    """Of others `mkdocs build --strict` says so, too; they would be dead there."""
    leave = [
        (name(page), target)
        for page in (ROOT / docs).rglob("*.md")
        for target in links(page)
        if not (page.parent / target).resolve().is_relative_to(ROOT / docs)
        or (page.parent / target).is_dir()
    ]
    assert leave == []
    assert "unrecognized_links: warn" in (ROOT / docs).with_name("mkdocs.yml").read_text()


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = set(links(folder / "README.md"))
    records = {path.name for path in folder.glob("0*.md")}
    assert listed == records
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f"decisions/{record}" in navigation for record in records)
    for record in records:
        text = (folder / record).read_text()
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Consequences"))


def test_documents_stay_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110 and lines.index("## In Python") <= 60
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 60


def test_the_api_page_lists_every_public_name() -> None:
    """`tools/api_page.py` writes the list."""
    text = api_page.PAGE.read_text()
    assert api_page.updated(text) == text
    assert set(re.findall(r"::: flashdsa\.ops\.\w+\.(\w+)", text)) == set(flashdsa.__all__)


def test_code_fits_the_site(subtests: CaseLoop) -> None:
    """The site shows 100 columns at 1,300 pixels beside both menus; the rest is cut."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        with subtests.test(name(page)):
            blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(), re.M | re.S)
            assert [line for text in blocks for line in text.splitlines() if len(line) > 100] == []
