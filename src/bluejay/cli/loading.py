"""What people see while a model loads: nothing for the first second, then a bar; warnings at once. All on stderr, and
the bar only on a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from bluejay.events import Event

PATIENCE_SECONDS = 1.0


class LoadingDisplay:
    """An observer of `bluejay.load`; as a context manager it clears its bar at the end."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._started = time.perf_counter()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> LoadingDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Show an event of the loading rooms."""
        if event.name == "warning":
            print(f"bluejay: warning: {event.fields['text']}", file=sys.stderr)
        elif event.name == "load" and not self._quiet and sys.stderr.isatty():
            self._advance(event.fields["done_bytes"], event.fields["total_bytes"])

    def _advance(self, done_bytes: int, total_bytes: int) -> None:
        if self._progress is None and time.perf_counter() - self._started > PATIENCE_SECONDS:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
            self._task = self._progress.add_task("load", total=total_bytes)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done_bytes)
