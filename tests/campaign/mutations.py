"""Random damage to the files of a folder. Each mutation returns in words what it did."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.campaign.graphs import change_graph

DEEP = 4000  # levels of lists in a list
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    3,
    0.5,
    10**12,
    -(10**30),
    float("nan"),
    float("inf"),
    "",
    "x",
    "x" * 10_000,
    "\ud800",
    "\0",
    "../../etc/passwd",
    "/dev/zero",
    "kernels-community/flash-attn",
    [],
    {},
    [[]],
    {"": None},
    ["a", 1, None],
)
PICKLE = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."


def mutate(folder: Path, files: list[str], draw: random.Random) -> str:
    """Damage one file of a folder, or what is in the folder."""
    name = draw.choice(files)
    return f"{name}: {mutate_file(folder / name, draw)}"


def mutate_file(path: Path, draw: random.Random) -> str:
    choices: list[Callable[[Path, random.Random], str]] = [flip, flip, cut, overwrite, grow, FILE_KINDS]
    if path.suffix == ".json":
        choices += [change_json] * 5
    if path.suffix == ".safetensors":
        choices += [change_tensors] * 5
    if path.suffix == ".onnx":
        choices += [change_graph] * 5
    return draw.choice(choices)(path, draw)


# -- bytes -------------------------------------------------------------------------------------------------


def flip(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    place, bit = draw.randrange(len(data)), draw.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place} flipped"


def cut(path: Path, draw: random.Random) -> str:
    data = path.read_bytes()
    length = draw.choice((0, 1, 7, 8, 9, draw.randrange(len(data)), len(data) - 1))
    path.write_bytes(data[:length])
    return f"cut after {length} bytes"


def overwrite(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data))
    length = min(len(data) - place, draw.choice((1, 8, 512, 4096)))
    zeros = draw.random() < 0.5
    data[place : place + length] = bytes(length) if zeros else draw.randbytes(length)
    path.write_bytes(data)
    return f"{length} bytes from {place} on replaced by {'zeros' if zeros else 'noise'}"


def grow(path: Path, draw: random.Random) -> str:
    data = path.read_bytes()
    more = draw.choice((b"\0", b" ", b"\n", b"{}", draw.randbytes(100), data))
    path.write_bytes(data + more if draw.random() < 0.7 else more + data)
    return f"{len(more)} bytes added"


# -- files -------------------------------------------------------------------------------------------------


def FILE_KINDS(path: Path, draw: random.Random) -> str:
    return draw.choice((drop, rename, make_folder, link_loop, link_away, add_pickle, add_index, exchange))(
        path, draw
    )


def drop(path: Path, draw: random.Random) -> str:
    path.unlink()
    return "dropped"


def rename(path: Path, draw: random.Random) -> str:
    other = path.with_name(
        draw.choice((f"{path.name}.bak", f".{path.name}", path.name.upper(), "x\n\x1b[1m"))
    )
    path.rename(other)
    return f"renamed to {other.name!r}"


def make_folder(path: Path, draw: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "replaced by a folder"


def link_loop(path: Path, draw: random.Random) -> str:
    path.unlink()
    path.symlink_to(path.name)
    return "replaced by a link to itself"


def link_away(path: Path, draw: random.Random) -> str:
    target = draw.choice(("/dev/null", "/nowhere/at/all", "/proc/self/maps"))
    path.unlink()
    path.symlink_to(target)
    return f"replaced by a link to {target}"


def add_pickle(path: Path, draw: random.Random) -> str:
    name = draw.choice(("pytorch_model.bin", "model.bin", "training_args.bin", "optimizer.pt"))
    (path.parent / name).write_bytes(PICKLE)
    return f"{name}, a pickle, added"


def add_index(path: Path, draw: random.Random) -> str:
    target = draw.choice(("pytorch_model.bin", "../../x.safetensors", "/etc/passwd", "mrem.safetensors"))
    (path.parent / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"a": target}})
    )
    return f"an index that names {target} added"


def exchange(path: Path, draw: random.Random) -> str:
    others = [other for other in path.parent.iterdir() if other.is_file() and other != path]
    other = draw.choice(sorted(others)) if others else path
    shutil.copyfile(other, path) if other != path else None
    return f"replaced by a copy of {other.name}"


# -- JSON --------------------------------------------------------------------------------------------------


def change_json(path: Path, draw: random.Random) -> str:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return flip(path, draw)
    holders = [holder for holder in _holders(content) if holder]
    if not holders or draw.random() < 0.05:
        path.write_text(json.dumps(draw.choice(HOSTILE)))
        return "another value as a whole"
    holder = draw.choice(holders)
    key = draw.choice(sorted(holder) if isinstance(holder, dict) else range(len(holder)))
    done = _change(holder, key, draw)
    text = json.dumps(content, indent=2)
    if draw.random() < 0.03:
        text, done = "[" * DEEP + text + "]" * DEEP, f"{DEEP} levels deep"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return done


def _change(holder: Any, key: Any, draw: random.Random) -> str:
    if isinstance(holder, dict) and draw.random() < 0.25:
        how = draw.choice(("dropped", "renamed", "added"))
        value = holder.pop(key) if how != "added" else draw.choice(HOSTILE)
        if how != "dropped":
            holder[draw.choice((f"{key}x", "auto_map", "quantization_config", "attn_implementation", ""))] = (
                value
            )
        return f"{key} {how}"
    was = holder[key]
    near: tuple[Any, ...] = ()
    if isinstance(was, int | float) and not isinstance(was, bool):
        near = (was + 1, -was, was * 2, was * 1.0000001, str(was), [was])
    if isinstance(was, str):
        near = (was[:-1], was.upper(), was + " ", was[::-1])
    holder[key] = draw.choice(near) if near and draw.random() < 0.5 else draw.choice(HOSTILE)
    return f"{key} is {str(holder[key])[:40]!r}, was {str(was)[:40]!r}"


def _holders(content: Any) -> list[Any]:
    found, ahead = [], [content]
    while ahead:
        value = ahead.pop()
        if isinstance(value, dict | list):
            found.append(value)
            ahead += value.values() if isinstance(value, dict) else value
    return found


# -- tensors -----------------------------------------------------------------------------------------------


def change_tensors(path: Path, draw: random.Random) -> str:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        about = file.metadata()
    if not tensors:  # a checkpoint may hold notes alone
        return flip(path, draw)
    name = draw.choice(list(tensors))
    tensor = tensors[name]
    how = draw.choice(("drop", "rename", "add", "type", "shape", "value", "value", "value", "swap"))
    if how == "drop":
        del tensors[name]
    elif how == "rename":
        tensors[draw.choice((f"{name}x", "", "../x", name.upper()))] = tensors.pop(name)
    elif how == "add":
        tensors[draw.choice(("more", f"full/{name}", "optimizer/0/99/exp_avg"))] = tensor.clone()
    elif how == "type":
        tensors[name] = tensor.to(draw.choice((torch.float64, torch.float16, torch.int64, torch.uint8)))
    elif how == "shape":
        tensors[name] = draw.choice(
            (tensor.reshape(-1), tensor.unsqueeze(0), tensor.reshape(-1)[:-1].clone())
        )
    elif how == "value":
        value = draw.choice((0, -1, 1, 3, 255, float("nan"), float("inf"), 1e-30))
        _set(tensor, value, draw)
        how = f"a value is {value}"
    else:
        other = draw.choice(list(tensors))
        tensors[name], tensors[other] = tensors[other].clone(), tensor.clone()
        how = f"swapped with {other}"
    if draw.random() < 0.05:
        about = draw.choice((None, {"format": "pt"}, {"notes": "{}"}))
        how += ", and other metadata"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata=about)
    return f"{name}: {how}"


def _set(tensor: Any, value: float, draw: random.Random) -> None:
    """One element of a tensor; what its type cannot hold becomes 1."""
    flat = tensor.view(-1)
    if flat.numel() == 0:
        return
    place = draw.randrange(flat.numel())
    try:
        flat[place] = value
    except (RuntimeError, ValueError, OverflowError):
        flat[place] = 1


def same_content(one: Path, other: Path) -> bool:
    """Whether two files are both there, regular, and equal; the order in safetensors is free."""
    try:
        if not (one.is_file() and other.is_file()):
            return False
        return one.read_bytes() == other.read_bytes() or (
            one.suffix == ".safetensors" and _tensors_of(one) == _tensors_of(other)
        )
    except OSError:
        return False


def _tensors_of(path: Path) -> tuple[dict[str, str] | None, dict[str, tuple[str, list[int], bytes]]] | str:
    """The metadata, and type, shape and bytes of every tensor; the path if it cannot be read."""
    from safetensors import SafetensorError, deserialize, safe_open

    data = path.read_bytes()
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata()
        tensors = {name: (found["dtype"], found["shape"], found["data"]) for name, found in deserialize(data)}
    except SafetensorError:
        return str(path)
    return about, tensors


def files_in(folder: Path) -> list[str]:
    return sorted(
        os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_file() and path.stat().st_size
    )
