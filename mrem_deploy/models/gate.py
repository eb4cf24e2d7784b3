"""The gate in front of every folder that is read: source models, fine-tuned models, results, checkpoints.

Nothing in a folder decides which code runs or which other files are read. Seven rules:

1. weights are safetensors; a pickle is never opened;
2. a name in an index is the name of a file in the folder, never a path;
3. a link that leads out of the folder is not followed (those of the Hugging Face cache stay in it);
4. `auto_map` is refused: code of a checkpoint is never run, and nobody is asked whether to run it;
5. so are the other keys of config.json by which transformers would fetch kernels, read other files or
   change its layers: see `REFUSED` and `PLAIN_ATTENTION`;
6. `model_type` is one of our architectures;
7. sizes are plausible by themselves and next to the bytes of the weights, before anything is built.

Note: `trust_remote_code=False` alone is not enough. transformers sets every key of config.json as an
attribute, so `_attn_implementation` there wins over the argument of the same meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.strict_json import read_object
from mrem_deploy.models import packed
from mrem_deploy.models.architectures import ARCHITECTURES, CONVOLUTION, check_model_type

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER_CONFIG, ADAPTER = "tokenizer_config.json", "adapter_config.json"
COPY_AGAIN = "Copy or download the complete model folder."

PLAIN_ATTENTION = (None, "eager", "sdpa")
ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
# Keys of config.json that make transformers load or change something -> what to do instead.
REFUSED = {
    "transformers_weights": "Rename the weights to model.safetensors and remove the key.",
    "fusion_config": "Remove the key.",
    "distributed_config": "Remove the key.",
    "per_layer_config": "Use a checkpoint whose layers are all alike.",
    "kernel_config": "Remove the key.",
    "_auto_class": "Remove the key.",
    "conv_kernel_size": f"{CONVOLUTION[:1].upper()}{CONVOLUTION[1:]}.",
}
# The largest encoders have 48 layers of width 4,096 and 250,000 tokens: room for ten times that.
LARGEST = {
    "num_hidden_layers": 500, "n_layers": 500, "num_layers": 500, "num_decoder_layers": 500,
    "hidden_size": 50_000, "dim": 50_000, "d_model": 50_000, "embedding_size": 50_000,
    "intermediate_size": 200_000, "hidden_dim": 200_000, "d_ff": 200_000,
    "num_attention_heads": 1_000, "n_heads": 1_000, "num_heads": 1_000, "num_key_value_heads": 1_000,
    "head_dim": 10_000, "d_kv": 10_000,
    "sliding_window": 1_000_000,
    "vocab_size": 5_000_000,
    "max_position_embeddings": 1_000_000,
    "type_vocab_size": 1_000,
    "relative_attention_num_buckets": 10_000, "relative_attention_max_distance": 1_000_000,
    "max_relative_positions": 1_000_000, "position_buckets": 10_000,
    "attention_head_size": 50_000, "pooler_hidden_size": 50_000,
    "num_labels": 100_000,
}  # fmt: skip
LEAST = {"type_vocab_size": 0, "max_relative_positions": -1, "position_buckets": -1}  # the others: 1
# Computed, or relative, or not always there.
WITHOUT_POSITIONS = (
    *("modernbert", "deberta-v2", "nomic_bert", "gte", "eurobert"),
    *("qwen3", "gemma3_text", "t5"),
)
SOURCE_BITS = 8  # the fewest bits of a parameter in a full-precision checkpoint
RESULT_BITS = 2  # and in a result


def check_model_folder(folder: Path) -> dict[str, Any]:
    """Refuse a folder with a full-precision model that breaks a rule; returns the content of config.json."""
    check_links(folder)
    config = read_config(folder)
    weights = _weight_files(folder)
    strange = [path.name for path in folder.glob("shard-*-model-*-of-*.safetensors")]
    if strange:
        raise UserError(
            f"{folder} is a distributed checkpoint ({strange[0]}).",
            "Save it as one model: model.save_pretrained after loading it in transformers.",
        )
    _check_adapter(folder)
    check_tokenizer(folder)
    if weights:
        check_bytes(folder / CONFIG, config, sum(path.stat().st_size for path in weights), SOURCE_BITS)
    return config


def check_hub_model(name: str) -> None:
    """The same rules for a hub id, as far as they concern it; an OSError if the hub cannot be reached."""
    from transformers.utils import cached_file

    def fetched(file: str, **options: Any) -> Path | None:
        place = cached_file(name, file, **options)
        return None if place is None else Path(place)

    optional = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    path = fetched(CONFIG)
    assert path is not None, "cached_file raises for what is required"
    config = check_config(read_object(path, "Use another checkpoint."), path)
    adapter, index, own, weights = (
        fetched(file, **optional) for file in (ADAPTER, INDEX, TOKENIZER_CONFIG, WEIGHTS)
    )
    if adapter is not None:
        raise _adapter_refused(name)
    if index is not None:
        _shard_names(index)
    if own is not None:
        _check_tokenizer_config(own)
    if weights is not None:
        check_bytes(path, config, weights.stat().st_size, SOURCE_BITS)


# -- names -------------------------------------------------------------------------------------------------


def check_links(folder: Path) -> None:
    """Refuse a folder with a file that is really elsewhere."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.is_dir():
            inside(folder, path.name)


def existing(path: Path, remedy: str) -> Path:
    """The path of a file that is there and inside its folder; a pipe or a device is none."""
    inside(path.parent, path.name)
    if not path.is_file():
        raise UserError(f"{path} is {'not a file' if path.exists() else 'missing'}", remedy)
    return path


def inside(folder: Path, name: str) -> Path:
    """The path of a file of the folder; a UserError if the name or a link leads out of it."""
    _check_name(folder, name)
    return _not_linked_out(folder, folder / name)


def below(folder: Path, name: str) -> Path:
    """The same for a file that may be in a folder of the folder, such as 1_Pooling/config.json."""
    for part in name.split("/"):
        _check_name(folder, part)
    return _not_linked_out(folder, folder / name)


def _check_name(folder: Path, name: str) -> None:
    plain = PurePosixPath(name).name == name and PureWindowsPath(name).name == name
    if not plain or name in ("", ".", "..") or "\0" in name:
        raise UserError(
            f"{folder} names the file {name!r}, which is not the name of a file in it.",
            "Put all files of the model into one folder.",
        )


def _not_linked_out(folder: Path, path: Path) -> Path:
    try:
        real = path.resolve(strict=path.is_symlink())
        allowed = any(real.is_relative_to(root) for root in _roots(folder.resolve()))
    except (OSError, RuntimeError):  # a link to itself or to nothing
        allowed = False
    if not allowed:
        raise UserError(
            f"{path} is a link that leads out of its folder.",
            "Replace the link by a copy of the file: cp -rL FOLDER NEW_FOLDER.",
        )
    return path


def _roots(folder: Path) -> Iterator[Path]:
    """Where the files of a folder may be: in it, or among the blobs of its Hugging Face cache."""
    yield folder
    repository = folder.parent.parent
    if folder.parent.name == "snapshots" and repository.name.startswith(("models--", "datasets--")):
        yield repository / "blobs"


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers will read the weights from; none if it will refuse the folder."""
    shards = _shard_names(folder / INDEX) if (folder / INDEX).is_file() else []
    if (folder / WEIGHTS).is_file():
        return [inside(folder, WEIGHTS)]
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} has no {missing[0]}, which {INDEX} names.", COPY_AGAIN)
    return [inside(folder, name) for name in shards]


def _shard_names(path: Path) -> list[str]:
    """The files that an index names, each by a plain name of a safetensors file."""
    parts = read_object(path, COPY_AGAIN).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts.values()):
        raise UserError(f"{path} has no weight_map from names of tensors to files.", COPY_AGAIN)
    names = sorted(set(parts.values()))
    for name in names:
        inside(path.parent, name)
        if not name.endswith(".safetensors"):
            raise UserError(
                f"{path} names {name}, which is not a safetensors file. Only safetensors are loaded.",
                "Save the model again with model.save_pretrained.",
            )
    return names


def _check_adapter(folder: Path) -> None:
    if (folder / ADAPTER).exists():
        raise _adapter_refused(str(folder))


def _adapter_refused(source: str) -> UserError:
    return UserError(
        f"{source} holds an adapter ({ADAPTER}), not only a model.",
        "Merge it into the model first: PeftModel.merge_and_unload, then save_pretrained.",
    )


# -- config.json -------------------------------------------------------------------------------------------


def read_config(folder: Path, remedy: str = COPY_AGAIN) -> dict[str, Any]:
    """The content of config.json, checked by rules 4 to 7 as far as it alone decides."""
    path = inside(folder, CONFIG)
    return check_config(read_object(path, remedy), path)


def read_result_config(folder: Path) -> dict[str, Any]:
    """The same of a result, without what it says to transformers."""
    path = inside(folder, CONFIG)
    return check_config(packed.without_keys(read_object(path, COPY_AGAIN)), path)


def check_config(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The content itself, if nothing in it is refused; `path` is where it was read."""
    if content.get("auto_map"):
        raise _own_code(path, content.get("model_type"))
    check_model_type(content.get("model_type"), path)
    if content.get("quantization_config"):
        raise UserError(
            f"{path} has a quantization_config: the model is quantized already.",
            "Give the full-precision model it was made from.",
        )
    for key in ATTENTION_KEYS:
        if not any(content.get(key) is plain or content.get(key) == plain for plain in PLAIN_ATTENTION):
            raise UserError(
                f"{path} sets {key} to {content[key]!r}; kernels named by a checkpoint are never loaded.",
                f"Remove {key} from config.json.",
            )
    for key, remedy in REFUSED.items():
        if content.get(key):
            raise UserError(f"{path} sets {key}, which is not supported.", remedy)
    _check_names(content, path)
    _check_sizes(content, path)
    return content


def _own_code(path: Path, model_type: Any = None) -> UserError:
    remedy = "Use a checkpoint of an architecture that transformers itself knows."
    if model_type == "new":  # Alibaba's GTE models
        remedy = "Use the same model as transformers has it, with the model_type gte."
    elif isinstance(model_type, str) and model_type in ARCHITECTURES:
        remedy = (
            f"transformers has its own {model_type}, which may read these weights: remove auto_map from the "
            "config.json of a local copy and give that."
        )
    return UserError(
        f"{path} has an auto_map: the checkpoint needs its own code to load; code from a checkpoint is "
        "never run here.",
        remedy,
    )


def _check_names(content: Mapping[str, Any], path: Path) -> None:
    """transformers makes every key an attribute: one that replaces a method would break its own code."""
    from transformers import PretrainedConfig

    for key in content:
        own = getattr(PretrainedConfig, key, None)
        fixed = isinstance(own, property) and own.fset is None
        if key.startswith("__") or callable(own) or fixed:
            raise UserError(f"{path} has a key {key!r}, which no configuration has.", "Remove the key.")


def _check_sizes(content: Mapping[str, Any], path: Path) -> None:
    for key, largest in LARGEST.items():
        value = content.get(key)
        least = LEAST.get(key, 1)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
            raise UserError(
                f"{path} sets {key} to {str(value)[:40]}; a whole number from {least} to {largest:,} is "
                "expected.",
                "Give the config.json of the checkpoint as it was published.",
            )
    for key in ("id2label", "label2id"):
        if isinstance(content.get(key), Collection) and len(content[key]) > LARGEST["num_labels"]:
            raise UserError(
                f"{path} has {len(content[key]):,} entries in {key}; at most {LARGEST['num_labels']:,} are "
                "expected.",
                "Give the config.json of the checkpoint as it was published.",
            )


def least_parameters(content: Mapping[str, Any]) -> int:
    """How many numbers the weights have at least, by the sizes that config.json names."""

    def size(*names: str) -> int:
        return max((content[name] for name in names if content.get(name)), default=0)

    width, inner = size("hidden_size", "dim", "d_model"), size("intermediate_size", "hidden_dim", "d_ff")
    table = size("vocab_size")
    if content.get("model_type") not in WITHOUT_POSITIONS:
        table += size("max_position_embeddings")
    heads, head_width = size("num_attention_heads", "n_heads", "num_heads"), size("head_dim", "d_kv")
    queries = heads * head_width or width  # heads may be wider than their share of the hidden size,
    keys = size("num_key_value_heads") * (head_width or width // max(heads, 1)) or queries  # keys fewer
    block = 2 * width * (queries + keys) + 2 * width * inner
    blocks = size("num_hidden_layers", "n_layers", "num_layers")
    return table * (size("embedding_size") or width) + blocks * block


def check_bytes(path: Path, content: Mapping[str, Any], found: int, bits: int) -> None:
    """Refuse a config.json that describes more than the weight files can hold."""
    needed = least_parameters(content) * bits // 8
    if needed > found:
        raise UserError(
            f"{path} describes at least {least_parameters(content):,} parameters; the weights next to it "
            f"have only {found:,} bytes. They do not fit.",
            "Give the config.json and model.safetensors of the same checkpoint.",
        )


# -- the tokenizer -----------------------------------------------------------------------------------------


def check_tokenizer(folder: Path) -> None:
    """Refuse a tokenizer that needs its own code or files of another folder."""
    if (folder / TOKENIZER_CONFIG).is_file():
        _check_tokenizer_config(inside(folder, TOKENIZER_CONFIG))


def _check_tokenizer_config(path: Path) -> None:
    content = read_object(path, "Put the tokenizer files that the model was trained with into the folder.")
    if content.get("auto_map"):
        raise _own_code(path)
    names = content.get("fast_tokenizer_files") or []
    for name in names if isinstance(names, list) else [names]:
        inside(path.parent, str(name))
