"""Stop strings in a growing text, wherever the pieces are cut."""

from __future__ import annotations


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, and says how much of the text may be shown.

    The first is the one that is complete first, because generation ends there and cannot know what would have come;
    of several that end at the same character, the longest. The text ends before the match, which may be inside a token.
    How the text is cut into pieces changes nothing.

    Held back is only the longest end of the text that begins some stop string: what cannot become a match is shown at
    once. Only generated text is pushed, so a stop string in the prompt stops nothing.

    Args:
        stops: non-empty strings; none means that all text passes.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string would match everywhere; requests are checked before they come here"
        # A stop string that has another one before its last character is never complete first. Left in, it would hold
        # text back for nothing. Without such, the match that is complete first, or the longest of those, also begins
        # first.
        self._stops = tuple(s for s in stops if not any(other in s[:-1] for other in stops))
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that ended the text, if one did.

        After a stop string is found the text is over: push nothing more.
        """
        window = self._held + text
        # A match cannot begin before the held text, or more would have been held.
        found = [(start, stop) for stop in self._stops if (start := window.find(stop)) >= 0]
        if found:
            start, stop = min(found)
            self._held = ""
            return window[:start], stop
        keep = self._num_held(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], None

    def flush(self) -> str:
        """The end of the text without a stop string: what was held back."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, window: str) -> int:
        """Characters at the end of the text that are a proper prefix of a stop string, the most of them."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(window)), 0, -1):
            if any(len(stop) > count and stop.startswith(window[-count:]) for stop in self._stops):
                return count
        return 0
