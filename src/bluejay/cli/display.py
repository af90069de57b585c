"""What people see while they wait: weights that load (after a second), programs that compile, warnings. All on stderr.

Bars and spinners only on a terminal; elsewhere a wait for the compiler is one line, and loading says nothing.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

    from bluejay.events import Event

PATIENCE_SECONDS = 1.0


class Display:
    """An observer of `bluejay.load` and of the engine it gives; as a context manager it clears its lines at the end.

    One `rich` progress at a time: a bar for weights, or a line for each program that is being compiled.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._started = time.perf_counter()
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        self._compiling: dict[str, TaskID] = {}  # by fingerprint

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __call__(self, event: Event) -> None:
        """Show an event of the rooms that make people wait."""
        name, fields = event.name, event.fields
        if name == "warning":
            self._say(f"warning: {fields['text']}")
        elif self._quiet:
            return
        elif name == "load" and self._live:
            self._show_bytes("loading weights", fields["done_bytes"], fields["total_bytes"])
        elif name == "quantize" and self._live:
            self._show_bytes("packing weights", fields["done_bytes"], fields["total_bytes"])
        elif name == "evaluate" and self._live:
            self._show_count("scoring tokens", fields["done"], fields["total"])
        elif name == "compile.start":
            self._begin(fields, f"compiling {fields['label']} (once; the program is kept)")
        elif name == "compile.wait":
            self._begin(fields, f"waiting for another process that compiles {fields['label']}")
        elif name == "compile.part":
            self._show_part(fields)
        elif name in ("compile.done", "compile.failed", "compile.waited"):
            self._end(fields)

    def warn(self, text: str) -> None:
        """A warning that comes from no event."""
        self._say(f"warning: {text}")

    def _show_bytes(self, what: str, done_bytes: int, total_bytes: int) -> None:
        from rich.progress import DownloadColumn

        self._show_bar(what, DownloadColumn(True), done_bytes, total_bytes)

    def _show_count(self, what: str, done: int, total: int) -> None:
        from rich.progress import MofNCompleteColumn

        self._show_bar(what, MofNCompleteColumn(), done, total)

    def _show_bar(self, what: str, amount: ProgressColumn, done: int, total: int) -> None:
        if self._progress is None and time.perf_counter() - self._started > PATIENCE_SECONDS:
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

            self._bar = self._open(TextColumn(what), BarColumn(), amount, TimeRemainingColumn()).add_task(
                what, total=total
            )
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=done)
            if done >= total:
                self._close()

    def _begin(self, fields: Mapping[str, Any], text: str) -> None:
        if not self._live:
            self._say(text)
            return
        self._remove(fields["fingerprint"])  # the line of a worker that died, whose work begins again
        if self._progress is None or self._bar is not None:
            from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.table import Column

            rest_of_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            description = TextColumn("{task.description}", markup=False, table_column=rest_of_line)
            self._open(SpinnerColumn(), TimeElapsedColumn(), description, expand=True)
        assert self._progress is not None
        self._compiling[fields["fingerprint"]] = self._progress.add_task(text, total=None)

    def _show_part(self, fields: Mapping[str, Any]) -> None:
        task = self._compiling.get(fields["fingerprint"])
        if self._progress is not None and task is not None and fields["parts"] > 1:
            text = f"compiling {fields['label']}, part {fields['part']} of {fields['parts']}"
            self._progress.update(task, description=text)

    def _end(self, fields: Mapping[str, Any]) -> None:
        self._remove(fields["fingerprint"])
        if self._live and "seconds" in fields:
            self._say(f"compiled {fields['label']} in {fields['seconds']:.1f} s")
        if not self._compiling and self._bar is None:
            self._close()

    def _remove(self, fingerprint: str) -> None:
        task = self._compiling.pop(fingerprint, None)
        if self._progress is not None and task is not None:
            self._progress.remove_task(task)

    def _say(self, text: str) -> None:
        """A line that stays, above those that move."""
        if self._progress is None:
            print(f"bluejay: {text}", file=sys.stderr)
        else:
            self._progress.console.print(f"bluejay: {text}", markup=False, highlight=False, soft_wrap=True)

    def _open(self, *columns: Any, expand: bool = False) -> Progress:
        from rich.console import Console
        from rich.progress import Progress

        self._close()
        console = Console(stderr=True)
        redirect = sys.stdout.isatty()  # what goes elsewhere must not be drawn on stderr
        self._progress = Progress(*columns, console=console, transient=True, redirect_stdout=redirect, expand=expand)
        atexit.register(self._close)  # an engine compiles after the `with`, where nobody sees to it that we leave
        self._progress.start()
        return self._progress

    def _close(self) -> None:
        """Take away what moves and give the cursor back; again and again does no harm."""
        progress, self._progress = self._progress, None
        self._bar = None
        self._compiling.clear()
        atexit.unregister(self._close)
        if progress is not None:
            try:
                progress.stop()
            finally:
                progress.console.show_cursor(True)
