"""The documents: their Python runs, their links lead somewhere, their sizes hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import geometric_mean

import pytest

import flashdsa

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "workbench").glob("*.md")]
)


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def prose(path: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(path: Path) -> list[str]:
    text = prose(path)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [t.partition("#")[0] for t in targets if not t.startswith(("http", "#", "mailto:"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_readme_python_runs() -> None:
    (block,) = python_blocks(ROOT / "README.md")
    assert len(block.strip().splitlines()) <= 12
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (16, 8, 512)
    assert names["q"].grad.isfinite().all() and names["kv"].grad.any()


def test_quick_start_python_runs() -> None:
    names: dict[str, object] = {"__name__": "__main__"}  # torch.compile imports a function's module
    for block in python_blocks(ROOT / "docs" / "guides" / "quickstart.md"):
        exec(compile(block, "quickstart.md", "exec"), names)
    assert (names["picked"] >= 0).all()


def test_python_of_the_guide_to_the_indexers_training_runs() -> None:
    names: dict[str, object] = {}
    for block in python_blocks(ROOT / "docs" / "guides" / "indexer-training.md"):
        exec(compile(block, "indexer-training.md", "exec"), names)
    assert (names["to_q"].weight.grad != 0).any()
    # The first query of each of the two sequences sees itself alone.
    assert (names["kl"] == 0).nonzero().flatten().tolist() == [0, 24]
    assert (names["kl"] >= 0).all()


def test_migration_python_runs() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    (block,) = python_blocks(ROOT / "docs" / "guides" / "migration.md")
    exec(compile(block, "migration.md", "exec"), {})


def test_serving_python_runs() -> None:
    names: dict[str, object] = {}
    for block in python_blocks(ROOT / "docs" / "guides" / "serving.md"):
        exec(compile(block, "serving.md", "exec"), names)
    assert names["out"].shape == (2, 64, 512)
    assert (names["ids"] >= 0).sum().item() == 3500


def test_the_operand_of_a_wrong_mma_is_gathered() -> None:
    (block,) = python_blocks(ROOT / "docs" / "guides" / "wrong-mma-result.md")
    names: dict[str, object] = {}
    exec(compile(block, "wrong-mma-result.md", "exec"), names)
    assert names["operand"].shape == (256, 16, 2)


def test_the_readmes_ratios_are_those_of_the_result() -> None:
    newest = max((ROOT / "workbench/results/peers").glob("*.json"))
    rows = json.loads(newest.read_text())["rows"]
    readme = (ROOT / "README.md").read_text()
    assert newest.name in readme
    for group, words in (
        ("sparse MLA forward, S = 4096, topk = 2048, hot; peer FlashMLA", "forward {} to {}"),
        (
            "sparse MLA backward, S = 4096, topk = 2048, hot; peer cuDNN Frontend",
            "backward {} to {}",
        ),
        ("sparse decode, fp8 rows, topk = 2048, hot; peer FlashMLA", "decode {} to {}"),
        ("indexer, equal lengths", "{} to {} with equal lengths"),
        ("indexer, mixed lengths", "{} to {} with these mixed lengths"),
        (
            "indexer, two queries a request (next_n = 2)",
            "{} to {} with two queries a request",
        ),
    ):
        ratios = [row["peer_us"] / row["ours_us"] for row in rows if row["group"] == group]
        assert words.format(f"{min(ratios):.2f}", f"{max(ratios):.2f}") in readme


def test_the_readmes_claim_of_the_indexer_is_of_every_case() -> None:
    path = ROOT / "workbench/results/indexer/2026-11-22-all-h200.json"
    ratios = [row["pair_us"] / row["ours_us"] for row in json.loads(path.read_text())["rows"]]
    words = f"{geometric_mean(ratios):.2f} in the geometric mean of all {len(ratios)} batches"
    assert words in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_to_files(path: Path) -> None:
    missing = [target for target in links(path) if not (path.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_no_brackets_look_like_a_link_by_reference(path: Path) -> None:
    """`make docs` would look for what the second pair names."""
    assert not re.findall(r"\]\[[^\]]*\]", re.sub(r"`[^`]*`", "", prose(path)))


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
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 60


def test_every_public_name_is_in_the_api_page() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    assert set(re.findall(r"::: flashdsa\.api\.(\w+)", text)) == set(flashdsa.__all__)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=name)
def test_code_fits_the_site(page: Path) -> None:
    """So many columns the site shows at 1,300 pixels beside both menus; what is behind is cut."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 100] == []
