"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bluejay.files import (
    SETTLING_SECONDS,
    TEMPORARY_PREFIX,
    flush,
    replacing,
    temporary_folder,
    write_bytes,
    write_json,
)


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    """Catches remains beside the file, and rights that only its writer has."""
    file = tmp_path / "a.json"
    write_bytes(file, b"old")
    write_json(file, {"ä": 1})
    assert file.read_bytes() == '{\n  "ä": 1\n}\n'.encode()
    assert list(tmp_path.iterdir()) == [file]
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    """Catches half a file under its name, or an old one that is gone: by an error, an interrupt, a wrong value."""

    def fail(error: type[BaseException]) -> None:
        with replacing(file) as stream:
            stream.write(b"half")
            assert file.read_bytes() == b"old"
            raise error

    file = tmp_path / "a"
    write_bytes(file, b"old")
    for error in (OSError, KeyboardInterrupt):
        with pytest.raises(error):
            fail(error)
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_content_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a name that survives a power cut and a content that does not."""
    done: list[str] = []
    replace = Path.replace

    def synced(descriptor: int) -> None:
        done.append("folder" if os.path.isdir(f"/dev/fd/{descriptor}") else "file")

    def replaced(self: Path, target: Path) -> Any:
        done.append("name")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write_json(tmp_path / "a", {})
    assert done == ["file", "name", "folder"]
    flush(tmp_path)
    assert done[-1] == "folder"
    assert json.loads((tmp_path / "a").read_text()) == {}


def test_temporary_folders_of_killed_processes_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches folders that pile up after `kill -9`, and one deleted that is in use, just made, or not ours."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        f"import os, tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from bluejay.files import temporary_folder\n"
        "with temporary_folder() as folder: print(folder); (folder / 'remains').touch(); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    remains = [path for path in tmp_path.iterdir() if path.name.startswith(TEMPORARY_PREFIX)]
    assert (killed.returncode, len(remains)) == (-9, 1), killed.stderr
    other = tmp_path / "bluejay-experiments"
    other.mkdir()
    with temporary_folder() as held:
        old = held.stat().st_mtime - 2 * SETTLING_SECONDS
        for path in (held, other):
            os.utime(path, (old, old))
        with temporary_folder() as second:
            assert remains[0].is_dir()  # too new for anyone to say that nobody will lock it
            os.utime(remains[0], (old, old))
            with temporary_folder():
                assert not remains[0].exists()
            assert held.is_dir()
            assert second.is_dir()
    assert list(tmp_path.iterdir()) == [other]
