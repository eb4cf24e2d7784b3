"""A result folder with damage anywhere: a model, or a UserError. `make fuzz` runs it; needs atheris.

An input says which file is damaged and how: bytes replaced, removed or added, or a value of its JSON. The
folder is one without digests, as earlier releases wrote it: digests would stop nearly every input at once.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
with atheris.instrument_imports(include=["mrem_deploy.quant", "mrem_deploy.base", "mrem_deploy.models"]):
    from damage import changed_json, small_result

    from mrem_deploy.base import progress
    from mrem_deploy.base.errors import UserError
    from mrem_deploy.quant.frozen import FrozenModel

ROOT = Path(tempfile.mkdtemp(prefix="mrem-fuzz-"))
FILES = ("mrem.json", "mrem.safetensors", "config.json")
WHOLE: dict[str, bytes] = {}


def prepare() -> None:
    folder = small_result(ROOT / "whole")
    manifest = json.loads((folder / FILES[0]).read_bytes())
    manifest.pop("digests", None)
    (folder / FILES[0]).write_text(json.dumps(manifest), encoding="utf-8")
    WHOLE.update({name: (folder / name).read_bytes() for name in FILES})
    shutil.copytree(folder, ROOT / "damaged")


def seeds() -> list[bytes]:
    return [
        bytes([how, file, place, 8]) + b"1234" for how in range(4) for file in range(3) for place in range(20)
    ]


def damaged(content: bytes, is_json: bool, provider: Any) -> bytes:
    how = provider.ConsumeIntInRange(0, 3)
    if how == 0 and is_json:
        return changed_json(content, provider.ConsumeIntInRange(0, 10_000), provider.ConsumeIntInRange(0, 63))
    place = provider.ConsumeIntInRange(0, len(content))
    length = provider.ConsumeIntInRange(0, 64)
    if how == 1:
        return content[:place] + content[place + length :]
    new = provider.ConsumeBytes(length)
    return content[:place] + new + content[place + (len(new) if how == 2 else 0) :]


def one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    name = FILES[provider.ConsumeIntInRange(0, len(FILES) - 1)]
    folder = ROOT / "damaged"
    (folder / name).write_bytes(damaged(WHOLE[name], name.endswith(".json"), provider))
    try:
        FrozenModel.read(folder).build()
    except UserError:
        pass
    finally:
        (folder / name).write_bytes(WHOLE[name])


if __name__ == "__main__":
    progress.silence(True)
    prepare()
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
