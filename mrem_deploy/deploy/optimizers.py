"""The names of onnxruntime's graph optimizers.

onnxruntime ignores a name in `disabled_optimizers` that it does not know, and has no list of those it knows.
Its verbose log names every optimizer that it tries. So a session of a tiny model is opened in another
process, where the log can be read. Rewrite rules run inside one optimizer and are not in the log, so they are
listed here.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

from mrem_deploy.base.errors import UserError

# onnxruntime/core/optimizer/graph_transformer_utils.cc, GenerateRewriteRules
REWRITE_RULES = frozenset(
    {
        *(
            "EliminateIdentity",
            "EliminateSlice",
            "EliminateDropout",
            "UnsqueezeElimination",
            "NoopElimination",
        ),
        *("ExpandElimination", "CastElimination", "CastChainElimination", "PreShapeNodeElimination"),
        *("DivMulFusion", "FuseReluClip", "GemmSumFusion", "GemmTransposeFusion", "NotWhereFusion"),
        *("ConvAddFusion", "ConvMulFusion", "ConvBNFusion", "PadFusion", "LabelEncoderFusion"),
        *("MatMul_BatchNormalization_Fusion", "ClipQuantRewrite", "ReluQuantRewrite"),
    }
)
VERBOSE = 0
_SESSION = """
import sys
import onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = int(sys.argv[1])
onnxruntime.InferenceSession(sys.stdin.buffer.read(), options, providers=["CPUExecutionProvider"])
"""


def check_optimizers(names: Sequence[str]) -> None:
    """Refuse names that the installed onnxruntime would ignore."""
    known = known_optimizers() if names else frozenset()
    for name in names if known else ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise UserError(
                f"disabled_optimizers has {name!r}, which is no optimizer of the installed onnxruntime",
                f"did you mean {near[0]}?" if near else f"choose among {', '.join(sorted(known))}",
            )


@cache
def known_optimizers() -> frozenset[str]:
    """Empty if they cannot be found out: onnx is missing, or this onnxruntime words its log differently."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        return frozenset()
    done = subprocess.run(
        [sys.executable, "-c", _SESSION, str(VERBOSE)], input=_tiny_model(), capture_output=True, check=False
    )
    log = (done.stdout + done.stderr).decode("utf-8", "replace")
    found = frozenset(re.findall(r"GraphTransformer (\w+) modified", log))
    return found | REWRITE_RULES if done.returncode == 0 and found else frozenset()


def _tiny_model() -> bytes:
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "tiny", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content
