"""What `mrem verify` checks: a result folder, its ONNX files, and the checkpoints of an interrupted run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrem_deploy.base import digests
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.resuming import work_folder
from mrem_deploy.base.strict_json import read_object
from mrem_deploy.deploy.runtime import missing_packages
from mrem_deploy.evaluate.examples import EXAMPLES, read_examples
from mrem_deploy.export.origin import origin_of
from mrem_deploy.export.profiles import PROFILES
from mrem_deploy.models import gate
from mrem_deploy.models.loading import TOKENIZER_FILES
from mrem_deploy.quant.artifact import MANIFEST, TENSORS
from mrem_deploy.quant.frozen import FrozenModel, inspect
from mrem_deploy.result import RECIPE, History, Metrics, Onnx
from mrem_deploy.result.history import HISTORY
from mrem_deploy.result.metrics import METRICS
from mrem_deploy.result.recipe_file import recipe_has_changed
from mrem_deploy.train.checkpoint import IDENTITY, MARKER, identity_digest
from mrem_deploy.train.checkpoint_file import START_OVER, read_checkpoint

if TYPE_CHECKING:
    from mrem_deploy.recipe import Recipe


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what about it was checked, and what is wrong with it."""

    what: str
    checked: str
    findings: tuple[str, ...] = ()


def verify(folder: Path) -> list[Check]:
    """Check everything in a folder; a UserError if there is nothing of ours in it."""
    work = work_folder(folder.absolute())
    if not folder.exists() and work.is_dir():
        folder = work
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}", "give the --out folder of `mrem quantize`")
    if (folder / MARKER).is_file():
        return list(_work_checks(folder))
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} holds neither a result ({MANIFEST}) nor checkpoints ({MARKER})",
            "give the --out folder of `mrem quantize`",
        )
    checks = list(_result_checks(folder))
    if (work / MARKER).is_file():
        checks += _work_checks(work)
    return checks


def _result_checks(folder: Path) -> Iterator[Check]:
    frozen, has_digests, check = _model_check(folder)
    yield check
    yield _tokenizer_check(folder)
    readers: dict[str, Callable[[Path], object]] = {
        METRICS: Metrics.read,
        HISTORY: History.read,
        EXAMPLES: read_examples,
    }
    for name, reader in readers.items():
        if (folder / name).exists():
            yield Check(name, "readable", _problems(reader, folder))
    if (folder / RECIPE).exists():
        yield _recipe_check(folder)
    exported = _exported(folder, frozen)
    for path in sorted([*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")]):
        file = path.relative_to(folder)
        yield _onnx_check(folder, file, frozen, has_digests and file.as_posix() in exported)
    for name in exported:
        if not (folder / name).exists():
            yield Check(name, "there", (f"{name} is missing; the run that wrote this folder exported it",))


def _problems(read: Callable[[Path], object], folder: Path) -> tuple[str, ...]:
    """What a function that reads a file of the folder refuses."""
    try:
        read(folder)
    except UserError as error:
        return (error.problem,)
    return ()


def _read_recipe(folder: Path) -> Recipe:
    from mrem_deploy.recipe import from_yaml, make_recipe

    return make_recipe(from_yaml(folder / RECIPE))


def _recipe_check(folder: Path) -> Check:
    problems = _problems(_read_recipe, folder)
    if not problems and recipe_has_changed(folder / RECIPE):
        problems = (f"{RECIPE} has changed since it was written",)
    return Check(RECIPE, "readable, SHA-256", problems)


def _exported(folder: Path, frozen: FrozenModel | None) -> list[str]:
    """The ONNX files that the run has written, as far as metrics.json and recipe.yaml can be read."""
    reported: list[Onnx | None] = []
    asked = ""
    with suppress(UserError):
        metrics = Metrics.read(folder)
        reported = [metrics.onnx, metrics.runtime]
    with suppress(UserError):
        asked = _read_recipe(folder).export
    names = [name.strip() for name in asked.split(",")]
    found = [
        profile.path_in(folder).relative_to(folder).as_posix()
        if frozen is None
        else profile.file_for({weight.bits for weight in frozen.weights.values()})
        for profile in PROFILES.values()
        if profile.name in names
    ]
    known = [file for profile in PROFILES.values() for file in profile.files]
    return sorted({*found, *(onnx.file for onnx in reported if onnx is not None and onnx.file in known)})


def _model_check(folder: Path) -> tuple[FrozenModel | None, bool, Check]:
    """The model if nothing is wrong with it, and whether it was written with digests."""
    what = f"{TENSORS}, {MANIFEST} and {gate.CONFIG}"
    try:
        gate.check_links(folder)
        found = inspect(folder)
    except UserError as error:
        return None, False, Check(what, "readable", (error.problem,))
    how = (
        "SHA-256, types, shapes and ranges"
        if found.has_digests
        else ("types, shapes and ranges; an earlier release wrote it, without SHA-256")
    )
    frozen = None if found.findings else found.frozen
    return frozen, found.has_digests, Check(what, f"{found.tensors} tensors: {how}", found.findings)


def _tokenizer_check(folder: Path) -> Check:
    def read(folder: Path) -> None:
        from mrem_deploy.models.loading import load_tokenizer

        load_tokenizer(folder)

    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return Check("tokenizer", "there is none")
    return Check("tokenizer", "readable", _problems(read, folder))


def _onnx_check(folder: Path, file: Path, frozen: FrozenModel | None, must_have_digests: bool) -> Check:
    path, name = folder / file, file.as_posix()
    try:
        gate.inside(folder, file.parts[0])
        origin = origin_of(gate.inside(path.parent, path.name))
    except (OSError, UserError) as error:
        return Check(name, "readable", (f"{name} cannot be read: {error}",))
    if origin.changed is None and not _is_graph(path):
        return Check(name, "readable", (f"{name} is not a complete ONNX file",))
    if origin.changed is None and must_have_digests:
        problem = f"{name} lacks its SHA-256, with which the run that wrote this folder exported it"
        return Check(name, "SHA-256", (problem,))
    if origin.changed is None:
        return Check(name, "nothing: an earlier release or another tool wrote it, without SHA-256")
    findings = [f"{name} has changed since it was exported"] if origin.changed else []
    if frozen is None:
        return Check(name, "SHA-256", tuple(findings))
    if origin.result not in (None, frozen.digest):
        findings.append(f"{name} was exported from another result than the one in this folder")
    return Check(name, "SHA-256, and the result it was exported from", tuple(findings))


def _is_graph(path: Path) -> bool:
    """Whether the file can be parsed; True where the package for it is missing."""
    if missing_packages("onnx"):
        return True
    import onnx
    from google.protobuf.message import DecodeError

    try:
        onnx.load(path, load_external_data=False)
    except (DecodeError, OSError, ValueError):
        return False
    return True


def _work_checks(folder: Path) -> Iterator[Check]:
    identity: dict[str, Any] = {}

    def read_marker(folder: Path) -> None:
        identity.update(read_object(gate.existing(folder / MARKER, START_OVER), START_OVER))

    problems = _problems(read_marker, folder)
    yield Check(f"{folder.name}/{MARKER}", "readable", problems)
    for path in sorted(folder.glob("*.safetensors")):
        yield _checkpoint_check(path, None if problems else identity_digest(identity))


def _checkpoint_check(path: Path, run: str | None) -> Check:
    """`run` is the digest of the run that the folder belongs to, where it is known."""
    what = f"{path.parent.name}/{path.name}"
    try:
        tensors, metadata = read_checkpoint(path)
    except UserError as error:
        return Check(what, "readable", (error.problem,))
    findings: tuple[str, ...] = ()
    if IDENTITY not in metadata or not digests.has_digests(metadata):
        findings = (f"{path.name} lacks its digests; an earlier release wrote it, or it was changed",)
    elif run is not None and metadata[IDENTITY] != run:
        findings = (f"{path.name} was written by another run than {MARKER} names",)
    return Check(what, f"{len(tensors)} tensors: SHA-256, types and shapes, and the run", findings)
