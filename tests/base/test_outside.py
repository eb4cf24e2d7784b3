"""What comes from outside: texts, paths and values that nobody can use, and how messages show them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.options import MOST, whole
from mrem_deploy.base.outside import check_text, path_of, shown


@pytest.mark.parametrize(
    "value", ["", "text", 5, 1.5, None, True, [1, "a"], {"a": 1}, ("x",), float("nan"), "\ud800", "a" * 90]
)
def test_small_values_are_shown_as_they_are(value: object) -> None:
    assert shown(value) == repr(value)


def test_no_value_is_too_large_to_be_shown() -> None:
    deep: list[object] = []
    wide: object = "x"
    for _ in range(100_000):
        deep = [deep]
    for _ in range(60):
        wide = [wide, wide]  # 2 to the power of 60 letters, if written out
    assert len(shown(deep)) < 100
    assert len(shown(wide)) < 1000
    assert len(shown("a" * 10**6)) < 200
    assert shown(1 << 100_000) == "a number of 100001 bits"


@pytest.mark.parametrize("text", ["\ud800", "caf\udce9", "a\0b"])
def test_texts_that_no_file_can_hold(text: str) -> None:
    with pytest.raises(UserError, match="--data must be text in UTF-8; got ") as caught:
        check_text("--data", text)
    str(caught.value).encode()  # the message itself can be written


def test_text_may_be_anything_else() -> None:
    for text in ("", "é", "\U0001f600", "\x07\x1b", "\n"):
        check_text("--data", text)
    check_text("a sentence", "a\0b", is_name=False)


def test_paths_that_need_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text("")
    assert path_of("--data", "~/x") == tmp_path / "x"
    assert path_of("--data", str(tmp_path / "file" / "x")) == tmp_path / "file" / "x"
    assert path_of("--data", tmp_path) == tmp_path


def test_paths_that_the_system_cannot_look_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path, said in (
        (tmp_path / "a", "symbolic links"),
        (tmp_path / "a" / "inside", "symbolic links"),
        (tmp_path / ("x" * 256), "too long"),
        (Path("/x" * 5000), "too long"),
        ("~nobody-of-this-name/x", "home folder"),
        ("a\0b", "NUL"),
    ):
        with pytest.raises(UserError, match=f"--data (.|\n)*{said}") as caught:
            path_of("--data", path)
        assert caught.value.remedy
        assert len(str(caught.value)) < 500

    def refuse(path: object) -> os.stat_result:  # root may look anywhere, so the refusal is played
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        with pytest.raises(UserError, match="--data 'locked/x' cannot be used: Permission denied"):
            path_of("--data", "locked/x")


def test_no_message_is_longer_than_a_screen() -> None:
    error = UserError("value " + "x" * 10**6, "shorten it")
    assert len(error.problem) < 2100
    assert str(error).endswith("x …\n  → shorten it")
    assert UserError("short").problem == "short"


# -- the last net: errors of the system that nobody expected ------------------------------------------------


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.EIO])
def test_refusals_of_the_system_are_messages(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: list[str] | None) -> int:
        raise OSError(code, os.strerror(code), "some/file")

    assert cli.run(main, []) == cli.EXIT_USER_ERROR
    told = capsys.readouterr().err
    assert told.startswith(f"error: 'some/file': {os.strerror(code)}\n  → ")


def test_other_errors_of_the_system_keep_their_traceback() -> None:
    def main(argv: list[str] | None) -> int:
        raise FileNotFoundError(errno.ENOENT, "a file of ours is missing")

    with pytest.raises(FileNotFoundError):
        cli.run(main, [])


def test_an_argument_that_is_not_utf8(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(lambda argv: 0, ["--out", "caf\udce9"]) == cli.EXIT_USER_ERROR
    assert "an argument must be text in UTF-8; got 'caf\\udce9'" in capsys.readouterr().err


def test_bytes_that_are_not_utf8_on_a_real_command_line() -> None:
    done = subprocess.run(
        [os.fsencode(sys.executable), b"-m", b"mrem_deploy", b"validate", b"caf\xe9"], capture_output=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(b"error: an argument must be text in UTF-8")


# -- whole numbers of the command line ---------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0", "-1", "", "1.5", "nan", "inf", "1e3", "²", "9" * 5000, str(MOST + 1)])
def test_numbers_out_of_range(text: str) -> None:
    with pytest.raises(UserError, match="--rounds must be a whole number"):
        whole("--rounds", 1)(text)


def test_numbers_in_range() -> None:
    assert whole("--rounds", 1)("1") == 1
    assert whole("--rounds", 0)(str(MOST)) == MOST
    assert whole("--seed", 0, 2**32 - 1)(str(2**32 - 1)) == 2**32 - 1
    with pytest.raises(UserError, match="--threads must be a whole number, 0 to 1024; got '100000'"):
        whole("--threads", 0, 1024)("100000")
