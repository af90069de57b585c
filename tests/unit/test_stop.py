"""Stop strings: the right cut, wherever tokens begin and end, and no text held for nothing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bluejay.generate import StopMatcher


def run(pieces: Iterable[str], *stops: str) -> tuple[list[str], str | None]:
    """What each piece shows, with the flush at the end, and the stop string that was hit."""
    matcher, shown = StopMatcher(stops), []
    for piece in pieces:
        emit, hit = matcher.push(piece)
        shown.append(emit)
        if hit is not None:
            assert matcher.flush() == ""
            return shown, hit
    return [*shown, matcher.flush()], None


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The definition, read off the whole text: at the first character that ends a stop string, the longest such."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "hit"),
    [
        # B-60, with the token texts of its ids: 24694 32988 17511 23852; "The quick brown fox"; 198 12982 25
        (["ABC", "DEF", "GH", "IJ"], ("DEFGHIJ",), ["ABC", "", "", ""], "DEFGHIJ"),
        (["The", " quick", " brown", " fox"], ("own fox",), ["The", " quick", " br", ""], "own fox"),
        (["Hi", "\n", "User", ":"], ("\nUser:",), ["Hi", "", "", ""], "\nUser:"),
        (["ABC", "DEF", "GH", "IJ"], ("DEFX",), ["ABC", "", "DEFGH", "IJ", ""], None),  # false alarm
        (["ABC", "DEF"], ("DEFG",), ["ABC", "", "DEF"], None),  # ends while holding
        (["ABC", "DEF", "GH", "IJ"], ("IJ", "F"), ["ABC", "DE"], "F"),  # earlier match, later in the list
        (["x", "a", "a", "a", "b", "y"], ("aab",), ["x", "", "", "a", ""], "aab"),  # overlapping prefixes
        (["a", "b"], ("ab", "b"), ["", ""], "ab"),  # both end here: the longest
        (["b", "ab"], ("bab", "a"), ["b", ""], "a"),  # complete first, though the other begins first: nothing to hold
        (["ABC", "DEF"], (), ["ABC", "DEF", ""], None),
        (["stop here"], ("stop",), [""], "stop"),  # several tokens' text in one piece, cut in front
    ],
)
def test_known_cases(pieces: list[str], stops: tuple[str, ...], shown: list[str], hit: str | None) -> None:
    """Catches a match lost across tokens, a cut only at token borders, held text never released (B-60)."""
    assert run(pieces, *stops) == (shown, hit)


def test_holds_a_prefix_and_not_a_window() -> None:
    """Catches holding the last len(stop) characters always, which delays every stream (B-60)."""
    assert run(["nothing of it", " here"], "\n\nQuestion:") == (["nothing of it", " here", ""], None)


def test_text_goes_on_after_a_flush() -> None:
    """Catches held text that is shown twice."""
    matcher = StopMatcher(("ab",))
    assert [matcher.push("xa"), matcher.flush(), matcher.push("b"), matcher.flush()] == [
        ("x", None),
        "a",
        ("b", None),
        "",
    ]


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple)
PIECES = st.lists(st.text("abc", max_size=4), max_size=8)


@settings(max_examples=300, deadline=None)
@given(PIECES, STOPS)
def test_any_cut_of_the_text_gives_the_definition(pieces: list[str], stops: tuple[str, ...]) -> None:
    """Catches every dependence on where tokens end, every wrong cut, and every lost or doubled character."""
    shown, hit = run(pieces, *stops)
    assert ("".join(shown), hit) == first_stop("".join(pieces), stops)


@settings(max_examples=300, deadline=None)
@given(PIECES, STOPS)
def test_held_text_could_still_have_to_be_cut(pieces: list[str], stops: tuple[str, ...]) -> None:
    """Catches holding more than is needed: for what is held there is a continuation that cuts exactly there."""
    matcher, text, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        emit, hit = matcher.push(piece)
        if hit is not None:
            return
        text, shown = text + piece, shown + emit
        held = text[len(shown) :]
        assert text == shown + held
        if held:
            futures = [stop[len(held) :] for stop in stops if stop.startswith(held)]
            assert any(first_stop(text + future, stops)[0] == shown for future in futures)
