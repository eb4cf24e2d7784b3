"""Which addresses a process listens on, as Linux lists them in /proc."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

LISTENS = "0A"


def listening(process: int) -> list[str]:
    """Addresses of TCP sockets that accept connections, such as 127.0.0.1 or ::."""
    own = _sockets(process)
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path(f"/proc/{process}/net/{name}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in own:
                found.append(_address(fields[1].partition(":")[0], family))
    return found


def _sockets(process: int) -> set[str]:
    """The inode numbers of its open sockets."""
    numbers = set()
    for handle in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(handle)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            numbers.add(target[len("socket:[") : -1])
    return numbers


def _address(text: str, family: int) -> str:
    """The kernel prints 32-bit words in the order of the machine's bytes."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
