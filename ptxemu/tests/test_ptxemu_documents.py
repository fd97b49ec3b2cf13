"""The documents: their Python and commands run, links lead somewhere, the reference is complete."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import ptxemu
from ptxemu.cli import main as command_line
from ptxemu.cuda import nvcc

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


def blocks(path: Path, *kinds: str) -> list[str]:
    """The page's blocks of some kinds."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [body for kind, body in found if kind in kinds]


def commands(path: Path) -> Iterator[list[str]]:
    """The words behind `ptxemu` of the page's commands."""
    for block in blocks(path, "bash", "yaml"):
        for line in block.replace("\\\n", "").splitlines():
            text = line.strip().removeprefix("- run: ")
            if text.startswith("ptxemu ") and "..." not in text:
                yield shlex.split(text, comments=True)[1:]


def test_the_command_of_the_readme_says_what_the_readme_shows(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        nvcc.find_nvcc()
    except nvcc.NvccError as error:
        pytest.skip(str(error))
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler, which nvcc calls for the host's code")
    monkeypatch.chdir(ROOT.parent)
    ((command, path),) = commands(ROOT / "README.md")
    assert command_line.main([command, path]) == 1
    said = capfd.readouterr().out
    (shown,) = blocks(ROOT / "README.md", "")
    assert without_times(said) == without_times(shown)
    (source,) = blocks(ROOT / "README.md", "cuda")
    assert source in (ROOT.parent / path).read_text()


def without_times(text: str) -> str:
    """The words of a report; nvcc's releases number PTX lines and pairs in their own ways."""
    return " ".join(re.sub(r"\d+\.\d s|PTX line \d+", "", text).split())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_of_a_page_have_options_that_there_are(path: Path) -> None:
    for words in commands(path):
        behind = words.index("--") if "--" in words else len(words)
        command_line.parser().parse_args(words[:behind])


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
