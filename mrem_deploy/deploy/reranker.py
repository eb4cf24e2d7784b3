"""`mrem_deploy.cross_encoder(folder)`: a result that scores pairs of texts, in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrem_deploy.base.errors import UserError
from mrem_deploy.deploy.text_model import PROFILE, TextModel, as_list, check_here
from mrem_deploy.models.activation import SCORES, score_activation
from mrem_deploy.models.sentence_files import RERANKER

Activation = Callable[[torch.Tensor], torch.Tensor]


class Reranker(TextModel):
    """`predict` and `rank` as in sentence-transformers, without it, and without a model in torch."""

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
        activation_fn: Activation | None = None,
    ) -> None:
        super().__init__(
            folder, profile=profile, model_file=model_file, threads=threads, provider=provider,
            prompts=prompts, default_prompt_name=default_prompt_name, kind=RERANKER,
        )  # fmt: skip
        outputs = [(entry.name, entry.shape) for entry in self._session.get_outputs()]
        if [name for name, _ in outputs] != ["logits"] or len(outputs[0][1]) != 2:
            raise UserError(
                f"{self.folder} holds no model that scores texts (its outputs are "
                f"{', '.join(name for name, _ in outputs)})",
                "give a result of --task reranking or of another classification",
            )
        labels = self._config.get("id2label")
        self.num_labels = len(labels) if labels else int(self._config.get("num_labels", 2))
        self.activation_fn = (
            activation_fn or SCORES[score_activation(self._config, self.files, self.num_labels)]
        )

    def predict(
        self,
        inputs: Sequence[Any] | Any,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        pool: Any = None,
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """The scores of pairs of texts, with the arguments and results of CrossEncoder.predict."""
        check_here(device, pool, kwargs, "predict")
        single = _is_single(inputs)
        pairs = [as_list(inputs)] if single else as_list(inputs)
        front, activate = self._prompt(prompt, prompt_name), activation_fn or self.activation_fn
        found: list[np.ndarray] = [np.zeros(0)] * len(pairs)
        for places, _, outputs in self._outputs(pairs, front, batch_size, show_progress_bar, _length):
            scores = activate(torch.from_numpy(outputs[0]))
            if self.num_labels == 1 and scores.ndim > 1:
                scores = scores.squeeze(-1)
            if apply_softmax and scores.ndim > 1:
                scores = torch.nn.functional.softmax(scores, dim=1)
            for place, score in zip(places, scores.numpy(), strict=True):
                found[place] = score
        if convert_to_tensor:
            result: Any = torch.from_numpy(np.stack(found)) if found else torch.tensor([])
        elif convert_to_numpy:
            result = np.stack(found) if found else np.array([])
        else:
            result = [torch.as_tensor(score) for score in found]
        return result[0] if single else result

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        device: Any = None,
        pool: Any = None,
        chunk_size: int | None = None,
    ) -> list[dict[str, Any]]:
        """Documents from the best to the worst, each with its place (corpus_id) and score."""
        if self.num_labels != 1:
            raise ValueError(
                f"rank needs a model with one output; this one has {self.num_labels}. Use predict with pairs."
            )
        scores = self.predict(
            [[query, document] for document in documents], prompt_name, prompt, batch_size,
            show_progress_bar, activation_fn, convert_to_tensor=True, device=device, pool=pool,
        ).tolist()  # fmt: skip
        results: list[dict[str, Any]] = []
        for place, score in enumerate(scores):
            text = {"text": documents[place]} if return_documents else {}
            results.append({"corpus_id": place, "score": score, **text})
        return sorted(results, key=lambda found: found["score"], reverse=True)[:top_k]


def cross_encoder(folder: str | Path, **options: Any) -> Reranker:
    """A result that scores pairs of texts, ready to use: `cross_encoder("result").rank(query, passages)`.

    It has the methods of sentence-transformers' CrossEncoder and runs in onnxruntime alone. Options: profile
    or model_file (which ONNX file), threads, provider, prompts, default_prompt_name, activation_fn.
    """
    return Reranker(folder, **options)


def _is_single(inputs: Any) -> bool:
    """Whether the inputs are one pair of texts."""
    if isinstance(inputs, np.ndarray):
        return inputs.size > 0 and inputs.ndim < 2
    return bool(len(inputs)) and not isinstance(inputs[0], list | tuple | np.ndarray)


def _length(pair: Any) -> int:
    return sum(map(len, pair))
