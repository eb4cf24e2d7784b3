"""`mrem VERB …`: the same as `python -m mrem_deploy.VERB …`."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

from mrem_deploy.base import cli


@dataclass(frozen=True)
class Verb:
    """A command: what it does, the module with its `main`, and whether it has --resume."""

    what: str
    module: str
    resumes: bool = False


VERBS = {
    "quantize": Verb(
        "quantize a fine-tuned model, measure it and export it to ONNX", "mrem_deploy.quantize", True
    ),
    "export": Verb("write a quantized model as ONNX", "mrem_deploy.export.__main__"),
    "web": Verb("write a page on which a quantized model runs in the browser", "mrem_deploy.web.__main__"),
    "validate": Verb("compare an exported ONNX model with the original", "mrem_deploy.validate"),
    "verify": Verb("check a result folder for damage", "mrem_deploy.verify"),
    "beir": Verb("make a retrieval set in BEIR's layout from SQuAD", "mrem_deploy.data.from_squad"),
    "finetune": Verb("fine-tune a model in full precision on a task", "mrem_deploy.finetune", True),
    "benchmark": Verb(
        "measure latency, size, kernels, and the time and memory of training", "mrem_deploy.benchmark"
    ),
    "reproduce": Verb("repeat the paper's experiments on your model", "mrem_deploy.reproduce.__main__"),
    "doctor": Verb("show what this machine has, what will run and what to install", "mrem_deploy.doctor"),
}
EXAMPLES = """\
examples:
  mrem quantize                                  (the built-in example; takes minutes)
  mrem quantize --model my-bert-sst2 --task sst2 --data glue/SST-2 --out result
  mrem validate result
  mrem verify result
  mrem benchmark latency result
"""


def usage() -> str:
    lines = [f"  {name:<12}{verb.what}" for name, verb in VERBS.items()]
    return (
        "usage: mrem VERB [options]\n\n"
        + "\n".join(lines)
        + f"\n\n{EXAMPLES}\n`mrem VERB --help` lists the options of a verb."
    )


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] not in VERBS:
        print(
            f"error: unknown verb {arguments[0]!r}; expected one of {', '.join(VERBS)}\n\n{usage()}",
            file=sys.stderr,
        )
        return cli.EXIT_USER_ERROR
    verb = VERBS[arguments[0]]

    def call(rest: list[str] | None) -> int:
        return int(
            importlib.import_module(verb.module).main(rest)
        )  # may import torch: after cli.run's settings

    return cli.run(call, arguments[1:], resumes=verb.resumes)


if __name__ == "__main__":
    raise SystemExit(main())
