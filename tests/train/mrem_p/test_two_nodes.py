"""One job on two "machines": two torchrun groups that share nothing but a network."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_job import job_in as job
from tiny_job import save_model, workshop_in

from mrem_deploy.quant import artifact

pytestmark = pytest.mark.jobs

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 1800  # seconds; a job takes a few, on a crowded machine many minutes
NAMESPACES = ("mrem-test-0", "mrem-test-1")
MODULES = 3  # on two workers: one has two of them


@dataclass(frozen=True)
class Network:
    """How the two are started, and where the first can be reached."""

    prefixes: tuple[list[str], list[str]]
    address: str
    interfaces: tuple[str, str]


LOOPBACK = Network(([], []), "127.0.0.1", ("lo", "lo"))


@contextmanager
def namespaces() -> Iterator[Network]:
    """Two network namespaces with a cable between them; skips where that is not allowed."""
    tool = shutil.which("ip")
    if tool is None:
        pytest.skip("there is no `ip` command here")

    def ip(*arguments: str) -> bool:
        return subprocess.run([tool, *arguments], capture_output=True, check=False).returncode == 0

    try:
        if not all(ip("netns", "add", name) for name in NAMESPACES):
            pytest.skip("network namespaces cannot be made here")
        steps = [["link", "add", "mrem-t0", "type", "veth", "peer", "name", "mrem-t1"]]
        for number, name in enumerate(NAMESPACES):
            device = f"mrem-t{number}"
            steps += [
                ["link", "set", device, "netns", name],
                ["-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", device],
                ["-n", name, "link", "set", device, "up"],
                ["-n", name, "link", "set", "lo", "up"],
            ]
        if not all(ip(*step) for step in steps):
            pytest.skip("virtual network devices cannot be made here")
        prefixes = [[tool, "netns", "exec", name] for name in NAMESPACES]
        yield Network((prefixes[0], prefixes[1]), "10.77.0.1", ("mrem-t0", "mrem-t1"))
    finally:
        for name in NAMESPACES:
            ip("netns", "del", name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("workshop")) as root:
        save_model(root / "model", num_hidden_layers=MODULES)
        yield root


def run_two_nodes(workshop: Path, network: Network, name: str) -> list[str]:
    """Start both, wait for both; what they said. Each has an --out of its own, as on separate disks."""
    port = free_port()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    running = []
    for node in range(2):
        options = {"method": "mrem-p", "modules": MODULES, "staleness": 3, "worker_timeout": 300}
        arguments = job(workshop, f"{name}-{node}", **options).argv()
        launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        launcher += ["--node-rank", str(node), "--master-addr", network.address, "--master-port", str(port)]
        running.append(
            subprocess.Popen(
                [
                    *network.prefixes[node],
                    sys.executable,
                    *launcher,
                    "-m",
                    "mrem_deploy.quantize",
                    *arguments,
                ],
                env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": network.interfaces[node]},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    return said


def check(workshop: Path, said: list[str], name: str) -> None:
    """One result, on the first node; the second leaves nothing behind."""
    assert "report:" in said[0]
    assert "report:" not in said[1]
    assert sorted(path.name for path in workshop.iterdir() if name in path.name) == [f"{name}-0"]
    result = json.loads((workshop / f"{name}-0" / "metrics.json").read_text())
    assert [worker["modules"] for worker in result["cost"]["workers"]] == [[1, 2], [3]]
    assert (workshop / f"{name}-0" / artifact.TENSORS).exists()


def test_two_torchrun_groups_complete_one_job(workshop: Path) -> None:
    check(workshop, run_two_nodes(workshop, LOOPBACK, "loopback"), "loopback")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_two_network_namespaces_complete_one_job(workshop: Path) -> None:
    with namespaces() as network:
        check(workshop, run_two_nodes(workshop, network, "namespace"), "namespace")


def test_a_neighbour_that_never_starts_is_named(workshop: Path) -> None:
    """Started by hand as the first of two; nobody else comes."""
    arguments = job(workshop, "lonely", method="mrem-p", modules=MODULES, worker_timeout=5).argv()
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "mrem_deploy.quantize", *arguments],
        env={**os.environ, **alone, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    assert "not all of 2 workers reached 127.0.0.1:" in done.stderr
    assert "within 5 s" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (workshop / "lonely").exists()
