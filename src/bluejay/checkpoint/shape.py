"""The shape of a model from its config.json alone."""

from __future__ import annotations

from pathlib import Path

from bluejay.checkpoint.files import CONFIG, contents, read_json
from bluejay.checkpoint.hub import HUB_ID, unavailable
from bluejay.config import ModelConfig
from bluejay.errors import CheckpointError


def read_config(source: str | Path, *, offline: bool = False) -> ModelConfig:
    """The config of a `config.json`, of the directory that holds one, or of a hub id (only that file is fetched).

    Raises:
        CheckpointError: absent, unreadable, or not of the GPT-J architecture.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise CheckpointError(
                asked=f"the shape of the model in {path}",
                found=f"no {CONFIG}; the directory holds {contents(path)}",
                rule=f"{CONFIG} says how large a model is",
                fix=f"pass the directory that holds {CONFIG}, or the file itself",
            )
        path = path / CONFIG
    elif not path.exists() and isinstance(source, str) and HUB_ID.fullmatch(source):
        path = _fetch(source, offline)
    elif not path.exists():
        raise CheckpointError(
            asked=f"the shape of {source}",
            found="no preset, file or directory of that name",
            rule=f"a model is a preset, a {CONFIG}, a directory with one, or a hub id such as owner/name",
            fix="correct the name",
        )
    return ModelConfig.from_hf(read_json(path), str(path))


def _fetch(hub_id: str, offline: bool) -> Path:
    from huggingface_hub import hf_hub_download  # reads the environment when it is imported

    try:
        return Path(hf_hub_download(hub_id, CONFIG, local_files_only=offline))
    except Exception as error:  # whatever the client and its transport raise, the way out is the same
        raise unavailable(hub_id, None, error) from error
