"""Stop strings: finds the first of several in a text that arrives in parts, and holds back what may still become one.

An Aho-Corasick automaton (Aho and Corasick, 1975): one look-up a character whatever the number of stop strings, and the depth of
its state is the length of the longest suffix of the text that begins a stop string, which is exactly what must be held back.

Must not know: tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A prefix of a stop string. `match` is the length of the longest stop string that ends here, 0 for none."""

    depth: int
    match: int = 0
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None


def _trie(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.match = node.depth
    return root


def _automaton(stops: Sequence[str]) -> _Node:
    """The trie, each node with its fallback: the longest proper suffix of its prefix that is itself in the trie."""
    root = _trie(stops)
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for character, child in node.children.items():
            child.fallback = root if node is root else _next(node.fallback or root, character)
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root


def _next(node: _Node, character: str) -> _Node:
    while (child := node.children.get(character)) is None:
        if node.fallback is None:
            return node
        node = node.fallback
    return child


class StopMatcher:
    """The text of one request on its way to the client.

    The first stop string to be complete wins; of several complete at the same character the longest, which starts first. The text
    then ends where that stop string starts, or where it ends with `include`. What is given out depends on the text alone, not on
    how it was cut into parts.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._node = _automaton(stops)
        self._include = include
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that can be given out now that `text` came; sets `stopped` when a stop string is complete."""
        if self.stopped or not text:
            return ""
        node = self._node
        for index, character in enumerate(text):
            node = _next(node, character)
            if node.match:
                return self._stop(text[: index + 1], node.match)
        self._node = node
        return self._hold(self._held + text, node.depth)

    def finish(self) -> str:
        """The text held back, which no stop string will end any more."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str, match: int) -> str:
        seen, self._held, self.stopped = self._held + text, "", True
        return seen if self._include else seen[:-match]

    def _hold(self, seen: str, length: int) -> str:
        shown = len(seen) - length
        self._held = seen[shown:]
        return seen[:shown]
