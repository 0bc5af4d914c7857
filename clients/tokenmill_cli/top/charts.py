"""Charts out of characters. Must not know: what they show."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def area(values: Sequence[float], width: int, height: int, top: float, style: str) -> Text:
    """The last `width` values as columns of `height` lines, the newest at the right; `top` fills a column."""
    shown = [0.0] * (width - len(values)) + list(values[-width:])
    eighths = [0 if not top else max(round(8 * height * min(value / top, 1.0)), 1 if value > 0 else 0) for value in shown]
    lines = []
    for line in range(height - 1, -1, -1):
        lines.append("".join(_EIGHTHS[max(0, min(8, count - 8 * line))] for count in eighths))
    return Text("\n".join(lines), style=style, no_wrap=True)


def bar(parts: Sequence[tuple[int, str, str]], width: int) -> Text:
    """One line of `width` characters: each part (amount, character, style) has its share; what is not 0 has at least one."""
    total = sum(amount for amount, _, _ in parts)
    text, left = Text(no_wrap=True), width
    for index, (amount, character, style) in enumerate(parts):
        rest = sum(later > 0 for later, _, _ in parts[index + 1 :])
        cells = max(round(width * amount / total), 1) if total and amount else 0
        cells = left if amount and not rest else min(cells, left - rest)
        text.append(character * cells, style)
        left -= cells
    return text


def nice_top(value: float) -> float:
    """The next of 1, 2, 5, 10, 20 … above: a scale that does not jump with every value."""
    step = 1.0
    while True:
        for factor in (1, 2, 5):
            if factor * step >= value:
                return factor * step
        step *= 10
