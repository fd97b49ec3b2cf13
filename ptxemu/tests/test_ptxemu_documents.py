"""The documents: their Python and commands run, links lead somewhere, the reference is complete."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import ptxemu
from ptxemu.cli import main as command_line
from ptxemu.cuda import nvcc

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
RUN_HERE = ("README.md", "api.md")
"""Pages whose Python a test here runs."""
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def run_python(path: Path) -> dict[str, Any]:
    """The names that the page's blocks of Python leave behind."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, path.name, "exec"), names)
    return names


def test_the_python_of_the_readme_runs() -> None:
    assert run_python(ROOT / "README.md")["x"].tolist() == [2 * i for i in range(64)]


def blocks(path: Path, *kinds: str) -> list[str]:
    """The page's blocks of some kinds."""
    return [body for kind, body in BLOCK.findall(path.read_text()) if kind in kinds]


def lines(block: str) -> Iterator[str]:
    """The commands of a block, each with its comment."""
    yield from (
        line.strip().removeprefix("- run: ") for line in block.replace("\\\n", "").splitlines()
    )


def commands(path: Path) -> Iterator[list[str]]:
    """The words behind `ptxemu` of the page's commands."""
    for block in blocks(path, "bash", "yaml"):
        for line in lines(block):
            if line.startswith("ptxemu "):
                yield shlex.split(line, comments=True)[1:]


def what_lacks(words: list[str]) -> str:
    """Why a command cannot run on this machine, if so."""
    scripts = [(ROOT.parent / word).read_text() for word in words if word.endswith(".py")]
    imports = re.findall(r"^(?:import|from) (triton|cutlass|torch)", "\n".join(scripts), re.M)
    if missing := [name for name in imports if find_spec(name) is None]:
        return f"{missing[0]} is not installed"
    is_compiled = any(word.endswith((".cu", "last_block", ".launch")) for word in words)
    if (is_compiled or "triton" in imports) and shutil.which("g++") is None:
        return "there is no C++ compiler"
    try:
        _ = is_compiled and nvcc.find_nvcc()
    except nvcc.NvccError as error:
        return str(error)
    return ""


def execute(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a page's command in a folder, with this checkout's ptxemu and this Python."""
    command = [sys.executable, *(words[1:] if words[0] == "python" else ["-m", *words])]
    source = {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {k: v for k, v in os.environ.items() if k != "CUTE_DSL_ARCH"} | source
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


PAGES = [page for page in DOCUMENTS if "```bash\n" in page.read_text()]


def sessions(path: Path) -> list[tuple[list[str], str]]:
    """The commands of each block of `bash`, and what the page shows of their output: the block
    without a language before the next of `bash`."""
    found: list[tuple[list[str], str]] = []
    for kind, body in BLOCK.findall(path.read_text()):
        if kind == "bash":
            found.append(([*lines(body)], ""))
        elif kind == "" and found and not found[-1][1]:
            found[-1] = found[-1][0], body
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_commands_of_a_page_come_true(path: Path, tmp_path: Path) -> None:
    """Each ends with the exit code that its comment names, or 0 (1 where the page shows an error);
    the last of a block prints what the page shows. pip needs a network; a workflow's commands, of
    `yaml`, are for other files."""
    for folder in ("examples", "tests/bugs"):
        shutil.copytree(ROOT / folder, tmp_path / "ptxemu" / folder)
    left_out = []
    for texts, shown in sessions(path):
        for text in texts:
            words = shlex.split(text, comments=True)
            if words[0] == "pip":
                continue
            if lack := what_lacks(words):
                left_out.append(f"{shlex.join(words)}: {lack}")
                continue
            ran = execute(words, tmp_path)
            output = shown if text is texts[-1] else ""
            named = re.search(r"# exit code (\d+)", text)
            code = int(named[1]) if named else int("\nerror: " in output)
            assert ran.returncode == code, (text, ran.stdout, ran.stderr)
            assert without_changes(output) in without_changes(ran.stdout), (text, ran.stdout)
    if left_out:
        pytest.skip("; ".join(left_out))


def without_changes(text: str) -> str:
    """The words of a report; nvcc's releases number PTX lines and pairs in their own ways."""
    return " ".join(re.sub(r"\d+\.\d s|PTX line \d+", "", text).split())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_programs_of_a_page_are_files(path: Path) -> None:
    files = [file.read_text() for file in (ROOT / "examples").iterdir() if file.is_file()]
    kinds = ["cuda"] if path.name in RUN_HERE else ["cuda", "python"]
    for program in blocks(path, *kinds):
        assert any(program in text for text in files), program


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
