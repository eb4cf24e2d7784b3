"""`mrem VERB …`: the same verbs as `python -m mrem_deploy.VERB …`."""

from __future__ import annotations

import importlib
import sys

from mrem_deploy.base import cli

VERBS = {
    "quantize": "a fine-tuned encoder in, a low-bit one with its proof out",
    "export": "a result folder to packed ONNX",
    "validate": "an exported ONNX model beside the models it came from, with a verdict",
    "finetune": "full-precision fine-tuning of any supported task",
    "benchmark": "memory and speed of training, measured on this machine",
    "reproduce": "the paper's experiments on your model, its figures beside yours",
    "doctor": "what this machine has, which kernels will run, and what to install",
}


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    lines = [f"  {verb:<12}{what}" for verb, what in VERBS.items()]
    usage = "usage: mrem VERB [options]\n\n" + "\n".join(lines) + "\n\n`mrem VERB --help` tells more"
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
        return 0
    if arguments[0] not in VERBS:
        print(
            f"error: unknown verb {arguments[0]!r}; expected one of {', '.join(VERBS)}\n\n{usage}",
            file=sys.stderr,
        )
        return cli.EXIT_USER_ERROR
    # These are packages: their verb stands in their __main__.
    inner = ".__main__" if arguments[0] in ("export", "reproduce") else ""
    module = importlib.import_module(f"mrem_deploy.{arguments[0]}{inner}")
    return cli.run(module.main, arguments[1:])


if __name__ == "__main__":
    raise SystemExit(main())
