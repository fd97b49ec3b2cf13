"""The documents: their Python runs, their links lead somewhere, the reference is complete."""

import re
from pathlib import Path

import ptxemu

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def run_python(path: Path) -> dict[str, object]:
    """The names that the page's blocks of Python leave behind."""
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, path.name, "exec"), names)
    return names


def test_the_python_of_the_readme_runs() -> None:
    assert run_python(ROOT / "README.md")["x"].tolist() == [2 * i for i in range(64)]


def test_the_reference_runs_and_has_every_public_name() -> None:
    path = ROOT / "docs" / "reference" / "api.md"
    names = run_python(path)
    assert names["x"].tolist() == [2 * i for i in range(64)]
    assert names["result"].findings == [] and len(names["tensor_map"]) == 128
    described = set(re.findall(r"::: ptxemu\.(\w+)$", path.read_text(), re.MULTILINE))
    assert described >= set(ptxemu.__all__)


def test_links_lead_to_files() -> None:
    missing = []
    for path in DOCUMENTS:
        prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", prose):
            if not target.startswith("http") and not (path.parent / target).exists():
                missing.append(f"{path.relative_to(ROOT)}: {target}")
    assert missing == []


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    records = {path.name for path in folder.glob("0*.md")}
    assert set(re.findall(r"\]\((0[^)]*)\)", (folder / "README.md").read_text())) == records
    assert all(f"decisions/{name}" in (ROOT / "mkdocs.yml").read_text() for name in records)
