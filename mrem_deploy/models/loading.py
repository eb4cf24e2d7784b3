"""Full-precision checkpoints: from a folder or a hub id to a float32 model and its tokenizer.

Note: transformers fills what a checkpoint lacks with random numbers and only warns. Here that is an
error, unless the caller is about to train the new head. And for a folder without tokenizer it silently
makes an empty one; here that is an error too. `gate` is in front of everything that transformers reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import path_of
from mrem_deploy.models import gate
from mrem_deploy.models.architectures import check_head, check_model_type
from mrem_deploy.models.sentence_files import HUB_ID, as_embedder

# head -> the transformers class that builds it
HEADS = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "feature-extraction": "AutoModel",
}

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)


def auto_class(head: str, model_type: str) -> Any:
    """The class of transformers that builds a model of this type with this head."""
    import transformers

    bare = head == "feature-extraction"
    return getattr(transformers, check_model_type(model_type).encoder_class if bare else HEADS[head])


class LoadingInfo(TypedDict):
    """The part that we read of what transformers reports with `output_loading_info`."""

    missing_keys: Collection[str]
    mismatched_keys: Collection[tuple[str, Sequence[int], Sequence[int]]]  # name, shape found, shape expected


def load_model(
    path_or_hub_id: str | Path,
    head: str,
    num_labels: int | None = None,
    allow_new_head: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a float32 model in evaluation mode, and its tokenizer.

    `num_labels` is what the task needs (None: what the checkpoint has). With `allow_new_head` a head that
    is missing, or has another number of labels, is initialised from torch's global random state: right
    before fine-tuning, wrong before quantization. A body that does not fit, and NaN or Inf in any weight,
    are always refused.
    """
    if head not in HEADS:
        raise UserError(f"Unknown head {head!r}.", f"Choose one of: {', '.join(HEADS)}.")
    with quiet_transformers():
        source = _locate(str(path_or_hub_id))
        kind = _config(source).model_type
        check_head(kind, head, source)
        model, info = _load_weights(source, kind, head, num_labels)
        _check_weights_fit(source, head, model, info, allow_new_head)
        _check_finite(source, model)
        tokenizer = _load_tokenizer(source)
        if head == "feature-extraction":
            as_embedder(source, tokenizer)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"The tokenizer of {source} has {len(tokenizer)} tokens but the model embeds only {rows}.",
            "They do not belong together: use the tokenizer files the model was trained with.",
        )
    return model.eval(), tokenizer


def longest_input(model: PreTrainedModel) -> int | None:
    """How many tokens the model has positions for; None if positions are computed, not looked up."""
    limits = [
        # In the RoBERTa family positions begin after the padding index.
        part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1)
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Embedding) and name.endswith("position_embeddings")
    ]
    return min(limits, default=None)


def check_max_length(model: PreTrainedModel, max_length: int) -> None:
    """Refuse more tokens than the model has positions for; it would fail with a bare index error."""
    limit = longest_input(model)
    if limit is not None and max_length > limit:
        raise UserError(
            f"--max-length {max_length} is too long: this model reads at most {limit} tokens.",
            f"Give --max-length {limit} or less; longer texts are cut.",
        )


def _locate(name: str) -> str:
    """The folder or hub id to load from, checked before transformers sees it."""
    folder = path_of("the model", name)
    if folder.is_dir():
        _check_folder(folder)
        gate.check_model_folder(folder)
        return str(folder)
    if folder.exists():
        raise UserError(
            f"The model {name} is a file; a model folder is expected.",
            "Give the folder that holds config.json and model.safetensors.",
        )
    if name.startswith((".", "/", "~")) or not HUB_ID.fullmatch(name):
        raise UserError(
            f"There is no model folder {name}.",
            "Check the path: a folder with config.json, model.safetensors and the tokenizer is expected, "
            "or a hub id such as textattack/bert-base-uncased-SST-2.",
        )
    try:
        gate.check_hub_model(name)
    except OSError as error:
        raise _unreadable(name, error) from error
    return name


def load_config(path_or_hub_id: str) -> PretrainedConfig:
    """The configuration of a model without its weights."""
    with quiet_transformers():
        return _config(_locate(path_or_hub_id))


def _config(source: str) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        raise _unreadable(source, error) from error
    except Exception as error:  # what is in config.json decides what transformers raises
        raise _unbuildable(source, "model", error) from error


def _listed(folder: Path) -> tuple[list[str], str]:
    """The files of a folder, and a few of them in words."""
    files = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    return files, ", ".join(files[:8]) + (", …" if len(files) > 8 else "") if files else "no files"


def _check_folder(folder: Path) -> None:
    files, shown = _listed(folder)
    if "config.json" not in files:
        raise UserError(
            f"{folder} is not a model folder: it has no config.json (it has: {shown}).",
            "Give a folder written by save_pretrained: config.json, model.safetensors and the tokenizer.",
        )
    if not any(name.endswith(".safetensors") for name in files):
        pickles = [name for name in files if name.endswith(PICKLE_SUFFIXES)]
        if pickles:
            raise _pickle_refused(str(folder), pickles[0])
        raise UserError(
            f"{folder} has no weights: model.safetensors is expected (it has: {shown}).",
            "Copy or download the complete model folder.",
        )
    _check_tokenizer_files(folder, files, shown)


def _check_tokenizer_files(folder: Path, files: list[str], shown: str) -> None:
    if not any(name in files for name in TOKENIZER_FILES):
        raise UserError(
            f"{folder} has no tokenizer (it has: {shown}).",
            "Put the tokenizer that the model was trained with next to it: "
            'AutoTokenizer.from_pretrained("BASE_MODEL").save_pretrained("FOLDER").',
        )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder, which need not hold a model that transformers can read."""
    _check_tokenizer_files(folder, *_listed(folder))
    gate.check_links(folder)
    gate.read_result_config(folder)
    gate.check_tokenizer(folder)
    with quiet_transformers():
        return _load_tokenizer(str(folder))


def _pickle_refused(source: str, name: str) -> UserError:
    return UserError(
        f"{source} holds its weights as a pickle ({name}), which can run any code when it is opened. "
        "Only safetensors are loaded.",
        'If you trust where it came from, convert it once: python -c "from transformers import AutoConfig, '
        "AutoTokenizer; import transformers as t; s, d = 'SOURCE', 'NEW_FOLDER'; "
        "c = AutoConfig.from_pretrained(s); m = getattr(t, c.architectures[0]).from_pretrained(s); "
        'm.save_pretrained(d); AutoTokenizer.from_pretrained(s).save_pretrained(d)", '
        "and give NEW_FOLDER here.",
    )


def _load_weights(
    source: str, kind: str, head: str, num_labels: int | None
) -> tuple[PreTrainedModel, LoadingInfo]:
    from safetensors import SafetensorError

    options = {} if num_labels is None else {"num_labels": num_labels}
    try:
        model, info = auto_class(head, kind).from_pretrained(
            source,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            # What does not fit is listed in `info` and checked below, by name, not in one long traceback.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    except SafetensorError as error:
        raise UserError(
            f"The safetensors file in {source} cannot be read: {error}.",
            "It is incomplete or not a safetensors file (a Git LFS pointer?): copy or download it again.",
        ) from error
    except OSError as error:
        raise _unreadable(source, error) from error
    except Exception as error:  # what is in config.json decides what transformers raises
        raise _unbuildable(source, f"{head} model", error) from error
    return model, info


def _unbuildable(source: str, what: str, error: Exception) -> UserError:
    return UserError(
        f"transformers cannot build a {what} from {source}: {_first_line(error)}",
        "Check its config.json, or upgrade transformers if the architecture is newer.",
    )


def _unreadable(source: str, error: OSError) -> UserError:
    """What an OSError of transformers means: a broken folder, or one of the ways in which the hub fails."""
    reason = _first_line(error)
    if Path(source).is_dir():
        return UserError(
            f"{source} cannot be loaded: {reason}", "Copy or download the complete model folder."
        )
    if "model.safetensors" in str(error):
        return _pickle_refused(source, "no model.safetensors on the hub")
    return UserError(
        f"{source} is not a local folder, and it could not be loaded from the hub: {reason}",
        "Check the spelling and the network (HF_HUB_OFFLINE must not be 1; a private or gated model needs "
        "`hf auth login`), or, on a machine with network, run "
        f"`hf download {source} --local-dir FOLDER`, copy FOLDER here and give its path.",
    )


def _check_weights_fit(
    source: str, head: str, model: PreTrainedModel, info: LoadingInfo, allow_new_head: bool
) -> None:
    """Sort what the checkpoint lacks into body (refused), pooler and head (by `allow_new_head`)."""
    shapes = {name: (tuple(found), tuple(expected)) for name, found, expected in info["mismatched_keys"]}
    lacking = sorted(set(info["missing_keys"]) | set(shapes))
    body = [name for name in lacking if _in_body(name, head, model)]
    if body:
        name = body[0]
        what = "is missing from the weights"
        if name in shapes:
            what = f"has the shape {shapes[name][0]}; config.json needs {shapes[name][1]}"
        raise UserError(
            f"The weights in {source} do not fit its config.json: {name} {what}"
            + (f" (and {len(body) - 1} more)." if len(body) > 1 else "."),
            "Give the config.json and model.safetensors of the same checkpoint.",
        )
    if head == "feature-extraction":
        # Sentence embeddings are pooled from the last hidden states: a pooler that the checkpoint
        # never had would only hold random numbers.
        if lacking:
            model.pooler = None
        return
    if not lacking or allow_new_head:
        return
    if shapes:
        found, expected = (shape[0] for shape in next(iter(shapes.values())))
        raise UserError(
            f"The {head} head of {source} has {found} labels; {expected} are needed for this task.",
            "Use the task it was trained on, or fine-tune it first: python -m mrem_deploy.finetune --help.",
        )
    raise UserError(
        f"{source} has no trained {head} head ({', '.join(lacking)} would be random numbers).",
        "Fine-tune it for the task first: python -m mrem_deploy.finetune --help.",
    )


def _in_body(name: str, head: str, model: PreTrainedModel) -> bool:
    """Whether a weight belongs to the encoder; a pooler counts as head, because it is trained with it."""
    if "pooler" in name.split("."):
        return False
    return head == "feature-extraction" or name.startswith(f"{model.base_model_prefix}.")


def _check_finite(source: str, model: PreTrainedModel) -> None:
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise UserError(
                f"The weights in {source} are broken: {name} has {bad} NaN or Inf among {tensor.numel()}.",
                "Use a checkpoint from before the training diverged, or download the file again.",
            )


def _load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        raise _unreadable(source, error) from error
    except Exception as error:  # tokenizers raises bare Exception for a broken tokenizer.json
        raise UserError(
            f"The tokenizer of {source} cannot be loaded: {_first_line(error)}",
            "Put the tokenizer files that the model was trained with into the folder.",
        ) from error


def _first_line(error: Exception) -> str:
    """The cause of a validation error, else its first line; transformers' messages run to paragraphs."""
    return (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No load report and no progress bars of transformers: we report what matters."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
