"""What people see while they wait: weights that load (after a second), programs that compile, warnings. All on stderr.

Bars and spinners only on a terminal; elsewhere a wait for the compiler is one line, and loading says nothing.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from bluejay.events import Event

PATIENCE_SECONDS = 1.0


class Display:
    """An observer of `bluejay.load` and of the engine it gives; as a context manager it clears its line at the end."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._started = time.perf_counter()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._what = ""

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def __call__(self, event: Event) -> None:
        """Show an event of the rooms that make people wait."""
        fields = event.fields
        if event.name == "warning":
            self._clear()
            print(f"bluejay: warning: {fields['text']}", file=sys.stderr)
        elif self._quiet:
            return
        elif event.name == "load" and self._live:
            self._show_loading(fields["done_bytes"], fields["total_bytes"])
        elif event.name == "compile.start":
            self._show_compiling(fields["label"])
        elif event.name == "compile.part" and self._task is not None and self._progress is not None:
            text = f"{self._what}, part {fields['part']} of {fields['parts']}" if fields["parts"] > 1 else self._what
            self._progress.update(self._task, description=text)
        elif event.name == "compile.done":
            self._clear()
            if self._live:
                print(f"bluejay: compiled {fields['label']} in {fields['seconds']:.1f} s", file=sys.stderr)

    def _show_loading(self, done_bytes: int, total_bytes: int) -> None:
        if self._progress is None and time.perf_counter() - self._started > PATIENCE_SECONDS:
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

            self._open(TextColumn("loading weights"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
            assert self._progress is not None
            self._task = self._progress.add_task("load", total=total_bytes)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done_bytes)
            if done_bytes >= total_bytes:
                self._clear()

    def _show_compiling(self, label: str) -> None:
        self._clear()
        self._what = f"compiling {label} (once; the program is kept)"
        if not self._live:
            print(f"bluejay: {self._what}", file=sys.stderr)
            return
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        self._open(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        assert self._progress is not None
        self._task = self._progress.add_task(self._what, total=None)

    def _open(self, *columns: object) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)  # type: ignore[arg-type]
        self._progress.start()

    def _clear(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None
