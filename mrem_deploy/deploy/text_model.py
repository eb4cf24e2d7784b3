"""What an embedder and a cross-encoder have in common: a result's ONNX model, its tokenizer, and batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import trange

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import path_of
from mrem_deploy.deploy import runtime
from mrem_deploy.export.origin import origin_of
from mrem_deploy.models import gate
from mrem_deploy.models.loading import load_tokenizer
from mrem_deploy.models.sentence_files import SentenceFiles, sentence_files
from mrem_deploy.quant.artifact import check_all_but_tensors

PROFILE = "ort-cpu"
# Architectures whose positions begin after the padding index.
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "mpnet")
LOGGER = logging.getLogger("mrem_deploy")

Tokens = Mapping[str, np.ndarray]


class TextModel:
    """One ONNX model of a result folder in onnxruntime.

    profile: which of the folder's ONNX files; model_file: or a file by name.
    threads: of onnxruntime; 0: its choice. provider: onnxruntime's, such as cpu or cuda.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        profile: str = PROFILE,
        model_file: str | None = None,
        threads: int = 0,
        provider: str = "cpu",
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        kind: str,
    ) -> None:
        self.folder = path_of("the result folder", folder)
        self._config = gate.read_result_config(self.folder) if self.folder.is_dir() else {}
        path = _file_of(self.folder, profile, model_file)
        _check_digests(self.folder, path, named=model_file is not None)
        self.files: SentenceFiles = sentence_files(self.folder)
        if self.files.files and self.files.kind != kind:
            raise UserError(
                f"{self.folder} is a {self.files.kind}, not a {kind}",
                "use mrem_deploy.sentence_transformer for embedders and cross_encoder for scores of pairs",
            )
        self.tokenizer = load_tokenizer(self.folder)
        self.tokenizer.model_max_length = min(self.tokenizer.model_max_length, _positions(self._config))
        if self.files.max_seq_length is not None:
            self.tokenizer.model_max_length = self.files.max_seq_length
        where = runtime.placement(provider, path, 32, self.tokenizer.model_max_length)
        self._session = runtime.open_session(path, threads, where)
        self.prompts = {**self.files.prompts, **(prompts or {})}
        self.default_prompt_name = default_prompt_name or self.files.default_prompt
        if self.default_prompt_name is not None and self.default_prompt_name not in self.prompts:
            raise ValueError(
                f"Default prompt name '{self.default_prompt_name}' not found in the configured prompts "
                f"dictionary with keys {list(self.prompts)!r}."
            )

    @property
    def max_seq_length(self) -> int:
        """Tokens at most; longer texts are cut."""
        return int(self.tokenizer.model_max_length)

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self.tokenizer.model_max_length = value

    def get_max_seq_length(self) -> int:
        return self.max_seq_length

    def _prompt(self, prompt: str | None, prompt_name: str | None) -> str | None:
        """The prompt of a call: itself, by its name, or the default one."""
        if prompt is not None:
            if prompt_name is not None:
                LOGGER.warning("both prompt and prompt_name are given; prompt_name is ignored")
            return prompt
        name = prompt_name if prompt_name is not None else self.default_prompt_name
        if name is not None and name not in self.prompts:
            raise ValueError(
                f"Prompt name '{name}' not found in the configured prompts dictionary with keys "
                f"{list(self.prompts)!r}."
            )
        return None if name is None else self.prompts[name]

    def _tokens(self, inputs: Sequence[Any], prompt: str | None) -> Tokens:
        """Texts, or pairs of them, as padded ids; a prompt is put in front of the first text."""
        front = prompt or ""
        if isinstance(inputs[0], str):
            texts: tuple[list[str], ...] = ([front + text for text in inputs],)
        else:
            texts = ([front + pair[0] for pair in inputs], [pair[1] for pair in inputs])
        tokens = self.tokenizer(*texts, padding=True, truncation="longest_first", return_tensors="np")
        return {name: tokens[name] for name in tokens}

    def _outputs(
        self,
        inputs: Sequence[Any],
        prompt: str | None,
        batch_size: int,
        show_progress_bar: bool | None,
        length: Callable[[Any], int],
    ) -> Iterator[tuple[np.ndarray, Tokens, list[np.ndarray]]]:
        """In batches from the longest input to the shortest: (places, tokens, the model's outputs)."""
        if batch_size <= 0:
            raise ValueError(f"batch_size must be a positive integer, got {batch_size}.")
        if show_progress_bar is None:
            show_progress_bar = LOGGER.getEffectiveLevel() in (logging.INFO, logging.DEBUG)
        order = np.argsort([-length(one) for one in inputs], kind="stable")
        for start in trange(0, len(order), batch_size, desc="Batches", disable=not show_progress_bar):
            places = order[start : start + batch_size]
            tokens = self._tokens([inputs[i] for i in places], prompt)
            yield places, tokens, runtime.run_batch(self._session, tokens)


def check_here(device: Any, pool: Any, unknown: Mapping[str, Any], verb: str) -> None:
    """Refuse devices, pools of processes and options that sentence-transformers has and these models lack."""
    if device is not None and str(device) != "cpu":
        raise ValueError(
            f"{verb}: the device is chosen when the model is opened (provider=…); got {device!r}"
        )
    if pool is not None:
        raise ValueError(f"{verb}: there are no pools of processes; onnxruntime uses the cores (threads=…)")
    if unknown:
        raise ValueError(
            f"{verb} has been called with arguments that this model does not use: {list(unknown)}"
        )


def as_list(inputs: Any) -> list[Any]:
    if isinstance(inputs, np.ndarray):
        return list(inputs.tolist())
    return inputs if isinstance(inputs, list) else list(inputs)


def _positions(config: Mapping[str, Any]) -> int:
    """How many tokens the model reads; a large number if positions are computed."""
    most = config.get("max_position_embeddings")
    if not isinstance(most, int):
        return 10**9
    offset = int(config.get("pad_token_id") or 0) + 1 if config["model_type"] in OFFSET_POSITIONS else 0
    return most - offset


def _check_digests(folder: Path, path: Path, named: bool) -> None:
    """Refuse a result, and an ONNX file of it, that is not as it was written.

    A file that the caller has `named` may be without digests, as other tools write it.
    """
    written = check_all_but_tensors(folder)
    origin = origin_of(path)
    if origin.changed is None and written is not None and not named:
        raise UserError(
            f"{path} lacks the digests with which it was exported",
            f"export it again: mrem export {folder}; or name a file of another tool: model_file=…",
        )
    if origin.changed:
        raise UserError(
            f"{path} has changed since it was exported",
            f"copy it again, or export it again: mrem export {folder}",
        )
    if written is not None and origin.result not in (None, written):
        raise UserError(
            f"{path} was exported from another result than the one in {folder}",
            f"export it again: mrem export {folder}",
        )


def _file_of(folder: Path, profile: str, model_file: str | None) -> Path:
    from mrem_deploy.export.profiles import PROFILES, find_profile

    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", "give the --out folder of mrem quantize")
    name = find_profile(profile).file if model_file is None else model_file
    path = gate.inside(folder, name)
    if not path.is_file():
        found = [known.file for known in PROFILES.values() if (folder / known.file).is_file()]
        raise UserError(
            f"{folder} has no {name}; it has {', '.join(found) or 'no ONNX model'}",
            f"write it first: mrem export {folder} --profile {profile}",
        )
    return path
