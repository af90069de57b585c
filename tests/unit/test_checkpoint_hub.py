"""Hub ids: from the cache without a network, only what is needed with one, and a way out when there is neither."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from bluejay.checkpoint import load_tokenizer, open_checkpoint
from bluejay.errors import CheckpointError

COMMIT = "0123456789" * 4
HUB_ID = "owner/tiny-gptj"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def fill(cache: Path, checkpoint: Path, tree: tuple[str, ...] = ()) -> Path:
    """What a download leaves: files as links to blobs, a reference, and (with `tree`) the repository's listing."""
    repository = cache / "models--owner--tiny-gptj"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for folder in ("blobs", "refs", "trees"):
        (repository / folder).mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file in checkpoint.iterdir():
        shutil.copyfile(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(repository / "blobs" / file.name)
    if tree:
        from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

        entry = TreeCacheEntry(size=1, blob_id="0", lfs_sha256=None, lfs_size=None, xet_hash=None)
        write_tree_cache(str(repository), COMMIT, dict.fromkeys(tree, entry))
    return snapshot


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("tree", [(), ("config.json", "tokenizer.json", "model.safetensors", "tf_model.h5")])
def test_cache_works_offline(cache: Path, tiny_checkpoint: Path, offline: bool, tree: tuple[str, ...]) -> None:
    """A complete copy in the cache and still an error, for lack of a network or of files that are not needed."""
    snapshot = fill(cache, tiny_checkpoint, tree)
    for revision in (None, "main", COMMIT):
        checkpoint = open_checkpoint(HUB_ID, offline=offline, revision=revision)
        assert checkpoint.directory == snapshot
    assert checkpoint.read("lm_head.weight").shape == (64, 32)
    assert load_tokenizer(checkpoint.directory, checkpoint.config).eos_id == 0


def test_cached_in_the_other_format(cache: Path, tiny_checkpoint: Path) -> None:
    """The repository has safetensors too, only the .bin was downloaded, and there is no network now."""
    weights = open_checkpoint(tiny_checkpoint)
    torch.save({name: weights.read(name) for name in weights.tensors}, tiny_checkpoint / "pytorch_model.bin")
    (tiny_checkpoint / "model.safetensors").unlink()
    fill(cache, tiny_checkpoint, ("config.json", "model.safetensors", "pytorch_model.bin"))
    assert open_checkpoint(HUB_ID).tensors.keys() == weights.tensors.keys()


def test_half_a_download(cache: Path, tiny_checkpoint: Path) -> None:
    """An interrupted download is taken for a whole checkpoint."""
    (tiny_checkpoint / "model.safetensors").unlink()
    fill(cache, tiny_checkpoint, ("config.json", "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(HUB_ID)


@pytest.mark.parametrize("offline", [True, False])
def test_neither_network_nor_cache(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offline: bool) -> None:
    """A client's traceback instead of the way out: point to a directory."""
    monkeypatch.chdir(tmp_path)
    for revision in (None, "float16"):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(HUB_ID, offline=offline, revision=revision)
        for needle in (HUB_ID, revision or "", "no directory", "pass a directory that holds config.json"):
            assert needle in str(caught.value)


def test_unreachable_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is there and the hub does not answer: the transport's own exception reaches the user."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="pass a directory"):
        open_checkpoint(HUB_ID)


@pytest.mark.parametrize("source", ["gpt-j", "a/b/c", "./a/b", "/a/b", "~/b/c", "owner/with space", "owner/x..y", ""])
def test_neither_directory_nor_hub_id(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    """A mistyped path is sent to the hub, or its client's validation error reaches the user."""
    monkeypatch.chdir(tmp_path)
    if ".." not in source:  # that one looks like a hub id until the client refuses it
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError):
        open_checkpoint(source)


def test_a_directory_comes_first(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    """A local directory that looks like a hub id is downloaded from a stranger."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    tiny_checkpoint.rename(tmp_path / HUB_ID)
    assert open_checkpoint(HUB_ID).directory == Path(HUB_ID)


@pytest.mark.parametrize(
    ("formats", "wanted"),
    [
        (("safetensors", "bin"), "safetensors"),
        (("safetensors",), "safetensors"),
        (("bin",), "bin"),
        (("index", "bin"), "index"),
    ],
)
def test_only_needed_files(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_checkpoint: Path,
    formats: tuple[str, ...],
    wanted: str,
) -> None:
    """Every format of a 24 GB repository is downloaded, or a .bin although safetensors are there; what ends a text
    is not."""
    (tiny_checkpoint / "generation_config.json").write_text('{"eos_token_id": 5}')
    kept = open_checkpoint(tiny_checkpoint)
    tensors = {name: kept.read(name).clone() for name in kept.tensors}
    remote = tmp_path / "remote"
    shutil.copytree(tiny_checkpoint, remote)
    (remote / "onnx").mkdir()
    for junk in ("tf_model.h5", "flax_model.msgpack", "README.md", "onnx/model.safetensors", "training_args.bin"):
        (remote / junk).write_bytes(b"junk")
    if "bin" in formats:
        torch.save(tensors, remote / "pytorch_model.bin")
    if "safetensors" not in formats:
        (remote / "model.safetensors").unlink()
    if "index" in formats:
        shutil.copyfile(tiny_checkpoint / "model.safetensors", remote / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
        (remote / "model.safetensors.index.json").write_text(json.dumps(index))
    local = tmp_path / "local"

    def download(hub_id: str, *, allow_patterns: list[str], revision: str | None, local_files_only: bool) -> str:
        assert (hub_id, revision, local_files_only) == (HUB_ID, "v2", False)
        files = [str(path.relative_to(remote)) for path in remote.rglob("*") if path.is_file()]
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            (local / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(remote / file, local / file)
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = open_checkpoint(HUB_ID, revision="v2")
    assert all(torch.equal(checkpoint.read(name), tensors[name]) for name in tensors)
    expected = {
        "safetensors": {"model.safetensors"},
        "bin": {"pytorch_model.bin"},
        "index": {"model.safetensors.index.json", "model-00001-of-00001.safetensors"},
    }[wanted]
    others = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {str(path.relative_to(local)) for path in local.rglob("*") if path.is_file()} == expected | others


def test_network_lost_between_formats(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The network goes away after the small files: the error is about missing weights, not about the network."""
    answers = [str(tmp_path), LocalEntryNotFoundError("no route to host")]

    def download(*_: object, **__: object) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="no route to host"):
        open_checkpoint(HUB_ID)
