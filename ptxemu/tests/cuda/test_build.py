"""The stand-in is loaded if nobody else can have written it, and as it was written."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ptxemu.cuda import build, nvcc
from ptxemu.cuda.build import Standin, standin

STRANGER = 54_321
COMPILER = """\
#!/bin/sh
# As far as the stand-in's folder goes.
echo >> "${0%/*}/calls"
while [ "$1" != -o ]; do shift; done
echo "made by $0" > "$2"
"""
Change = Callable[[Path, pytest.MonkeyPatch], None]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that takes no time; a new process, as far as the stand-in's folder goes."""
    path = tmp_path / "compiler" / "cc"
    path.parent.mkdir()
    path.write_text(COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    monkeypatch.setattr(build, "_for_this_process", [])
    monkeypatch.setattr(build, "_links", {})
    return path


@pytest.fixture
def cache(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, with nothing in it."""
    monkeypatch.setenv("PTXEMU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def number_made(compiler: Path) -> int:
    """How often a stand-in was compiled."""
    calls = compiler.with_name("calls")
    each = 1 + len(build._LIBRARIES)
    return len(calls.read_text().splitlines()) // each if calls.exists() else 0


def give_away(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the path be another user's, to this process."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:
        patch.setattr(os, "geteuid", lambda: STRANGER)


def move_behind_link(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Put a link in its place."""
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def open_to_all(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Let everybody write to it."""
    path.chmod(0o777)


@pytest.mark.parametrize("change", [give_away, move_behind_link, open_to_all])
def test_a_cache_that_others_may_write_is_not_used(
    change: Change,
    cache: Path,
    compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    standin()
    change(cache, monkeypatch)
    made = standin()
    assert not made.folder.resolve().is_relative_to(cache.resolve())
    assert number_made(compiler) == 2 and f"{cache} is not trusted" in caplog.text
    assert standin() == made and number_made(compiler) == 2
    assert made.folder.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("change", [give_away, move_behind_link, open_to_all])
@pytest.mark.parametrize("what", ["folder", "library", "complete"])
def test_a_stand_in_that_others_may_write_is_replaced(
    what: str,
    change: Change,
    cache: Path,
    compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if change is give_away and os.geteuid() != 0:
        pytest.skip("needs root, to give a part away but not the cache")
    made = standin()
    changed = {"folder": made.folder, "library": made.library}.get(what, made.folder / "complete")
    change(changed, monkeypatch)
    assert standin() == made
    assert number_made(compiler) == 2 and f"{changed} is not trusted" in caplog.text
    assert standin() == made and number_made(compiler) == 2


def cut(made: Standin) -> None:
    """As a full disk leaves it."""
    made.library.write_bytes(made.library.read_bytes()[:-1])


def clean(made: Standin) -> None:
    """As cleaners of temporary files do, which leave folders."""
    for path in made.folder.iterdir():
        path.unlink()


def link_elsewhere(made: Standin) -> None:
    """Let the linker find another library."""
    (made.folder / "libcuda.so").unlink()
    (made.folder / "libcuda.so").symlink_to("/lib/libc.so.6")


def spoil_digests(made: Standin) -> None:
    """Bytes that are no text."""
    (made.folder / "complete").write_bytes(b"\xff\xfe")


@pytest.mark.parametrize("damage", [cut, clean, link_elsewhere, spoil_digests])
def test_a_damaged_stand_in_is_compiled_again_once(
    damage: Callable[[Standin], None], cache: Path, compiler: Path
) -> None:
    made = standin()
    before = {path.name for path in made.folder.iterdir()}
    damage(made)
    assert standin() == standin() == made
    assert number_made(compiler) == 2
    assert {path.name for path in made.folder.iterdir()} == before
    assert list(cache.iterdir()) == [made.folder]


def test_no_folder_is_found_by_its_name_among_temporary_files(
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another user can have made it, with the digest of the released sources."""
    temporary = tmp_path / "tmp"
    planted = temporary / f"ptxemu-{os.getuid()}" / f"standin-{build._digest(str(compiler))}"
    planted.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.delenv("PTXEMU_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    made = standin()
    assert made.folder.is_relative_to(temporary) and made.folder.parent != planted.parent
    assert made.library.is_file() and "for this process only" in caplog.text


@pytest.mark.parametrize("home", ["relative", None])
def test_a_user_without_a_home_is_served(
    home: str | None,
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PTXEMU_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "also-relative")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert standin().library.is_file()
    assert "no folder for a cache" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["compiler"]


def test_what_is_made_under_any_umask_is_this_users_alone(cache: Path, compiler: Path) -> None:
    before = os.umask(0)
    try:
        made = standin()
    finally:
        os.umask(before)
    assert standin() == made and number_made(compiler) == 1
    assert cache.stat().st_mode & 0o777 == made.folder.stat().st_mode & 0o777 == 0o700


def test_what_nobody_has_used_for_a_day_is_deleted(cache: Path, compiler: Path) -> None:
    cache.mkdir(0o700)
    names = ["standin-old", "standin-new", ".building-old", ".building-new", "exported"]
    for name in names:
        (cache / name).mkdir()
        if not name.endswith("new"):
            os.utime(cache / name, (0, 0))
    made = standin()
    assert {path.name for path in cache.iterdir()} == {
        "standin-new", ".building-new", "exported", made.folder.name,
    }  # fmt: skip
    os.utime(made.folder, (0, 0))
    standin()
    assert made.folder.stat().st_mtime > 0


def test_a_cache_may_have_any_name(
    made_standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the compiler itself: LD_PRELOAD, rpaths and nvcc's shell split such names."""
    monkeypatch.setattr(build, "_links", {})
    odd = tmp_path / "a b,c:$(d) '\"é"
    monkeypatch.setenv("PTXEMU_CACHE", str(odd))
    made = standin()
    assert build._PLAIN.fullmatch(str(made.library)) and made.folder.resolve().parent == odd
    assert standin() == made
    environment = {**os.environ, "LD_PRELOAD": str(made.library)}
    done = subprocess.run(["true"], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_a_source_whose_name_is_a_command_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "x$(touch y).cu"
    source.touch()
    with pytest.raises(nvcc.NvccError, match=r"nvcc hands names to a shell"):
        nvcc.compile_ptx(source, tmp_path / "out.ptx", arch="sm_90a")


def test_reasons_are_said_where_nobody_listens(
    cache: Path, compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only then: a cache that works says nothing."""
    with caplog.at_level(logging.DEBUG, logger="ptxemu"):
        standin()
        standin()
    assert caplog.text == ""
