"""Stop strings: finds the first of several in a text that arrives in parts, and holds back what may still become one.

Each stop string keeps how much of it the text ends in (Knuth, Morris and Pratt, 1977), so a character costs the same wherever it
stands, and the largest of these is exactly what must be held back. One automaton over all stop strings (Aho and Corasick) would
take fewer steps, and a hundred times the memory for each stream when a client sends as many and as long ones as it may.

Must not know: tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """The text of one request on its way to the client.

    The first stop string to be complete wins; of several complete at the same character the longest, which starts first. The text
    then ends where that stop string starts, or where it ends with `include`. What is given out depends on the text alone, not on
    how it was cut into parts.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`stops`: none empty."""
        # Longest first: of several complete at one character the first found is the one.
        self._stops = [_Stop(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""
        self.stopped = False

    def feed(self, text: str, may_stop: bool = True) -> str:
        """The text that can be given out now that `text` came; sets `stopped` when a stop string is complete.

        Unless it `may_stop`, one that this text completes is passed over; one that has only begun may be completed by a later one.
        """
        if self.stopped:
            return ""
        # Nearly every text is of this kind: no stop string has begun before it, and none begins in it.
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        for index, character in enumerate(text, 1):
            complete = [stop for stop in self._stops if stop.step(character)]
            if complete and may_stop:
                return self._stop(self._held + text[:index], complete[0])
            for stop in complete:
                stop.pass_over()
        return self._hold(self._held + text)

    def finish(self) -> str:
        """The text held back, which no stop string will end any more."""
        held, self._held = self._held, ""
        return held

    def _stop(self, seen: str, stop: _Stop) -> str:
        self._held, self.stopped = "", True
        return seen if self._include else seen.removesuffix(stop.text)

    def _hold(self, seen: str) -> str:
        shown = len(seen) - max(stop.matched for stop in self._stops)
        self._held = seen[shown:]
        return seen[:shown]


class _Stop:
    """A stop string and `matched`, how many of its first characters the text ends in."""

    __slots__ = ("_fallbacks", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallbacks = _fallbacks(text)

    def step(self, character: str) -> bool:
        """Whether the stop string is complete with this character; it then takes no more until it is passed over."""
        matched = self.matched
        while matched and self.text[matched] != character:
            matched = self._fallbacks[matched]
        self.matched = matched + (self.text[matched] == character)
        return self.matched == len(self.text)

    def pass_over(self) -> None:
        """It is complete, and may be so again with what comes, its own end being the next one's start."""
        self.matched = self._fallbacks[self.matched]


@lru_cache(maxsize=1_024)
def _fallbacks(text: str) -> tuple[int, ...]:
    """For each length n: how long the longest proper suffix of `text[:n]` is that `text` begins with."""
    fallbacks = [0, 0]
    for character in text[1:]:
        length = fallbacks[-1]
        while length and text[length] != character:
            length = fallbacks[length]
        fallbacks.append(length + (text[length] == character))
    return tuple(fallbacks)
