"""Objects of the user's cache are loaded if nobody else can have written them, and are whole."""

from __future__ import annotations

import logging
import os
import platform
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from flashdsa.jit import loader, user_cache
from flashdsa.jit.loader import installed_hash, load
from flashdsa.jit.shared_object import build_shared_object, is_intact
from flashdsa.jit.user_cache import cache_folder, cache_key, file_name
from flashdsa.plan.kernel_spec import Variant
from tests.jit.fake_kernel import SEVEN_PLAN, SPEC, Seven
from tests.support.subtests import CaseLoop

pytest.importorskip("tvm_ffi", reason="calls what was compiled")
if shutil.which("gcc") is None:
    pytest.skip("needs gcc", allow_module_level=True)

SEVEN = Variant(SPEC, SEVEN_PLAN)
STRANGER = 54_321
FLIPS = 12


@pytest.fixture(autouse=True)
def _forget(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, logger="flashdsa.jit")
    yield
    load.cache_clear()
    loader._installed.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, which is not there yet; without installed objects."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "INSTALLED", tmp_path / "installed")
    return tmp_path / "cache" / "flashdsa"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Seven]:
    """What was compiled."""
    made: list[Seven] = []

    def compile_now(*_: object) -> Seven:
        made.append(Seven())
        return made[-1]

    monkeypatch.setattr(loader, "compile_plan", compile_now)
    return made


def loaded() -> Any:
    """The function, as a new process would find it."""
    load.cache_clear()
    return load(SPEC, SEVEN_PLAN)


def built(cache: Path) -> Path:
    """A whole object in the cache, by this user."""
    cache.mkdir(0o700, parents=True, exist_ok=True)
    path = cache / file_name(SEVEN)
    build_shared_object(path, {SEVEN.name: Seven()}, cache_key(SEVEN))
    return path


def give_away(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the path be another user's, to this process."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1, follow_symlinks=False)
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


def open_to_group(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Let a group write to it."""
    path.chmod(path.stat().st_mode | 0o020)


STRANGE: list[Callable[[Path, pytest.MonkeyPatch], None]] = [
    give_away, move_behind_link, open_to_all, open_to_group,
]  # fmt: skip


@pytest.mark.parametrize("change", STRANGE)
def test_nothing_is_loaded_from_a_folder_that_others_may_write(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    cache: Path,
    compilations: list[Seven],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    planted = built(cache)
    before = planted.read_bytes()
    change(cache, monkeypatch)
    assert loaded() is compilations[0]
    assert f"{cache} is not trusted" in caplog.text and "serves this process only" in caplog.text
    assert planted.read_bytes() == before


@pytest.mark.parametrize("change", STRANGE)
def test_a_file_that_others_may_write_is_replaced(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    cache: Path,
    compilations: list[Seven],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    planted = built(cache)
    with monkeypatch.context() as patch:
        if change is give_away and os.geteuid() != 0:
            pytest.skip("needs root, to give a file away but not its folder")
        change(planted, patch)
        assert loaded()() == 7
    assert len(compilations) == 1 and f"{planted} is not trusted" in caplog.text
    assert planted.lstat().st_uid == os.geteuid() and not planted.is_symlink()
    assert loaded()() == 7 and len(compilations) == 1


def test_what_is_made_under_any_umask_is_this_users_alone(
    cache: Path, compilations: list[Seven]
) -> None:
    before = os.umask(0)
    try:
        assert loaded()() == 7
    finally:
        os.umask(before)
    assert cache.stat().st_mode & 0o777 == cache.parent.stat().st_mode & 0o777 == 0o700
    assert loaded()() == 7 and len(compilations) == 1


def test_a_user_without_a_home_is_served(
    compilations: list[Seven], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a relative XDG_CACHE_HOME nothing is read, as the working folder may be anybody's."""
    monkeypatch.setattr(loader, "INSTALLED", Path("nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/flashdsa")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert loaded() is compilations[0]
    assert "no folder for a cache" in caplog.text


def damages(content: bytes) -> Iterator[tuple[str, bytes]]:
    """What disks, copies and other machines make of an object."""
    half = len(content) // 2
    yield "empty", b""
    yield "cut", content[:half]
    yield "cut at its end", content[:-1]
    yield "a page of zeros", content[:4096] + bytes(4096) + content[8192:]
    yield "half of it zeros", content[:half] + bytes(len(content) - half)
    yield "of an aarch64", content[:18] + b"\xb7" + content[19:]
    draw = random.Random(114)
    for _ in range(FLIPS):
        bit = draw.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", bytes(flipped)


def test_a_damaged_object_is_compiled_again_once(
    cache: Path, compilations: list[Seven], subtests: CaseLoop, caplog: pytest.LogCaptureFixture
) -> None:
    path = built(cache)
    for name, content in damages(path.read_bytes()):
        path.unlink()  # a loaded one is not written to
        path.write_bytes(content)
        path.chmod(0o600)
        compilations.clear()
        caplog.clear()
        with subtests.test(name):
            assert loaded()() == 7
            assert len(compilations) == 1 and "damaged" in caplog.text and is_intact(path)


@pytest.mark.parametrize("error", [OSError, RuntimeError, AttributeError])
def test_what_cannot_be_loaded_is_compiled_again_once(
    error: type[Exception],
    cache: Path,
    compilations: list[Seven],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And if that does not load, either, the compiled function serves this process."""
    path = built(cache)
    load_object = loader.load_shared_object

    def fail(_: Path) -> Any:
        raise error("no such symbol")

    def fail_once(_: Path) -> Any:
        monkeypatch.setattr(loader, "load_shared_object", load_object)
        raise error("no such symbol")

    monkeypatch.setattr(loader, "load_shared_object", fail_once)
    assert loaded()() == 7
    assert len(compilations) == 1 and f"{path} cannot be loaded" in caplog.text
    monkeypatch.setattr(loader, "load_shared_object", fail)
    assert loaded() is compilations[1]
    assert not path.exists()


def test_an_installed_object_that_cannot_be_loaded_is_passed_by(
    cache: Path, compilations: list[Seven], caplog: pytest.LogCaptureFixture
) -> None:
    """As one of an aarch64 machine in a checkout that both see."""
    path = loader.installed_object("sm90")
    build_shared_object(path, {SEVEN.name: Seven()}, installed_hash("sm90"))
    content = path.read_bytes()
    path.write_bytes(content[:18] + b"\xb7" + content[19:])
    assert loaded()() == 7
    assert len(compilations) == 1 and f"{path} cannot be loaded" in caplog.text


def test_another_machine_or_compiler_has_another_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """But an installed one is of its sources, wherever it is loaded."""
    keys, installed = {cache_key(SEVEN)}, installed_hash("sm90")
    monkeypatch.setattr(platform, "machine", lambda: "another")
    keys.add(cache_key(SEVEN))
    for name in (user_cache.COMPILER, user_cache.CALLER):
        with monkeypatch.context() as patch:
            patch.setattr(user_cache, "package_version", lambda one, name=name: one == name)
            keys.add(cache_key(SEVEN))
    assert len(keys) == 4 and installed_hash("sm90") == installed


@pytest.mark.parametrize("command", ["exit 1", "kill -9 $$"])
def test_a_fault_of_gcc_costs_the_cache(
    command: str,
    cache: Path,
    compilations: list[Seven],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text(f"#!/bin/sh\necho no space left >&2\n{command}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(compiler))
    assert loaded() is compilations[0]
    assert "serves this process only" in caplog.text and "no space left" in caplog.text
    assert [path.suffix for path in cache.iterdir()] in ([], [".lock"])


def test_a_cache_may_have_any_name(
    tmp_path: Path, cache: Path, compilations: list[Seven], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "a, b;$(touch c) '\"(d)@%é"
    monkeypatch.setenv("XDG_CACHE_HOME", str(odd))
    assert loaded()() == loaded()() == 7
    assert len(compilations) == 1 and (odd / "flashdsa" / file_name(SEVEN)).is_file()


def test_a_lock_that_stays_held_is_named_and_passed_by(
    cache: Path,
    compilations: list[Seven],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(loader, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(loader, "WAIT_SECONDS", 0.1)
    cache.mkdir(0o700, parents=True)
    path = (cache / file_name(SEVEN)).with_suffix(".lock")
    with FileLock(path):
        assert loaded() is compilations[0]
    assert f"holds {path}" in caplog.text and "serves this process only" in caplog.text


def test_what_nobody_has_used_for_a_day_is_deleted(cache: Path, compilations: list[Seven]) -> None:
    cache.mkdir(0o700, parents=True)
    current = next(file_name(one) for one in loader.variants_of("sm90").values())
    old = ["seven-0123456789abcdef.so", "seven-0123456789abcdef.lock", ".building-x", current]
    for name in (*old, "seven-fedcba9876543210.so"):
        (cache / name).mkdir() if name.startswith(".") else (cache / name).touch()
    for name in old:
        os.utime(cache / name, (0, 0))
    (cache / file_name(SEVEN)).write_bytes(b"")
    assert loaded()() == 7
    assert {path.name for path in cache.iterdir() if path.suffix != ".lock"} == {
        current, "seven-fedcba9876543210.so", file_name(SEVEN),
    }  # fmt: skip
    os.utime(cache / file_name(SEVEN), (0, 0))
    loaded()
    assert (cache / file_name(SEVEN)).stat().st_mtime > 0
