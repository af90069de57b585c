"""Token ids to text, one id at a time, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Text of a growing row of token ids; the pieces joined are the text of all ids decoded at once.

    A token of a byte-level BPE is bytes, not characters, and one character may take up to four tokens. Bytes are kept
    until their character is whole. Bytes that can belong to no character come out as U+FFFD as soon as that is
    certain, one per maximal ill-formed part, and what follows is not delayed.

    A row may end inside a character (it ran out of tokens). `flush` then gives one U+FFFD, exactly as decoding the
    whole row does, so that streamed and non-streamed text are equal.

    The characters that `push(id)` returns are those that `id` completed, so the lengths of the pieces are text offsets.

    Args:
        token_bytes: the bytes of one token, after the byte-level alphabet is undone.
        skip: ids that have no text, such as the special tokens.

    Source: maximal ill-formed parts as in Unicode 16, section 3.9, "U+FFFD Substitution of Maximal Subparts"; the
    `tokenizers` library (Rust's `from_utf8_lossy`) and Python's UTF-8 decoder both follow it.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skip: frozenset[int] = frozenset()) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; empty while it is inside a character."""
        return "" if token_id in self._skip else self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """The end of the row: U+FFFD if it ends inside a character, else nothing. The decoder is then as new."""
        tail = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return tail
