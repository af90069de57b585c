"""Streamed text: whole characters only, every one of them, once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from bluejay.generate import StreamDecoder

GPT2_BPE = Path(__file__).parents[3] / "shared" / "data" / "gpt2-bpe"
REPLACEMENT = "\ufffd"
# Bytes of the ids of case B-61 in the BPE of GPT-2 (checked against its files below).
BYTES = {
    41840: b"\xf0\x9f\x91",
    233: b"\x8b",
    47249: b"\xf0\x9f\x98",
    232: b"\x8a",
    33768: b"\xe6\x97",
    98: b"\xa5",
    17312: b"\xe6\x9c",
    105: b"\xac",
    45739: b"\xe8\xaa",
    252: b"\x9e",
    168: b"\xec",
    224: b"\x82",
    120: b"\xbc",
    166: b"\xea",
    110: b"\xb2",
    117: b"\xb9",
    112: b"\xb4",
    464: b"The",
}
WAVE, SMILE, JAPANESE = (41840, 233), (47249, 232), (33768, 98, 17312, 105, 45739, 252)
KOREAN = (168, 224, 120, 166, 110, 117, 168, 224, 112)


def byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of GPT-2's byte-level BPE: 188 bytes stand for themselves, the rest start at U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


ALPHABET = byte_alphabet()
LETTER = {byte: letter for letter, byte in ALPHABET.items()}


def pieces_of(ids: Iterable[int], table: dict[int, bytes], skip: frozenset[int] = frozenset()) -> list[str]:
    decoder = StreamDecoder(table.__getitem__, skip)
    return [*map(decoder.push, ids), decoder.flush()]


@pytest.mark.parametrize(
    ("ids", "text"), [(WAVE, "👋"), (SMILE, "😊"), (JAPANESE, "日本語"), (KOREAN, "삼겹살"), (WAVE + WAVE, "👋👋")]
)
def test_a_character_of_several_tokens_comes_whole(ids: tuple[int, ...], text: str) -> None:
    """Catches decoding each id alone (B-61: only U+FFFD), and printing a character again when it completes."""
    pieces = pieces_of(ids, BYTES)
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 and piece != REPLACEMENT for piece in pieces)


def test_the_character_comes_with_the_token_that_completes_it() -> None:
    """Catches a decoder that lags one token behind, which would also shift text offsets."""
    assert pieces_of([464, *WAVE, 464], BYTES) == ["The", "", "👋", "The", ""]


def test_a_row_that_ends_inside_a_character_ends_in_one_replacement() -> None:
    """Catches an error, a lost tail without notice, or three U+FFFD where the budget cuts after 41840 (B-61)."""
    assert pieces_of([464, 41840], BYTES) == ["The", "", REPLACEMENT]
    assert (b"The" + BYTES[41840]).decode(errors="replace") == "The" + REPLACEMENT


def test_invalid_bytes_come_once_and_block_nothing() -> None:
    """Catches the buffer that waits forever for a lone continuation byte to become a character (B-61)."""
    assert pieces_of([464, 233, 464, *WAVE], BYTES) == ["The", REPLACEMENT, "The", "", "👋", ""]
    assert pieces_of([41840, 464], BYTES) == ["", REPLACEMENT + "The", ""]


def test_skipped_ids_have_no_text_even_inside_a_character() -> None:
    """Catches special tokens in the text, and a special token that breaks the character around it."""
    assert pieces_of([41840, 9, 233, 9], BYTES, skip=frozenset({9})) == ["", "", "👋", "", ""]


def test_flush_leaves_nothing_behind() -> None:
    """Catches a tail that reappears in front of the next row."""
    decoder = StreamDecoder(BYTES.__getitem__)
    decoder.push(41840)
    assert [decoder.flush(), decoder.flush(), decoder.push(464)] == [REPLACEMENT, "", "The"]


# Bytes that begin, continue and break characters of every length, more often than chance would give.
BYTE = st.one_of(st.sampled_from(b"a\x80\xbf\xc2\xe0\xed\xa0\xef\xf0\x9f\x91\x8b\xf4\x90\xff"), st.integers(0, 255))
TOKEN = st.one_of(
    st.lists(BYTE, min_size=1, max_size=5).map(bytes),
    st.text(min_size=1, max_size=3).map(lambda text: text.encode(errors="replace")),
)


@settings(deadline=None)
@given(st.lists(TOKEN, max_size=20), st.data())
def test_joined_pieces_equal_decoding_at_once(tokens: list[bytes], data: st.DataObject) -> None:
    """Catches any text lost, doubled, early or different from `tokenizers`, for any bytes cut anywhere."""
    whole = decoders.ByteLevel().decode(["".join(LETTER[byte] for byte in token) for token in tokens])
    pieces = pieces_of(range(len(tokens)), dict(enumerate(tokens)))
    assert "".join(pieces) == whole
    # Nothing waits that is certain: what is missing after any token is at most one unfinished character.
    cut = data.draw(st.integers(0, len(tokens)))
    certain = b"".join(tokens[:cut]).decode(errors="replace")
    shown = "".join(pieces[:cut])
    assert certain in (shown, shown + REPLACEMENT)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    if not GPT2_BPE.is_dir():
        pytest.skip(f"needs the data folder {GPT2_BPE.name}: {GPT2_BPE}")
    bpe = models.BPE.from_file(str(GPT2_BPE / "vocab.json"), str(GPT2_BPE / "merges.txt"))
    tokenizer = Tokenizer(bpe)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def gpt2_bytes(gpt2: Tokenizer) -> dict[int, bytes]:
    vocab = json.loads((GPT2_BPE / "vocab.json").read_text(encoding="utf-8"))
    return {i: entry.encode() if i == 50256 else bytes(map(ALPHABET.__getitem__, entry)) for entry, i in vocab.items()}


def test_ids_of_the_case_are_those_of_the_real_tokenizer(gpt2_bytes: dict[int, bytes]) -> None:
    """Catches tests above that pass on made-up bytes."""
    assert {i: gpt2_bytes[i] for i in BYTES} == BYTES


@settings(deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 50256), st.sampled_from(sorted(BYTES)), st.integers(94, 255)), max_size=40)
)
def test_random_ids_of_the_real_tokenizer(gpt2: Tokenizer, gpt2_bytes: dict[int, bytes], ids: list[int]) -> None:
    """Catches a difference from `tokenizers` on the vocabulary that GPT-J uses."""
    assert "".join(pieces_of(ids, gpt2_bytes)) == gpt2.decode(ids, skip_special_tokens=False)
