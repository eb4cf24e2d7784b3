"""What workers send each other: JSON and plain tensors, so that nothing received can run code.

That two workers unpickle nothing and listen on the loopback interface alone is shown by the runs of
tests/benchmarks/test_parallel_job.py (see helpers/faulty_job.py and open_ports.py).
"""

from __future__ import annotations

import ast
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from open_ports import listening
from tiny_job import job_in, workshop_in

from mrem_deploy.walk import publishing

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("mrem_deploy", "export", "kernels")
# torch's collectives of objects pickle them; its launcher and its remote calls unpickle what they receive.
PICKLING_CALLS = {
    *("send_object_list", "recv_object_list", "broadcast_object_list", "scatter_object_list"),
    *("all_gather_object", "gather_object"),
}
PICKLING_MODULES = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.rpc")


def pickling_uses(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in PICKLING_CALLS:
            yield node.attr
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(PICKLING_MODULES))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if alias.name in PICKLING_CALLS or full.startswith(PICKLING_MODULES):
                    yield full


@pytest.mark.parametrize(
    "source",
    [
        "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
        "import torch.distributed.rpc",
        "from torch.distributed.launcher.api import elastic_launch",
        "from torch.distributed import rpc",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert list(pickling_uses(source))


def test_no_message_between_workers_is_pickled() -> None:
    assert list(pickling_uses("dist.send(tensor, 1); dist.all_gather(a, b)")) == []
    found = {
        str(path.relative_to(ROOT)): uses
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if (uses := list(pickling_uses(path.read_text("utf-8"))))
    }
    assert found == {}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_helper_sees_what_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0)):
        assert sorted(listening(os.getpid())) == ["0.0.0.0", "127.0.0.1"]
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:  # many containers have no IPv6
        return
    with server:
        assert listening(os.getpid()) == ["::1"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_run_in_one_process_opens_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = listening(os.getpid()), []
    monkeypatch.setattr(publishing, "write_report", lambda *args: seen.append(listening(os.getpid())))
    with workshop_in(tmp_path) as workshop:
        assert job_in(workshop, "result", steps=2).run() == 0
    assert seen == [before]
