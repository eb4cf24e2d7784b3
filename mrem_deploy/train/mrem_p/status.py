"""One display for all modules of a parallel run, wherever they train.

In every worker a thread writes its modules' numbers into the crew's store, about once a second; that
of rank 0 reads them all and draws a bar for each module. The same thread notices when another worker
has ended the run.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType

from tqdm import tqdm

from mrem_deploy.base.progress import bar
from mrem_deploy.train.mrem_p.crew import REFUSED, Crew
from mrem_deploy.train.mrem_p.worker import ModuleStatus, ModuleWorker

SECONDS = 1.0


class StatusBoard:
    """Publishes this worker's modules, and on rank 0 shows everyone's, while the block runs."""

    def __init__(
        self,
        crew: Crew,
        workers: Sequence[ModuleWorker],
        mail: threading.Condition,
        refused: threading.Event,
    ) -> None:
        self._crew, self._workers, self._mail, self._refused = crew, workers, mail, refused
        self._left = threading.Event()
        self._bars: dict[int, tqdm] = {}
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> StatusBoard:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join(5 * SECONDS)
        for shown in self._bars.values():
            shown.close()

    def _run(self) -> None:
        while True:
            last = self._left.wait(SECONDS)
            try:
                everyone = self._exchange()
            except (
                RuntimeError,
                OSError,
            ):  # the store is gone, so the run is over: the main thread reports why
                return
            if self._crew.leads:
                for status in everyone:
                    self._draw(status)
            if last:
                return

    def _exchange(self) -> list[ModuleStatus]:
        with self._mail:
            own = [worker.status() for worker in self._workers]
        store = self._crew.store
        if store is None:
            return own
        store.set(f"status/{self._crew.rank}", json.dumps([asdict(status) for status in own]))
        if store.check([REFUSED]):
            self._refused.set()
        known = [key for key in map("status/{}".format, range(self._crew.world)) if store.check([key])]
        return [ModuleStatus(**status) for key in known for status in json.loads(store.get(key))]

    def _draw(self, status: ModuleStatus) -> None:
        if status.module not in self._bars:
            label = f"module {status.module + 1}"
            self._bars[status.module] = bar(status.steps, label, initial=status.step)
        shown = self._bars[status.module]
        shown.set_postfix_str(status.line(), refresh=False)
        shown.update(status.step - shown.n)
