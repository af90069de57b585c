"""Files that are whole or not there, and on the disk once they are there. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

TEMPORARY_PREFIX = "bluejay-work-"
SETTLING_SECONDS = 60.0  # between making a temporary folder and locking it, at the very most


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose content becomes the file `path` in one step; if anything fails, what was there stays.

    Raises:
        OSError: the folder cannot be written.
    """
    incoming = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        with incoming.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        incoming.replace(path)
    except BaseException:
        incoming.unlink(missing_ok=True)
        raise
    flush(path.parent)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in the system's place for temporary files, gone afterwards; first, those of killed processes go.

    Its process holds a lock on it, which the system gives back however that process ends, so what nobody holds belongs
    to nobody, in whichever container or under whichever process number it was made.
    """
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX) as name:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Delete the temporary folders of ours in `parent` that no process holds."""
    for folder in parent.glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, just deleted, or in use
            about = folder.lstat()
            is_new = time.time() - about.st_mtime < SETTLING_SECONDS  # its process may be about to take the lock
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or is_new:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Make `content` the file `path`, in one step.

    Raises:
        OSError: the folder cannot be written.
    """
    with replacing(path) as stream:
        stream.write(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Make `content`, as indented JSON, the file `path`, in one step.

    Raises:
        OSError: the folder cannot be written.  TypeError: something in `content` has no JSON.
    """
    write_bytes(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
