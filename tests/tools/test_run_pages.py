"""`tools/run_pages.py` sees that a page's commands need more than the page installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import run_pages

PAGE = """# A page

```bash
python -c 'import sys; sys.exit(3)'   # exit code 3
python -c 'import numpy'
command -v nvcc   # exit code 1
ls pyproject.toml; \\
    python -c 'print("a\\nerror: b"); raise SystemExit(1)'
```

```python
x = 1
```

```
a
error: b
```

```python
assert x == 2
```
"""


def empty_checkout(target: Path) -> None:
    target.mkdir()
    (target / "pyproject.toml").touch()


def test_the_pages_that_install_something_are_found() -> None:
    names = {page.relative_to(run_pages.ROOT).as_posix() for page in run_pages.pages()}
    assert {"README.md", "ptxemu/README.md", "docs/guides/quickstart.md"} <= names
    assert "docs/guides/context-parallel.md" not in names


@pytest.mark.slow
def test_what_a_page_does_not_install_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr(run_pages, "ROOT", tmp_path)
    monkeypatch.setattr(run_pages, "_copy_checkout", empty_checkout)
    folder = tmp_path / "run"
    folder.mkdir()
    assert run_pages.run_page(page, folder) == ["python -c 'import numpy'", "its Python"]
