"""Runs one ONNX model by nothing but onnxruntime and NumPy: MODEL INPUTS.npz ANSWERS.npy."""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime

model, inputs, answers = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
given = np.load(inputs)
print(onnxruntime.__version__)
np.save(answers, session.run(None, {entry.name: given[entry.name] for entry in session.get_inputs()})[0])
