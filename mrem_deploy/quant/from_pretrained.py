"""The quantizer of transformers that makes `AutoModelFor….from_pretrained("result")` read a result folder.

The model is the one that `mrem_deploy.load` gives, bit for bit, read and checked by the same code. What
transformers makes is only the object: it finds mrem.safetensors, takes nothing from it, and gives all weights
random values, which are then replaced.

Note: imported in the middle of transformers' own import (`register`), so nothing heavy stands at the top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from mrem_deploy.base.errors import UserError
from mrem_deploy.models import packed

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from mrem_deploy.quant.frozen import FrozenModel

IGNORED = ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected")


class MremConfig(QuantizationConfigMixin):
    """The quantization_config in config.json of a result. Everything else stands in mrem.json."""

    def __init__(self, **content: Any) -> None:
        known = packed.KEYS[packed.QUANTIZATION]
        if content != known:
            raise UserError(
                f"This release reads the quantization_config {known}; config.json has {content}.",
                "Use the release of mrem_deploy that wrote it, or copy the entire result folder again.",
            )
        self.quant_method: Any = packed.METHOD
        self.format_version = content["format_version"]


class MremQuantizer(HfQuantizer):
    """What transformers calls, in this order: `validate_environment`, `update_attn_implementation`,
    `_process_model_before_weight_loading`, `_process_model_after_weight_loading`."""

    requires_calibration = True  # it reads quantized models, and makes none

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        devices = device_map.values() if isinstance(device_map, Mapping) else [device_map]
        if any(str(device) not in ("cpu", "None") for device in devices):
            raise UserError(
                f"device_map={device_map!r}: a result is loaded on the CPU.",
                'Leave out device_map and move the model afterwards: model.to("cuda").',
            )

    def update_attn_implementation(self, config: PretrainedConfig) -> PretrainedConfig:
        """The first call that sees the config."""
        asked = getattr(config, "_attn_implementation_internal", None)
        if asked is not None:
            raise UserError(
                f"attn_implementation={asked!r}: the attention of a result is quantized and has its own.",
                "Leave out attn_implementation.",
            )
        from mrem_deploy.quant.artifact import TENSORS

        setattr(config, packed.WEIGHTS, TENSORS)
        return config

    update_tp_plan = update_attn_implementation  # releases before 5.6 have only this one at that place

    def update_ep_plan(self, config: PretrainedConfig) -> PretrainedConfig:
        return config

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        """Read and check everything, before transformers spends time on random weights."""
        import torch

        from mrem_deploy.quant.frozen import FrozenModel

        assert checkpoint_files, "transformers has found mrem.safetensors"
        with torch.device("cpu"):  # transformers calls this under the meta device
            self._frozen = FrozenModel.read(_complete(Path(checkpoint_files[0]).parent))
        _check_class(model, self._frozen)
        own = next(iter(self._frozen.full.values())).dtype
        if model.dtype != own:
            raise UserError(
                f"dtype={model.dtype}: this result was made for {own}.", "Leave out dtype, or give 'auto'."
            )
        for name in IGNORED:  # our tensors have other names than the weights; no report about that
            kind = set if isinstance(getattr(model, name), set) else list
            setattr(model, name, kind(["."]))
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        from mrem_deploy.quant.frozen import fill_layers, fill_shell

        for name in IGNORED:
            delattr(model, name)
        delattr(model.config, packed.WEIGHTS)
        fill_layers(self._frozen, model, fill_shell(self._frozen, model))
        del self._frozen
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        raise UserError("A result cannot be dequantized.", "Load the full-precision model it was made from.")

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def register() -> None:
    """Tell transformers about the quantizer; again is nothing."""
    if packed.METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(packed.METHOD)(MremQuantizer)
        register_quantization_config(packed.METHOD)(MremConfig)


def _check_class(model: PreTrainedModel, frozen: FrozenModel) -> None:
    """Refuse another head, and settings by which its layers would have other shapes."""
    from mrem_deploy.models.loading import auto_class
    from mrem_deploy.quant.integrity import without_memory

    right = without_memory(frozen.config, frozen.head)
    if type(right) is not type(model):
        auto = auto_class(frozen.head, frozen.config.model_type)
        raise UserError(
            f"The result holds a {type(right).__name__}; {type(model).__name__} was asked for.",
            f"Use {auto.__name__}.from_pretrained.",
        )
    wanted, there = dict(_shapes(model)), dict(_shapes(right))
    other = [name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)]
    if other:
        raise UserError(
            f"What was given to from_pretrained changes the shape of {sorted(other)[0]}, which is fixed.",
            "Leave out what changes the model, such as num_labels.",
        )


def _shapes(model: PreTrainedModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, value in model.state_dict().items():
        yield name, tuple(value.shape)


def _complete(folder: Path) -> Path:
    """A folder of the hub's cache gets the files that transformers does not ask for."""
    from mrem_deploy.base.strict_json import read_object
    from mrem_deploy.models import gate
    from mrem_deploy.quant import artifact

    repository = folder.parent.parent
    kind, _, name = repository.name.partition("--")
    if (folder / artifact.MANIFEST).exists() or folder.parent.name != "snapshots" or kind != "models":
        return folder
    from huggingface_hub import hf_hub_download

    def fetch(file: str) -> Path:
        hub_id = name.replace("--", "/")
        return Path(hf_hub_download(hub_id, file, revision=folder.name, cache_dir=repository.parent))

    manifest = read_object(fetch(artifact.MANIFEST), artifact.COPY_AGAIN)
    written = manifest.get(artifact.DIGESTS)
    for file in (written.get("beside") or {}) if isinstance(written, dict) else {}:
        gate.below(folder, file)
        fetch(file)
    return folder
