"""A model in llama.cpp, through the C interface of the package llama-cpp-python.

As `Llama.embed` of that package does, sentences go in together until a batch is full (512 tokens, its
default), without padding. Token types are all 0: llama.cpp has no others.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from mrem_deploy.benchmarks.latency.heads import read_head
from mrem_deploy.benchmarks.latency.messages import LoadRequest, Sentences

TOKENS = 512  # of a batch
MOST_SENTENCES = 64  # in a batch


class LlamaCpp:
    def __init__(self, model: LoadRequest) -> None:
        import llama_cpp

        self.api = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        path = Path(model["path"])
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp does not read {path.name}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = TOKENS
        settings.n_seq_max = MOST_SENTENCES
        settings.n_threads = settings.n_threads_batch = model["threads"]
        settings.embeddings = True
        settings.pooling_type = llama_cpp.LLAMA_POOLING_TYPE_CLS
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError("llama.cpp does not start")
        self.width = int(llama_cpp.llama_model_n_embd(self.model))
        self.head = read_head(path.parent)

    def prepare(self, sentences: Sentences) -> list[Any]:
        """Full batches in the order of the sentences."""
        parts: list[list[list[int]]] = [[]]
        for ids in sentences["ids"]:
            if parts[-1] and (
                sum(map(len, parts[-1])) + len(ids) > TOKENS or len(parts[-1]) == MOST_SENTENCES
            ):
                parts.append([])
            parts[-1].append(ids)
        return [self._batch(part) for part in parts]

    def _batch(self, rows: list[list[int]]) -> tuple[Any, int]:
        # The context cannot take more at once, and would end the process.
        assert sum(map(len, rows)) <= TOKENS, f"llama.cpp is set up for at most {TOKENS} tokens"
        batch = self.api.llama_batch_init(sum(map(len, rows)), 0, 1)
        at = 0
        for sentence, ids in enumerate(rows):
            for position, token in enumerate(ids):
                batch.token[at], batch.pos[at] = token, position
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sentence
                batch.logits[at] = 1
                at += 1
        batch.n_tokens = at
        return batch, len(rows)

    def run(self, prepared: list[Any]) -> list[np.ndarray]:
        first = []
        for batch, sentences in prepared:
            if self.api.llama_encode(self.context, batch):
                raise RuntimeError("llama.cpp could not run the batch")
            for sentence in range(sentences):
                values = self.api.llama_get_embeddings_seq(self.context, sentence)
                first.append(np.ctypeslib.as_array(values, (self.width,)).copy())
        return [self.head.of_first(np.stack(first))]

    def node_times(self, runs: int) -> dict[str, float]:
        return {}
