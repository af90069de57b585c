"""The shape of a model, and how it is packed, from its config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bluejay.checkpoint.files import CONFIG, contents, read_json
from bluejay.checkpoint.hub import HUB_ID, unavailable
from bluejay.checkpoint.load import quantization_of
from bluejay.config import ModelConfig, QuantSpec, near, preset_names
from bluejay.errors import CheckpointError


def read_config(source: str | Path, *, offline: bool = False) -> ModelConfig:
    """The config of a `config.json`, of the directory that holds one, or of a hub id (only that file is fetched).

    Raises:
        CheckpointError: absent, unreadable, or not of the GPT-J architecture.
    """
    raw, path = _read(source, offline)
    return ModelConfig.from_hf(raw, str(path))


def read_quantization(source: str | Path, *, offline: bool = False) -> QuantSpec | None:
    """How the linear layers of the same are packed; None where they are not.

    Raises:
        CheckpointError: absent, unreadable, or packed by a release that this one cannot read.
    """
    return quantization_of(*_read(source, offline))


def _read(source: str | Path, offline: bool) -> tuple[dict[str, Any], Path]:
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
            found=f"no preset, file or directory of that name{near(str(source), preset_names())}",
            rule=f"a model is a preset ({', '.join(preset_names())}), a {CONFIG}, a directory with one, or a hub id",
            fix="correct the name",
        )
    return read_json(path), path


def _fetch(hub_id: str, offline: bool) -> Path:
    from huggingface_hub import hf_hub_download  # reads the environment when it is imported

    try:
        return Path(hf_hub_download(hub_id, CONFIG, local_files_only=offline))
    except Exception as error:  # whatever the client and its transport raise, the way out is the same
        raise unavailable(hub_id, None, error) from error
