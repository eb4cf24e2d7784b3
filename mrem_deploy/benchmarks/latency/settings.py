"""What the options of `benchmark latency` are read into; loads no runtime and no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import shown


@dataclass(frozen=True)
class Peer:
    """Another runtime: the packages it needs here, and how to install them."""

    packages: tuple[str, ...]
    remedy: str


PEERS = {
    "openvino": Peer(("openvino",), "pip install openvino nncf"),
    "ctranslate2": Peer(("ctranslate2",), "pip install ctranslate2"),
    "llama.cpp": Peer(("llama_cpp", "gguf"), "pip install llama-cpp-python gguf"),
}
INTEGER = "int8"  # attention as the model was trained
ATTENTIONS = (INTEGER, "float")
RIVALS = ("dynamic", "dynamic-per-channel", "static", "static-uint8")  # made by onnxruntime's own quantizers
OPTIONS_SPELLING = "disabled_optimizers=SkipLayerNormFusion, or KEY=VALUE;KEY=VALUE, or none"


@dataclass(frozen=True)
class Shape:
    """Sentences at once × tokens of each."""

    batch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.sequence}"


def check_attention(name: str) -> str:
    """An argparse type."""
    if name not in ATTENTIONS:
        raise UserError(f"--attention: {shown(name)} is unknown", f"choose among {', '.join(ATTENTIONS)}")
    return name


def check_rival(name: str) -> str:
    """An argparse type."""
    if name not in RIVALS:
        raise UserError(f"--rivals: there is no rival {shown(name)}", f"choose among {', '.join(RIVALS)}")
    return name


def read_shapes_or_none(text: str) -> tuple[Shape, ...]:
    """An argparse type: '1x32,8x128', or 'none'."""
    return () if text == "none" else tuple(read_shape(part) for part in text.split(","))


def read_shape(text: str) -> Shape:
    """An argparse type: '8x128'."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})[x×]([1-9][0-9]{0,5})", text)
    if match is None:
        raise UserError(
            f"--shapes: {shown(text)} is not a shape", "write BATCHxTOKENS, for example --shapes 1x32,8x128"
        )
    return Shape(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class RaceSettings:
    """How the models are timed; `vocabulary` and `seed` decide the tokens."""

    shapes: tuple[Shape, ...]
    threads: tuple[int, ...]
    rounds: int
    warmup: int
    loads: int
    vocabulary: int
    seed: int
    profile_nodes: bool = False
    memory_shapes: tuple[Shape, ...] = ()  # each measured in a process of its own
    together: int = 0  # sessions at work at the same time


@dataclass(frozen=True)
class SessionOptions:
    """What differs from onnxruntime's defaults; the text is what the user wrote."""

    text: str
    disabled_optimizers: tuple[str, ...] = ()
    config: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


def parse_session_options(text: str) -> SessionOptions | None:
    """'disabled_optimizers=A,B;session.some_key=1' → the options; 'none' → None."""
    if text == "none":
        return None
    pairs = [part.partition("=") for part in text.split(";")]
    values = {key.strip(): value.strip() for key, _, value in pairs}
    if len(values) != len(pairs) or not all(key and value for key, value in values.items()):
        raise UserError(f"--options {text!r} cannot be read", f"use {OPTIONS_SPELLING}")
    disabled = tuple(
        name.strip() for name in values.pop("disabled_optimizers", "").split(",") if name.strip()
    )
    return SessionOptions(text, disabled, values)
