"""The guard in front of lookups: a negative id is an error.

ONNX's Gather counts negative rows from the end of the table, so −1 would silently be the last token.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mrem_deploy.export.builder import Builder
from mrem_deploy.export.profiles import RUNTIME

LOOKED_UP = ("input_ids", "token_type_ids")  # inputs that are rows of tables
NOWHERE = 2**31 - 1  # a row that no table has


def refuse_negative_ids(build: Builder, graph: ir.Graph) -> None:
    """Let everything that reads ids, besides their shape, see a row that no table has for each below 0.

    Note: BitwiseAnd with 2^63 − 1 is one operator instead of two, but it turns −2^63 into 0, and not every
    runtime has it.
    """
    build.anchor = next(iter(graph))
    for ids in graph.inputs:
        # Operators of the runtime check what they look up themselves, and so do the functions behind them.
        readers = [use for use in ids.uses() if use.node.op_type != "Shape" and use.node.domain != RUNTIME]
        if ids.name not in LOOKED_UP or not readers:
            continue
        zero, nowhere = (
            build.constant(number, np.int64, f"ids.{name}")
            for name, number in (("zero", 0), ("nowhere", NOWHERE))
        )
        negative = build.op("Less", ids, zero, name=f"{ids.name}.negative")
        checked = build.op("Where", negative, nowhere, ids, name=f"{ids.name}.checked")
        checked.type, checked.shape = ids.type, ids.shape
        for use in readers:
            use.node.replace_input_with(use.idx, checked)
