"""The tokenizer: exact round trips, its own files only, and a clear word about everything that does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from bluejay.checkpoint import Tokenizer, load_tokenizer
from bluejay.config import ModelConfig
from bluejay.errors import RequestError, TokenizerError

GPT2 = Path(__file__).parents[2] / ".." / "shared" / "data" / "gpt2-bpe"
GPTJ_FILLERS = {f"<|extratoken_{i}|>": 50256 + i for i in range(1, 144)}
needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason="needs ../shared/data/gpt2-bpe (vocab.json, merges.txt)")


def write_byte_level(directory: Path, added: tuple[AddedToken, ...] = ()) -> Path:
    """A tokenizer.json with all 256 bytes and a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "Ġ"), ("i", "n")]
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(added))
    backend.save(str(directory / "tokenizer.json"))
    return directory


def assert_refused(act: Callable[[], object], *needles: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        act()
    for needle in needles:
        assert needle in str(caught.value)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return load_tokenizer(GPT2)


@pytest.fixture(scope="module")
def codegen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Runs of white space as added tokens with the flags that make the library swallow what surrounds them."""
    runs = [" " * n for n in range(8, 1, -1)] + ["\t" * n for n in range(5, 1, -1)]
    added = tuple(AddedToken(run, lstrip=True, rstrip=True, normalized=True) for run in runs)
    end = AddedToken("<|endoftext|>", special=True)
    return load_tokenizer(write_byte_level(tmp_path_factory.mktemp("codegen"), (end, *added)))


@needs_gpt2
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("y is ?", [88, 318, 5633]),
        ("I don't .", [40, 836, 470, 764]),
        ("\n  ", [198, 220, 220]),
        ("", []),
        ("a<|endoftext|>b", [64, 50256, 65]),
    ],
)
def test_known_ids(gpt2: Tokenizer, text: str, ids: list[int]) -> None:
    """B-13, B-14: a space before punctuation or a newline goes missing between ids and text."""
    assert gpt2.encode(text) == ids
    assert gpt2.decode(ids, skip_special=False) == text
    assert gpt2.eos_id == 50256
    assert gpt2.special_ids == {50256}


@needs_gpt2
@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_round_trip(gpt2: Tokenizer, text: str) -> None:
    """B-13: decode(encode(x)) differs from x: cleaned-up spaces, a lost character, half of one."""
    ids = gpt2.encode(text)
    assert gpt2.decode(ids, skip_special=False) == text
    assert b"".join(map(gpt2.token_bytes, ids)) == text.encode()


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from(" \t\n\r\u00a0\u3000xé<|"), max_size=30))
def test_white_space_runs(codegen: Tokenizer, text: str) -> None:
    """B-14: added tokens for runs of spaces swallow the newlines beside them."""
    assert codegen.decode(codegen.encode(text)) == text


@pytest.mark.parametrize("text", ["\n  ", "\n\n\n    x", "\t\tx", "  ", " \n \t\t\n  the"])
def test_white_space_examples(codegen: Tokenizer, text: str) -> None:
    """B-14, its own examples; and the run tokens are still used."""
    ids = codegen.encode(text)
    assert codegen.decode(ids) == text
    assert len(ids) < len(text)


@needs_gpt2
def test_fillers(tmp_path: Path, tiny_config: ModelConfig) -> None:
    """GPT-J's filler tokens get other ids than in its files, are cut into pieces, or count as special."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(GPT2 / name, tmp_path / name)
    (tmp_path / "added_tokens.json").write_text(json.dumps(dict(reversed(GPTJ_FILLERS.items()))))
    tokenizer = load_tokenizer(tmp_path, replace(tiny_config, vocab_size=50400))
    assert tokenizer.num_entries == 50400
    assert tokenizer.encode("x<|extratoken_1|> <|extratoken_143|>") == [87, 50257, 220, 50399]
    assert tokenizer.decode([87, 50257, 50256, 50399]) == "x<|extratoken_1|><|extratoken_143|>"
    assert tokenizer.token_bytes(50257) == b"<|extratoken_1|>"
    assert tokenizer.special_ids == {50256}
    assert tokenizer.eos_id == 50256
    assert_refused(
        lambda: load_tokenizer(tmp_path, replace(tiny_config, vocab_size=50257)), "50257 rows", "ids up to 50399"
    )


def test_fewer_entries_than_rows(tiny_checkpoint: Path, tiny_config: ModelConfig) -> None:
    """B-06: padding rows of the embedding taken for a mismatch; an id without text breaks decoding."""
    tokenizer = load_tokenizer(tiny_checkpoint, tiny_config)
    assert tokenizer.num_entries == 57
    assert tokenizer.token_bytes(60) == b""
    assert tokenizer.decode([*tokenizer.encode(" the"), 60, 63]) == " the"
    load_tokenizer(tiny_checkpoint, replace(tiny_config, vocab_size=57))
    assert_refused(lambda: load_tokenizer(tiny_checkpoint, replace(tiny_config, vocab_size=56)), "56 rows", "up to 56")


def test_no_tokenizer(tmp_path: Path) -> None:
    """B-16: the base model's tokenizer is fetched in silence for a tuned model that lacks its own."""
    assert_refused(lambda: load_tokenizer(tmp_path), "nothing", "tokenizer.json, or vocab.json and merges.txt")
    assert_refused(lambda: load_tokenizer(tmp_path / "no"), "no such directory")
    (tmp_path / "vocab.json").write_text("{}")
    assert_refused(lambda: load_tokenizer(tmp_path), "found: vocab.json")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert_refused(lambda: load_tokenizer(tmp_path), "found: tokenizer_config.json, vocab.json")


@pytest.mark.parametrize("where", ["tokenizer", "added_tokens", "tokenizer_config", "special_tokens_map"])
def test_added_token_is_one_id(tmp_path: Path, where: str) -> None:
    """B-16: a token that tuning added is read from one kind of file and missed in another."""
    token, end = "<|user|>", AddedToken("<|endoftext|>", special=True)
    write_byte_level(tmp_path, (end, AddedToken(token, special=True)) if where == "tokenizer" else (end,))
    content: dict[str, object] = {
        "tokenizer": {},
        "added_tokens": {token: 262},
        "tokenizer_config": {"added_tokens_decoder": {"262": {"content": token, "special": True}}},
        "special_tokens_map": {"additional_special_tokens": [token], "eos_token": {"content": token, "lstrip": False}},
    }[where]
    if content:
        (tmp_path / f"{where}.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(f"in{token}in") == [260, 262, 260]
    assert (262 in tokenizer.special_ids) == (where != "added_tokens")
    assert tokenizer.eos_id == (262 if where == "special_tokens_map" else 261)


def test_added_token_elsewhere(tmp_path: Path) -> None:
    """A gap in the ids: the library numbers on, and the token meets another token's row of the embedding."""
    write_byte_level(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<a>": 300}))
    assert_refused(lambda: load_tokenizer(tmp_path), "'<a>' with id 300", "id 261 in the vocabulary")


def test_end_of_text_id(tmp_path: Path, tiny_config: ModelConfig) -> None:
    """The tokenizer's own statement loses against the model config's, or there is none although the config has one."""
    write_byte_level(tmp_path)
    assert load_tokenizer(tmp_path).eos_id is None
    config = replace(tiny_config, vocab_size=300, eos_token_ids=(7, 8))
    assert load_tokenizer(tmp_path, config).eos_id == 7
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "the"}')
    assert load_tokenizer(tmp_path, config).eos_id == 257


def test_nothing_is_cut_or_padded(tmp_path: Path) -> None:
    """A tokenizer.json saved during training silently cuts every prompt to the training length."""
    backend = tokenizers.Tokenizer.from_file(str(write_byte_level(tmp_path) / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("x" * 10)) == 10


def test_begin_token(tmp_path: Path) -> None:
    """A model tuned with a token in front of every text does not get it."""
    write_byte_level(tmp_path, (AddedToken("<s>", special=True),))
    setting = {"bos_token": "<s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(setting))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the") == [261, 257]
    assert tokenizer.decode([261, 257]) == "the"


def test_every_byte_of_an_added_token(tmp_path: Path) -> None:
    """An added token with an accent is decoded through the byte table and comes out as half a character."""
    tokenizer = load_tokenizer(write_byte_level(tmp_path, (AddedToken("é ½"),)))
    assert tokenizer.encode("é ½") == [261]
    assert tokenizer.token_bytes(261) == "é ½".encode()
    assert tokenizer.decode([261]) == "é ½"
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("é")] == [b"\xc3", b"\xa9"]
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_text_that_cannot_be_encoded(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Half a surrogate pair from a terminal ends in a traceback; bytes without an entry vanish."""
    with pytest.raises(RequestError, match="character 1"):
        load_tokenizer(write_byte_level(tmp_path)).encode("a\udcffb")
    tiny = load_tokenizer(tiny_checkpoint)
    assert tiny.decode(tiny.encode("the end<|endoftext|>"), skip_special=False) == "the end<|endoftext|>"
    with pytest.raises(RequestError, match="no entry"):
        tiny.encode("The end")


def test_damaged_files(tmp_path: Path) -> None:
    """The library's bare exception, or a tokenizer of another kind whose tokens are no bytes."""
    for content in ("{", "[]", "{}", '{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        assert_refused(lambda: load_tokenizer(tmp_path), str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na zz\n")
    assert_refused(lambda: load_tokenizer(tmp_path), str(tmp_path))
    for model in (models.WordLevel({"a": 0}, unk_token="a"), models.BPE(vocab={"\u2581a": 0}, merges=[])):
        tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        assert_refused(lambda: load_tokenizer(tmp_path), "byte-level")
