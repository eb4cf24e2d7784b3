"""Loads result folders by optimum-onnx and compares with plain onnxruntime: FOLDER …

Runs in an environment of its own (`make optimum`), because optimum-onnx needs an older transformers.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime
from optimum.onnxruntime import ORTModelForSequenceClassification
from transformers import AutoTokenizer

SENTENCES = ["the film was very good", "a dull plot and a poor actor", "lovely"]

failed = False
versions = ", ".join(f"{name} {version(name)}" for name in ("optimum-onnx", "transformers", "onnxruntime"))
print(versions)
for folder in map(Path, sys.argv[1:]):
    model, tokenizer = (
        ORTModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    by_optimum = model(**tokenizer(SENTENCES, padding=True, return_tensors="pt")).logits.numpy()
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="np")
    inputs = {entry.name: tokens[entry.name].astype(np.int64) for entry in session.get_inputs()}
    plain = session.run(None, inputs)[0]
    same = bool((by_optimum.argmax(1) == plain.argmax(1)).all())
    failed |= not same
    labels = [model.config.id2label[int(i)] for i in by_optimum.argmax(1)]
    apart = np.abs(by_optimum - plain).max()
    print(f"{'passed' if same else 'FAILED'} {folder}: {labels}, logits differ by {apart:.1e}")
sys.exit(failed)
