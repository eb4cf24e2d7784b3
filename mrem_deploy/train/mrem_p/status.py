"""One display for all modules of a parallel run, wherever they train.

A thread of every worker writes its modules' numbers into the crew's store, about once a second; that
of rank 0 reads them all and draws a bar for each module. The same thread notices when another worker
has refused to go on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from mrem_deploy.base.progress import bar
from mrem_deploy.train.mrem_p.crew import REFUSED, Crew
from mrem_deploy.train.mrem_p.worker import ModuleWorker

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
        self._bars: dict[int, Any] = {}
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
            except RuntimeError:  # the store is gone, and with it the run: the main thread will say why
                return
            if self._crew.leads:
                for status in everyone:
                    self._draw(status)
            if last:
                return

    def _exchange(self) -> list[dict[str, Any]]:
        steps = self._workers[0].schedule.rules.steps
        with self._mail:
            own = [{"module": w.index, "steps": steps, **w.status()} for w in self._workers]
        store = self._crew.store
        if store is None:
            return own
        store.set(f"status/{self._crew.rank}", json.dumps(own))
        if store.check([REFUSED]):
            self._refused.set()
        others = [key for key in map("status/{}".format, range(self._crew.world)) if store.check([key])]
        return [status for key in others for status in json.loads(store.get(key))]

    def _draw(self, status: dict[str, Any]) -> None:
        module = status["module"]
        if module not in self._bars:
            self._bars[module] = bar(status["steps"], f"module {module + 1}", initial=status["step"])
        shown = self._bars[module]
        shown.set_postfix_str(describe(status), refresh=False)
        shown.update(status["step"] - shown.n)


def describe(status: dict[str, Any]) -> str:
    """The numbers behind a module's bar; its speed and the time left stand in the bar itself."""
    parts = []
    if status["loss"] is not None:
        parts.append(f"loss {status['loss']:.4g}")
    if status["forcing"] is not None:
        parts.append(f"λ {status['forcing']:.2f}")
        parts.append(f"age {status['mean_age']:.1f} (max {status['oldest']})")
    if status["serving"]:
        parts.append("done, serving")
    return ", ".join(parts)
