"""From what the user wrote to a directory on this machine: a path, or a hub id that is downloaded or in the cache."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from bluejay.checkpoint.files import BIN, CONFIG, GENERATION_CONFIG, QUANTIZED, SAFETENSORS, TOKENIZER_FILES, WEIGHTS
from bluejay.errors import CheckpointError, ConfigError
from bluejay.events import Event, Observer, ignore

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def resolve(
    source: str | Path, *, revision: str | None = None, offline: bool = False, observe: Observer = ignore
) -> Path:
    """The directory that `source` means. A directory on this machine comes before a hub id of the same name.

    Raises:
        CheckpointError: neither a directory nor a hub id, or a hub id that cannot be had now.
        ConfigError: a revision of a local directory.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                asked=f"revision {revision} of {source}",
                found="a local directory",
                rule="only hub ids have revisions",
                fix="leave the revision out, or rename the directory if the hub id was meant",
            )
        return path
    if isinstance(source, str) and HUB_ID.fullmatch(source) and not path.exists():
        return _snapshot(source, revision, offline, observe)
    raise CheckpointError(
        asked=f"open the checkpoint {source}",
        found=f"a file; its directory is {path.parent}" if path.exists() else f"no such directory{_near(path)}",
        rule="a model is nano, a directory with config.json, weights and tokenizer, or a hub id such as owner/name",
        fix="pass the directory that holds config.json, or correct the name",
    )


def _near(path: Path) -> str:
    """Directories beside the missing one with a similar name: a typing error, or what an interrupted save left."""
    if not path.parent.is_dir():
        return f", nor {path.parent}"
    names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    near = difflib.get_close_matches(path.name, names) + [name for name in names if name.startswith(f".{path.name}.")]
    return f"; beside it: {', '.join(near)}" if near else ""


def _snapshot(hub_id: str, revision: str | None, offline: bool, observe: Observer) -> Path:
    from huggingface_hub import errors, snapshot_download  # reads the environment when it is imported

    observe(Event("download", {"hub_id": hub_id, "revision": revision, "offline": offline}))
    absent: Exception | None = None
    for weights in (SAFETENSORS, BIN):  # the second is fetched only where the first does not exist
        stem, suffix = weights.split(".")
        patterns = [CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES, f"{stem}*.{suffix}", f"{weights}.index.json"]
        try:
            directory = Path(
                snapshot_download(hub_id, revision=revision, allow_patterns=patterns, local_files_only=offline)
            )
        except errors.LocalEntryNotFoundError as error:
            absent = error  # not reachable, and not complete in the cache in this format
        except Exception as error:  # whatever the client and its transport raise, the way out is the same
            raise unavailable(hub_id, revision, error) from error
        else:
            names = [name for name in WEIGHTS if name.startswith(weights)] + [QUANTIZED]
            if any((directory / name).is_file() for name in names):
                return directory
    if absent is not None:
        raise unavailable(hub_id, revision, absent) from absent
    return directory  # without weights: the reader says what is there


def unavailable(hub_id: str, revision: str | None, error: Exception) -> CheckpointError:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return CheckpointError(
        asked=f"open {hub_id}{f' at revision {revision}' if revision else ''} from the hub or its local cache",
        found=f"no directory {hub_id} here, and {type(error).__name__}: {reason}",
        rule="a hub id needs a network, or a complete copy in the hub's cache on this machine",
        fix="check the name and the network, or pass a directory that holds config.json, weights and tokenizer",
    )
