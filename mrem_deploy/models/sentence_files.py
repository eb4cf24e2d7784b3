"""The files by which sentence-transformers knows an embedder or a cross-encoder, read strictly.

modules.json names the modules in their order; each has a folder with its settings. Only modules whose
meaning is known here are accepted: another one would change the vectors without a word. No class that a
file names is imported, and weights are read from safetensors only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import path_of, shown
from mrem_deploy.base.strict_json import read_bytes, read_list, read_object
from mrem_deploy.models import gate
from mrem_deploy.models.sentence_head import Dense, Normalize, Pooling, SentenceHead
from mrem_deploy.models.sentence_modules import (
    COPY_AGAIN,
    SAVE_AGAIN,
    WIDEST,
    Place,
    check_count,
    read_dense,
    read_normalize,
    read_pooling,
)

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
# The settings of the encoder, under the names that sentence-transformers has given the file.
ENCODER = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
POOLING_ALONE = "1_Pooling/config.json"  # of a model without modules.json
EMBEDDER, RERANKER = "SentenceTransformer", "CrossEncoder"
NAMESPACE = "sentence_transformers."
KNOWN = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
TASKS = {EMBEDDER: "feature-extraction", RERANKER: "sequence-classification"}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# Settings of the encoder that change nothing, and those that would change the vectors in ways not known here.
HARMLESS = ("max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name",
            "unpad_inputs")  # fmt: skip
ARGUMENTS = (
    "model_args",
    "model_kwargs",
    "tokenizer_args",
    "processor_kwargs",
    "config_args",
    "config_kwargs",
)
HARMLESS_ARGUMENTS = ("attn_implementation", "torch_dtype", "dtype")
LONGEST = 1_000_000  # tokens

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class SentenceFiles:
    """What the files say, and the files themselves, which a result has as well."""

    kind: str = EMBEDDER
    head: SentenceHead = field(default_factory=SentenceHead)
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # its name
    max_seq_length: int | None = None
    lower_case: bool = False
    similarity: str = "cosine"
    activation: str | None = None  # of a cross-encoder's scores; None: its default
    files: Mapping[str, bytes] = field(default_factory=dict)

    def prompt(self, *names: str) -> str:
        """The first of these prompts that the model has; without any the default one, or none."""
        for name in names:
            if name in self.prompts:
                return self.prompts[name]
        return self.prompts[self.default_prompt] if self.default_prompt is not None else ""


def read_sentence_files(model: str | Path) -> SentenceFiles | None:
    """Those of a model's folder, a result folder or a hub id; None if it is not of sentence-transformers."""
    place = _place_of(str(model))
    modules = place(MODULES)
    if modules is not None:
        return _read(modules, place)
    pooling = place(POOLING_ALONE)
    if pooling is None:
        return None
    head = SentenceHead(read_pooling(read_object(pooling, COPY_AGAIN), pooling))
    return SentenceFiles(head=head, files={POOLING_ALONE: read_bytes(pooling, COPY_AGAIN)})


def sentence_files(*models: str | Path) -> SentenceFiles:
    """Those of the first model that has some; else what sentence-transformers takes for a plain encoder."""
    found = filter(None, map(read_sentence_files, models))
    return next(found, SentenceFiles())


def as_embedder(source: str, tokenizer: Any) -> None:
    """Let the tokenizer of an embedder cut and write its texts as sentence-transformers does.

    Refuses modules that are not known, and a cross-encoder.
    """
    found = read_sentence_files(source)
    if found is None:
        return
    if found.kind != EMBEDDER:
        raise UserError(
            f"{source} is a {found.kind}: it scores pairs of texts, and has no sentence vectors",
            "use --task reranking",
        )
    if not found.head.pooling.include_prompt and any(found.prompts.values()):
        raise UserError(
            f"{source} leaves its prompts out of the pooling (include_prompt), which is not supported",
            "give a model that pools all tokens",
        )
    if found.max_seq_length is not None:
        tokenizer.model_max_length = found.max_seq_length
    if found.lower_case:
        _lower(tokenizer, source)


def _lower(tokenizer: Any, source: str) -> None:
    """As the setting do_lower_case of the encoder's file does; many tokenizers lower all texts already."""
    from tokenizers import normalizers

    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{source} sets do_lower_case, and its tokenizer is not a fast one",
            "give a model with tokenizer.json",
        )
    backend = tokenizer.backend_tokenizer
    if not _lowers(json.loads(backend.to_str()).get("normalizer")):
        others = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])


def _lowers(normalizer: Any) -> bool:
    """Whether a normalizer, as tokenizer.json has it, makes texts lower case."""
    if not isinstance(normalizer, dict):
        return False
    return (
        normalizer.get("type") == "Lowercase"
        or bool(normalizer.get("lowercase"))
        or any(map(_lowers, normalizer.get("normalizers") or []))
    )


def _place_of(model: str) -> Place:
    folder = path_of("the model", model)
    if folder.is_dir():

        def in_folder(name: str) -> Path | None:
            path = gate.below(folder, name)
            return path if path.is_file() else None

        return in_folder

    if not HUB_ID.fullmatch(model):
        return lambda name: None

    def on_hub(name: str) -> Path | None:
        from transformers.utils import cached_file

        inner, file = str(PurePosixPath(name).parent), PurePosixPath(name).name
        found = cached_file(
            model,
            file,
            subfolder="" if inner == "." else inner,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        return None if found is None else Path(found)

    return on_hub


# -- modules.json ------------------------------------------------------------------------------------------


def _read(path: Path, place: Place) -> SentenceFiles:
    files = {MODULES: read_bytes(path, COPY_AGAIN)}
    settings, encoder = _settings(place, files), _encoder(place, files)
    kind = settings.get("model_type", EMBEDDER)
    if kind not in TASKS:
        raise UserError(
            f"{place(SETTINGS)} says that this is a {shown(kind)}; supported are {EMBEDDER} and {RERANKER}",
            "give a model of one of these kinds",
        )
    task = encoder.get("transformer_task", TASKS[EMBEDDER])
    if task != TASKS[kind]:
        raise UserError(
            f"the encoder of {path} is for {shown(task)}; a {kind} has one for {TASKS[kind]}", COPY_AGAIN
        )
    modules = [_module(entry, path) for entry in read_list(path, COPY_AGAIN)]
    names = [name for name, _ in modules]
    first = ["Transformer"] if kind == RERANKER else ["Transformer", "Pooling"]
    if names[: len(first)] != first or {"Transformer", "Pooling"} & set(names[len(first) :]):
        raise UserError(
            f"{path} has the modules {', '.join(names) or 'none'}; first must come {' and '.join(first)}, "
            "each of them once",
            "give a model with one encoder and one pooling",
        )
    if modules[0][1]:
        raise UserError(f"{path} keeps the encoder in a folder of its own, {modules[0][1]}", SAVE_AGAIN)
    if kind == RERANKER and len(names) > 1:
        raise UserError(
            f"{path} has modules behind the classification head ({', '.join(names[1:])}), which a "
            f"{RERANKER} with one output does not need",
            "give a model whose scores are the outputs of the transformers head",
        )
    pooling = Pooling()
    after: list[Normalize | Dense] = []
    for name, inner in modules[1:]:
        config = _module_config(name, inner, place, files)
        if name == "Pooling":
            pooling = read_pooling(*config)
        elif name == "Normalize":
            after.append(read_normalize(*config))
        elif name == "Dense":
            after.append(read_dense(*config, inner, place, files))
    head = SentenceHead(pooling, tuple(after), settings.get("truncate_dim"))
    _check_widths(head, place)
    prompts = {name: text or "" for name, text in (settings.get("prompts") or {}).items()}
    return SentenceFiles(
        kind,
        head,
        prompts if kind == RERANKER else {"query": "", "document": "", **prompts},
        settings.get("default_prompt_name"),
        encoder.get("max_seq_length"),
        bool(encoder.get("do_lower_case")),
        settings.get("similarity_fn_name") or "cosine",
        settings.get("activation_fn"),
        files,
    )


def _check_widths(head: SentenceHead, place: Place) -> None:
    """Every Dense module must take what comes before it, from the encoder on."""
    config = place(gate.CONFIG)
    content = {} if config is None else read_object(config, COPY_AGAIN)
    widths = (content.get(key) for key in ("hidden_size", "dim", "d_model"))
    hidden = next((width for width in widths if isinstance(width, int)), None)
    if hidden is None:
        return
    width = head.pooling.width(hidden)
    for number, module in enumerate(head.after, 2):
        taken = module.weights["linear.weight"].shape[1] if isinstance(module, Dense) else width
        if taken != width:
            pooling, where = ", ".join(head.pooling.modes), config.parent if config else MODULES
            raise UserError(
                f"module {number} of {where} takes vectors of {taken} numbers, but gets {width} (pooling: "
                f"{pooling})",
                COPY_AGAIN,
            )
        width = module.width(width)


def _module(entry: Any, path: Path) -> tuple[str, str]:
    """(kind, folder) of one entry of modules.json."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("type", "path")):
        raise UserError(
            f"{path} has the entry {shown(entry)}; a module with type and path is expected", COPY_AGAIN
        )
    name = entry["type"].rpartition(".")[2]
    if not entry["type"].startswith(NAMESPACE) or name not in KNOWN:
        raise UserError(
            f"{path} names the module {shown(entry['type'])}, which is not known here; known are "
            f"{', '.join(KNOWN)}",
            "give a model of these modules; code that a model folder names is never run",
        )
    if entry["path"]:
        gate.below(path.parent, entry["path"])
    return name, entry["path"]


def _module_config(
    name: str, inner: str, place: Place, files: dict[str, bytes]
) -> tuple[dict[str, Any], Path | None]:
    """The settings of a module; some have none."""
    file = f"{inner}/config.json"
    path = place(file) if inner else None
    if path is None:
        if name in ("Pooling", "Dense"):
            raise UserError(f"there is no {file}, the settings of the module {name}", COPY_AGAIN)
        return {}, None
    files[file] = read_bytes(path, COPY_AGAIN)
    return read_object(path, COPY_AGAIN), path


def _settings(place: Place, files: dict[str, bytes]) -> dict[str, Any]:
    """config_sentence_transformers.json, if there is one."""
    path = place(SETTINGS)
    if path is None:
        return {}
    files[SETTINGS] = read_bytes(path, COPY_AGAIN)
    content = read_object(path, COPY_AGAIN)
    prompts, default = content.get("prompts") or {}, content.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise UserError(f"{path} has prompts that are not texts by name: {shown(prompts)}", COPY_AGAIN)
    if default is not None and default not in {"query", "document", *prompts}:
        raise UserError(
            f"{path} names the default prompt {shown(default)}; it has {', '.join(prompts) or 'no prompts'}",
            "correct default_prompt_name",
        )
    similarity = content.get("similarity_fn_name")
    if similarity is not None and similarity not in SIMILARITIES:
        raise UserError(
            f"{path} names the similarity {shown(similarity)}; known are {', '.join(SIMILARITIES)}",
            "correct similarity_fn_name",
        )
    check_count(content, "truncate_dim", WIDEST, path)
    return content


def _encoder(place: Place, files: dict[str, bytes]) -> dict[str, Any]:
    """sentence_bert_config.json or its like, if there is one."""
    name, path = next(((name, found) for name in ENCODER if (found := place(name))), ("", None))
    if path is None:
        return {}
    files[name] = read_bytes(path, COPY_AGAIN)
    content = read_object(path, COPY_AGAIN)
    check_count(content, "max_seq_length", LONGEST, path)
    for key, value in content.items():
        if key in HARMLESS or not value:
            continue
        if key in ARGUMENTS and isinstance(value, dict) and set(value) <= set(HARMLESS_ARGUMENTS):
            continue
        raise UserError(
            f"{path} sets {key} to {shown(value)}, which is not supported: it may change the vectors",
            f"remove {key} if it changes nothing, or use the model in sentence-transformers",
        )
    return content
