"""Files that are whole or not there, and on the disk once they are there. Standard library only."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


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
