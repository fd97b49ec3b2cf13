"""The source distributions have what their pages name; pages of an index have links that work."""

from __future__ import annotations

import re
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

pytest.importorskip("setuptools", minversion="77")

from tests.docs.test_documents import commands, links
from tests.support.houses import HOUSES, ROOT, build, copy_build_files

FOLDERS = {
    "flashdsa": ("docs", "examples", "ptxemu", "src", "tests", "tools", "workbench"),
    "ptxemu": ("benchmarks", "docs", "examples", "src", "tests"),
}
MADE = re.compile(r"__pycache__|\.egg-info|\.hypothesis|_cache/|_kernels/|^(ptxemu/)?build/")
ADDRESS = "https://example.org/someone/flashdsa"


@pytest.fixture(scope="module", params=list(HOUSES))
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution's folder, which has the project's name."""
    out = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(HOUSES[request.param], "build_sdist", out)) as archive:
        archive.extractall(out, filter="data")
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder.rename(out / request.param)


def test_every_file_of_the_checkout_is_there(unpacked: Path) -> None:
    house = HOUSES[unpacked.name]
    paths = (path for folder in FOLDERS[unpacked.name] for path in (house / folder).rglob("*"))
    files = {path.relative_to(house).as_posix() for path in paths if path.is_file()}
    expected = {file for file in files if not MADE.search(file)}
    assert len(expected) > 100
    assert {file for file in expected if not (unpacked / file).exists()} == set()
    made = (path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*"))
    assert [file for file in made if re.search(r"__pycache__|_kernels/", file)] == []


def test_links_and_commands_of_pages_lead_to_files(unpacked: Path) -> None:
    """Links of ptxemu's pages to the library beside it lead out of its distribution."""
    pages = sorted(unpacked.rglob("*.md"))
    assert unpacked / "README.md" in pages and len(pages) > 10
    dead = [
        (page.relative_to(unpacked).as_posix(), target)
        for page in pages
        for target in links(page)
        if (page.parent / target).resolve().is_relative_to(unpacked)
        and not (page.parent / target).exists()
    ]
    assert dead == []
    if unpacked.name != "flashdsa":
        return
    lines = [line for page in pages for line in commands(page)]
    targets = {word for line in lines if line.startswith("make ") for word in line.split()[1:]}
    makefile = (unpacked / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    named = re.findall(
        r"(?<![\w./])(?:tools|examples|tests)/[\w/.]+\w", makefile + "\n".join(lines)
    )
    assert named and [file for file in named if not (unpacked / file).exists()] == []


@pytest.mark.parametrize("name", HOUSES)
def test_links_of_an_index_page_are_absolute_if_the_address_is_known(
    name: str, tmp_path: Path
) -> None:
    """Or the page is README.md as it is; `[project.urls]` has the address."""
    tree = tmp_path / "tree"
    copy_build_files(name, tree)
    (tree / "src" / name).mkdir(parents=True)
    (tree / "docs").mkdir()
    for file in ("docs/a.md", "docs/a.png", "CHANGELOG.md"):
        (tree / file).write_text("")
    page = (
        "# Title\n\n[a](docs/a.md#one) ![b](docs/a.png) [up](#title) [x](https://host/y) "
        "[![c](docs/a.png)](CHANGELOG.md)\n\n```python\nkernel[grid](q)\n```\n"
    )
    (tree / "README.md").write_text(page)
    hook = "prepare_metadata_for_build_wheel"
    without = (build(tree, hook, tmp_path / "a") / "METADATA").read_text()
    assert "Project-URL" not in without and without.endswith(f"\n\n{page}")
    with (tree / "pyproject.toml").open("a") as project:
        project.write(f'\n[project.urls]\nRepository = "{ADDRESS}"\n')
    text = (build(tree, hook, tmp_path / "b") / "METADATA").read_text()
    assert f"Project-URL: Repository, {ADDRESS}\n" in text
    below = "ptxemu/" * (name == "ptxemu")
    (version,) = re.findall(r"^Version: (.+)", text, re.MULTILINE)
    blob, raw = (f"{ADDRESS}/{view}/v{version}/{below}" for view in ("blob", "raw"))
    assert text.endswith(
        f"# Title\n\n[a]({blob}docs/a.md#one) ![b]({raw}docs/a.png) [up](#title) "
        f"[x](https://host/y) [![c]({raw}docs/a.png)]({blob}CHANGELOG.md)\n\n"
        "```python\nkernel[grid](q)\n```\n"
    )


def test_one_address_and_one_name_of_the_authors() -> None:
    """In both projects and CITATION.cff, which people read beside the index."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    projects = [
        tomllib.loads((house / "pyproject.toml").read_text())["project"]
        for house in HOUSES.values()
    ]
    assert all(one["authors"] == citation["authors"] for one in projects)
    addresses = {one.get("urls", {}).get("Repository") for one in projects}
    assert addresses == {citation.get("repository-code")}
