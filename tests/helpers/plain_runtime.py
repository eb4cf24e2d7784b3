"""Runs one ONNX model by nothing but onnxruntime and NumPy: MODEL INPUTS.npz ANSWERS.npy [LIBRARY]."""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime

model, inputs, answers, *libraries = sys.argv[1:]
print(onnxruntime.__version__)
options = onnxruntime.SessionOptions()
for library in libraries:
    options.register_custom_ops_library(library)
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
given = np.load(inputs)
np.save(answers, session.run(None, {entry.name: given[entry.name] for entry in session.get_inputs()})[0])
