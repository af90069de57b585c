"""Byte-level BPE from a checkpoint's own files, through the `tokenizers` library.

Ids are those that transformers gives for the same files, with two deliberate differences, both so that decoding what
was encoded gives the text back: decoding never "cleans up" spaces, and added tokens that are plain text (such as
CodeGen's runs of spaces) never swallow the white space around them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from bluejay.checkpoint.files import (
    ADDED_TOKENS,
    MERGES,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCAB,
    contents,
    read_json,
)
from bluejay.config import ModelConfig
from bluejay.errors import RequestError, TokenizerError

_END_OF_TEXT = "<|endoftext|>"  # GPT-2's only special token, and the default where the files name none
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it prints, else one from 256 on.

    Source: `bytes_to_unicode` of GPT-2's encoder.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_letters()


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        num_entries: tokens it knows; a model may have more embedding rows, whose ids then stand for no text.
        special_ids: of tokens that are no text, such as the end of text.
        eos_id: of the token that ends a text, if any.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_id: int | None) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.num_entries = backend.get_vocab_size(with_added_tokens=True)
        self.eos_id = eos_id
        self._has_all_bytes = _BYTE_OF.keys() <= backend.get_vocab(with_added_tokens=False).keys()

    def encode(self, text: str) -> list[int]:
        """The ids of a text; literal special tokens in it become their ids.

        Raises:
            RequestError: the text holds half a surrogate pair, which no UTF-8 can express, or bytes without an entry.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                asked="encode a text",
                found=f"{text[error.start]!r} at character {error.start}",
                rule="a text must be valid Unicode",
                fix="decode the input as UTF-8",
            ) from error
        ids: list[int] = self._backend.encode(text).ids
        if not self._has_all_bytes and text not in self.decode(ids, skip_special=False):
            raise RequestError(
                asked=f"encode {text[:40]!r}",
                found="characters that the tokenizer has no entry for",
                rule="this vocabulary lacks entries for some bytes and would drop them silently",
                fix="leave those characters out, or use a tokenizer with all 256 bytes",
            )
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids, exactly; bytes that are no UTF-8 become U+FFFD."""
        kept = (i for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id without an entry (rows that only pad the embedding)."""
        if token_id in self._added:
            return self._added[token_id]
        return bytes(_BYTE_OF[letter] for letter in self._backend.id_to_token(token_id) or "")


def load_tokenizer(directory: str | Path, config: ModelConfig | None = None) -> Tokenizer:
    """The tokenizer in a checkpoint's directory: tokenizer.json, else vocab.json and merges.txt, with added tokens.

    Raises:
        TokenizerError: no tokenizer files there (none is ever taken from elsewhere), damaged ones, not byte-level BPE,
            or ids beyond the model's embedding.
    """
    directory = Path(directory)

    def optional(name: str) -> dict[str, Any]:
        return read_json(directory / name, TokenizerError) if (directory / name).is_file() else {}

    settings = optional(TOKENIZER_CONFIG)
    if "added_tokens_decoder" not in settings:  # newer files repeat there what these hold
        settings = settings | optional(SPECIAL_TOKENS)
    backend = _backend(directory, bool(settings.get("add_prefix_space")))
    if backend.token_to_id(_END_OF_TEXT) is not None and (
        not (directory / TOKENIZER).is_file() or str(settings.get("tokenizer_class")).startswith("GPT2Tokenizer")
    ):
        settings = dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT) | settings
    special = _special_tokens(settings)
    _add_tokens(backend, special, settings.get("added_tokens_decoder"), optional(ADDED_TOKENS), directory)
    if "add_bos_token" in settings or "add_eos_token" in settings:
        backend.post_processor = _frame(backend, settings, special)
    backend.no_truncation()
    backend.no_padding()
    _check(backend, config, directory)
    if "eos_token" in special:
        return Tokenizer(backend, backend.token_to_id(special["eos_token"].content))
    if config is not None and config.eos_token_ids:
        return Tokenizer(backend, config.eos_token_ids[0])
    return Tokenizer(backend, backend.token_to_id(_END_OF_TEXT))


def _backend(directory: Path, add_prefix_space: bool) -> tokenizers.Tokenizer:
    file, vocab, merges = directory / TOKENIZER, directory / VOCAB, directory / MERGES
    if not file.is_file() and not (vocab.is_file() and merges.is_file()):
        raise TokenizerError(
            asked=f"read the tokenizer of {directory}",
            found=contents(directory) if directory.is_dir() else "no such directory",
            rule=f"{TOKENIZER}, or {VOCAB} and {MERGES}, lie beside the weights; one from elsewhere may not fit",
            fix="copy the model's tokenizer files there (the base model's only if its tokenizer was not changed)",
        )
    try:
        if file.is_file():
            content = read_json(file, TokenizerError)
            for token in content.get("added_tokens", ()):
                if not token["special"]:
                    token["lstrip"] = token["rstrip"] = False
            return tokenizers.Tokenizer.from_str(json.dumps(content))
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except TokenizerError:
        raise
    except Exception as error:  # the library raises no narrower class
        raise TokenizerError(
            asked=f"read the tokenizer of {directory}",
            found=f"{error}",
            rule="the files are those of a byte-level BPE, complete",
            fix="download or copy them again",
        ) from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, AddedToken]:
    """The tokens that are no text, by role (`eos_token`, ...) or, for those without one, by themselves."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    entries = {role: settings[role] for role in _ROLES if settings.get(role)}
    entries |= extra if isinstance(extra, dict) else {_content(entry): entry for entry in extra}
    return {role: _added_token(entry, special=True) for role, entry in entries.items()}


def _content(entry: str | Mapping[str, Any]) -> str:
    return entry if isinstance(entry, str) else str(entry["content"])


def _added_token(entry: str | Mapping[str, Any], special: bool) -> AddedToken:
    flags = {} if isinstance(entry, str) else {name: bool(entry[name]) for name in _FLAGS if name in entry}
    special = special or (not isinstance(entry, str) and bool(entry.get("special")))
    if not special:
        flags = flags | {"lstrip": False, "rstrip": False}
    return AddedToken(_content(entry), special=special, **({"normalized": not special} | flags))


def _add_tokens(
    backend: tokenizers.Tokenizer,
    special: Mapping[str, AddedToken],
    described: Mapping[str, Any] | None,
    listed: Mapping[str, int],
    directory: Path,
) -> None:
    """Add what the side files name, in the order of the ids they give, then special tokens without an id.

    Args:
        described: tokenizer_config.json's `added_tokens_decoder`, id -> token with flags; replaces `listed`.
        listed: added_tokens.json, token -> id.
    """
    names = {token.content for token in special.values()}
    entries: dict[int, Any] = {int(token_id): entry for token_id, entry in (described or {}).items()}
    if described is None:
        entries = {token_id: content for content, token_id in listed.items()}
    for token_id, entry in sorted(entries.items()):
        token = _added_token(entry, special=_content(entry) in names)
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise TokenizerError(
                asked=f"add the token {token.content!r} with id {token_id}, as the files in {directory} say",
                found=f"id {backend.token_to_id(token.content)} in the vocabulary",
                rule="added tokens follow the vocabulary without gaps",
                fix="copy all tokenizer files again, from one save",
            )
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in special.values() if token.content not in added])


def _frame(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Mapping[str, AddedToken]
) -> processors.TemplateProcessing:
    """What goes around every text: the tokens that begin and end it, where the files ask for them."""
    bos = [special["bos_token"].content] if settings.get("add_bos_token") and "bos_token" in special else []
    eos = [special["eos_token"].content] if settings.get("add_eos_token") and "eos_token" in special else []
    return processors.TemplateProcessing(
        single=[*bos, "$A", *eos], special_tokens=[(token, backend.token_to_id(token)) for token in {*bos, *eos}]
    )


def _check(backend: tokenizers.Tokenizer, config: ModelConfig | None, directory: Path) -> None:
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    letters = set(_BYTE_OF)
    foreign = next((token for token in vocabulary if token not in added and not letters.issuperset(token)), None)
    if foreign is not None or not isinstance(backend.model, models.BPE) or "ByteLevel" not in str(backend.decoder):
        raise TokenizerError(
            asked=f"read the tokenizer of {directory}",
            found=f"a {type(backend.model).__name__} with the decoder {backend.decoder}"
            + (f" and the entry {foreign!r}" if foreign else ""),
            rule="GPT-J's tokenizer is a byte-level BPE",
            fix="use the tokenizer that the model was trained with",
        )
    largest = max(vocabulary.values(), default=-1)
    if config is not None and largest >= config.vocab_size:
        raise TokenizerError(
            asked=f"use the tokenizer of {directory} with an embedding of {config.vocab_size} rows",
            found=f"ids up to {largest}, {len(vocabulary)} entries",
            rule="every id needs a row of the embedding (more rows than entries are fine)",
            fix="use the model's own tokenizer, or grow the model with resize_vocab",
        )
