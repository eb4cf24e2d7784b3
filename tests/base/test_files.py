"""Atomic writes: the old one or the new one, and nothing else in the folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import Killed

from mrem_deploy.base import files
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import (
    atomic_file,
    atomic_folder,
    cache_folder,
    explained,
    is_mount_point,
    write_json,
    write_text,
)


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# What may go wrong inside the block, and what a person then sees.
FAILURES = [
    pytest.param(
        OSError(errno.ENOSPC, "No space left on device"), UserError, "no space left", id="full disk"
    ),
    pytest.param(OSError(errno.EACCES, "Permission denied"), UserError, "no permission", id="no permission"),
    pytest.param(OSError(errno.EROFS, "Read-only file system"), UserError, "no permission", id="read-only"),
    pytest.param(OSError(errno.EIO, "Input/output error"), UserError, "Input/output", id="broken disk"),
    pytest.param(
        RuntimeError("I/O error: No space (os error 28)"), UserError, "no space left", id="full, by Rust"
    ),
    pytest.param(ValueError("ours"), ValueError, "ours", id="a defect of ours"),
    pytest.param(UserError("theirs", "do"), UserError, "theirs", id="another message"),
    pytest.param(KeyboardInterrupt(), KeyboardInterrupt, None, id="interrupted"),
    pytest.param(Killed(), Killed, None, id="killed"),
]


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize(("error", "expected", "words"), FAILURES)
def test_a_file_that_failed_is_the_old_one(
    tmp_path: Path, error: BaseException, expected: type, words: str | None, existed: bool
) -> None:
    path = tmp_path / "result.json"
    if existed:
        path.write_text("old")

    def write() -> None:
        with atomic_file(path) as temporary:
            temporary.write_text("half of the ne")
            raise error

    with pytest.raises(expected, match=words):
        write()
    assert contents(tmp_path) == ({"result.json": "old"} if existed else {})


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize(("error", "expected", "words"), FAILURES)
def test_a_folder_that_failed_is_the_old_one(
    tmp_path: Path, error: BaseException, expected: type, words: str | None, existed: bool
) -> None:
    path = tmp_path / "result"
    if existed:
        write_text(path / "inner" / "a.txt", "old")

    def write() -> None:
        with atomic_folder(path) as temporary:
            (temporary / "b.txt").write_text("half")
            raise error

    with pytest.raises(expected, match=words):
        write()
    assert contents(tmp_path) == ({"result/inner/a.txt": "old"} if existed else {})
    assert [p.name for p in tmp_path.iterdir()] == (["result"] if existed else [])


@pytest.mark.parametrize("name", ["replace", "chmod"])
def test_a_disk_that_fills_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, name, full_disk)
        with pytest.raises(UserError, match="no space left"):
            write_text(path, "new")
    assert contents(tmp_path) == {"result.json": "old"}


@pytest.mark.parametrize(("error", "expected"), [(OSError(errno.ENOSPC, ""), UserError), (Killed(), Killed)])
@pytest.mark.parametrize("call", [1, 2])  # the old one moves aside, then the new one takes its place
def test_a_folder_whose_exchange_fails_is_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException, expected: type
) -> None:
    write_text(tmp_path / "result" / "a.txt", "old")
    original, count = os.rename, 0

    def rename(source: Any, target: Any) -> None:
        nonlocal count
        count += 1
        if count == call:
            raise error
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_exchange", lambda one, other: False)  # a system without the single step
        patch.setattr(os, "rename", rename)
        with pytest.raises(expected), atomic_folder(tmp_path / "result") as temporary:
            (temporary / "a.txt").write_text("new")
    assert contents(tmp_path) == {"result/a.txt": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["result"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="renameat2 is a Linux system call")
def test_folders_are_exchanged_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two renames a kill would leave neither folder in place."""
    write_text(tmp_path / "result" / "a.txt", "old")

    def forbidden(source: Any, target: Any) -> None:
        raise AssertionError("the exchange took two steps")

    monkeypatch.setattr(os, "rename", forbidden)
    with atomic_folder(tmp_path / "result") as temporary:
        (temporary / "a.txt").write_text("new")
        os.chmod(temporary / "a.txt", 0o600)
    assert contents(tmp_path) == {"result/a.txt": "new"}
    assert [p.name for p in tmp_path.iterdir()] == ["result"]
    assert (tmp_path / "result" / "a.txt").stat().st_mode & 0o077  # readable beyond its owner, by the umask


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "result.txt"
    write_text(path, "first ä")
    write_text(path, "second")
    assert contents(tmp_path) == {"deep/down/result.txt": "second"}


def test_the_old_file_is_there_until_the_new_one_is(tmp_path: Path) -> None:
    path = tmp_path / "result.txt"
    path.write_text("old")
    with atomic_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent  # a rename works only on one file system
    assert path.read_text() == "new"


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "result"
    write_text(path / "stale.txt", "old")
    with atomic_folder(path) as temporary:
        (temporary / "a.txt").write_text("new")
        assert contents(path) == {"stale.txt": "old"}
        assert temporary.parent == path.parent
    assert contents(tmp_path) == {"result/a.txt": "new"}  # what only the old one had is gone
    assert [p.name for p in tmp_path.iterdir()] == ["result"]


def test_what_a_kill_left_is_removed_by_the_next_write(tmp_path: Path) -> None:
    write_text(tmp_path / ".result.new-k1ll" / "a.txt", "half of")
    with atomic_folder(tmp_path / "result") as temporary:
        assert sorted(tmp_path.iterdir()) == [temporary]
        (temporary / "a.txt").write_text("whole")
        with atomic_folder(tmp_path / "result"):  # another process: the first one lives and is left alone
            assert temporary.is_dir()
    assert contents(tmp_path) == {"result/a.txt": "whole"}


def test_a_new_folder_with_new_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a relative path, as people type it
    with atomic_folder(Path("a/b/result")) as temporary:
        (temporary / "x").write_text("1")
    assert contents(tmp_path) == {"a/b/result/x": "1"}


def test_results_can_be_read_by_others(tmp_path: Path) -> None:
    """Temporary files are private by default; a result has the permissions of any other file."""
    mask = os.umask(0o022)
    try:
        write_text(tmp_path / "file", "x")
        with atomic_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o755


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for write in (atomic_file, atomic_folder):
        with pytest.raises(UserError, match="cannot write"), write(tmp_path / "file" / "result"):
            pass
    assert contents(tmp_path) == {"file": "x"}


def test_json_is_readable(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"ä": [1, 2.5, None]})
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"ä": [1, 2.5, None]}
    assert "ä" in text
    assert text.endswith("}\n")


def test_a_value_that_is_no_json_writes_nothing(tmp_path: Path) -> None:
    write_text(tmp_path / "x.json", "old")
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert contents(tmp_path) == {"x.json": "old"}


def test_the_message_names_the_place_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught, explained(tmp_path / "out"):
        full_disk()
    assert str(tmp_path / "out") in caught.value.problem
    assert "free some space" in caught.value.remedy


def test_the_cache_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MREM_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("MREM_CACHE")
    assert "mrem_deploy" in str(cache_folder())


MOUNTS = {
    "another file system": ["mount", "-t", "tmpfs", "none"],
    "a folder of the same file system": ["mount", "--bind", "{source}"],
}
ROOT = Path(__file__).resolve().parents[2]
ASK = "import sys; from mrem_deploy.base.files import *; print(is_mount_point(Path(sys.argv[1])))"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts are made as on Linux")
@pytest.mark.parametrize("kind", MOUNTS)
@pytest.mark.parametrize("name", ["volume", "a volume\\of mine"])
def test_a_mounted_folder_is_known(tmp_path: Path, kind: str, name: str) -> None:
    """In a name space of its own, where a user may mount; the mount ends with its process."""
    if shutil.which("unshare") is None:
        pytest.skip("this system has no unshare")
    source, volume = tmp_path / "source", tmp_path / name
    source.mkdir()
    volume.mkdir()
    assert not is_mount_point(volume)
    words = [word.format(source=source) for word in MOUNTS[kind]]
    script = '"${@:4}" "$1" || exit 77; exec "$2" -c "$3" "$1"'
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--mount", "bash", "-c", script, "bash", str(volume), sys.executable, ASK]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    assert done.stdout == "True\n", done.stderr


LAYERS = """
mount -t tmpfs none "$1" && cd "$1" && mkdir lower upper merged
mkdir -p lower/full lower/empty lower/.full.work upper/layer upper/work
touch lower/full/a.txt lower/.full.work/run.json lower/.full.work/one.safetensors
mount -t overlay overlay -o "lowerdir=lower,upperdir=upper/layer,workdir=upper/work$4" merged || exit 77
exec "$2" -c "$3" "$1/merged"
"""
IN_LAYERS = """
import json, sys
from pathlib import Path
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_folder, is_in_lower_layer
from mrem_deploy.base.resuming import discard, work_folder
from mrem_deploy.preflight import check_out

root = Path(sys.argv[1])
(root / "new" / "deep").mkdir(parents=True)
found = [name for name in ("full", "empty", "new", "none") if is_in_lower_layer(root / name)]
try:
    check_out(str(root / "full"), {}, "a.txt")
    refused = ""
except UserError as error:
    refused = str(error)
for name in ("empty", "new", "none"):
    with atomic_folder(root / name) as new:
        (new / "b.txt").write_text(name)
discard(work_folder(root / "full"))
after = sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())
print(json.dumps([found, refused, after, sorted(path.name for path in root.iterdir())]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="layers are mounted as on Linux")
def test_a_folder_of_a_lower_layer(tmp_path: Path) -> None:
    """What comes with a container's image cannot be renamed; it is known before any work, and not touched."""
    if shutil.which("unshare") is None:
        pytest.skip("this system has no unshare")
    root = os.geteuid() == 0
    command = ["unshare", *([] if root else ["--user", "--map-root-user"]), "--mount", "bash", "-c", LAYERS]
    given = [str(tmp_path), sys.executable, IN_LAYERS, "" if root else ",userxattr"]
    done = subprocess.run([*command, "bash", *given], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found, refused, after, names = json.loads(done.stdout)
    assert found == ["full"]
    assert "image of this container" in refused
    assert "→ remove it first" in refused
    assert after == ["empty/b.txt", "full/a.txt", "new/b.txt", "none/b.txt"]
    assert names == ["empty", "full", "new", "none"]


def test_other_folders_are_no_mount_points(tmp_path: Path) -> None:
    assert is_mount_point(Path("/"))
    assert not is_mount_point(tmp_path)
    assert not is_mount_point(tmp_path / "missing")
