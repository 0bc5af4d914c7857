"""Draws tokens from scaled logits: truncation by top-k, top-p and min-p, then inversion of the cumulative distribution.

Truncation is a threshold: a token is kept if its logit reaches it, so tokens that tie with the last kept one are kept too, and what
is kept does not hang on how a sort breaks ties. Tokens are summed up in the order of their ids. So a row's token depends on its
logits, its parameters and its uniform number, not on its batch nor on the path taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# How many of the largest tokens are looked at before all are sorted: sorting 49,152 takes ten times as long as finding these.
WIDTHS = (256, 4096)


@dataclass(frozen=True, slots=True)
class Truncation:
    """Parameters of each row, [rows] each: top_k int64, 0 is off; top_p, 1 is off; min_p, 0 is off. top_p and min_p float32."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def rows(self, index: torch.Tensor) -> Truncation:
        return Truncation(self.top_k[index], self.top_p[index], self.min_p[index])


def draw(scaled: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[rows, vocab_size] float32 whose largest is 0 in each row, and [rows] float64 in [0, 1) → tokens [rows].

    Overwrites `scaled`.
    """
    return _invert(scaled.exp_(), uniform)


def draw_truncated(
    scaled: torch.Tensor, truncation: Truncation, uniform: torch.Tensor, widths: tuple[int, ...] = WIDTHS
) -> torch.Tensor:
    """As `draw`, from the tokens that top-k, then top-p of what that leaves, then min-p keep.

    Rows for which so many of the largest tokens do not settle it take the next of `widths`, and in the end all: whether there are
    such rows the host has to see.
    """
    vocab_size = scaled.shape[1]
    tokens = torch.zeros(len(scaled), dtype=torch.int64, device=scaled.device)
    left = torch.arange(len(scaled), device=scaled.device)
    for width in (width for width in widths if width < vocab_size):
        tokens[left], settled = _draw_from_largest(scaled[left], truncation.rows(left), uniform[left], width)
        left = left[~settled]
        if not len(left):
            return tokens
    tokens[left], _ = _draw_from_largest(scaled[left], truncation.rows(left), uniform[left], vocab_size)
    return tokens


def _draw_from_largest(
    scaled: torch.Tensor, truncation: Truncation, uniform: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Looks at the `width` largest alone. → tokens, and whether those were all that the row keeps; if not, its token is wrong."""
    keeps_all = width == scaled.shape[1]
    largest, tokens = scaled.sort(dim=-1, descending=True) if keeps_all else scaled.topk(width, dim=-1)
    threshold, known = _threshold(largest, scaled, truncation, keeps_all)
    # Kept tokens beyond the width could only be ties with its last.
    settled = known & (keeps_all | (threshold > largest[:, -1]))
    tokens, order = tokens.sort(dim=-1)
    largest = largest.gather(1, order)
    weights = largest.exp().masked_fill(largest < threshold[:, None], 0.0)
    return tokens.gather(1, _invert(weights, uniform)[:, None]).squeeze(1), settled


def _threshold(
    largest: torch.Tensor, scaled: torch.Tensor, truncation: Truncation, keeps_all: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least logit kept in each row, and whether the `largest` (descending) sufficed to know it."""
    width = largest.shape[1]
    has_k, has_p = truncation.top_k > 0, truncation.top_p < 1
    lowest = torch.full_like(truncation.top_p, -torch.inf)

    kth = largest.gather(1, (truncation.top_k.clamp(1, width) - 1)[:, None]).squeeze(1)
    k_known = keeps_all | (truncation.top_k <= width)
    least_of_k = torch.where(has_k & (truncation.top_k <= width), kth, lowest)

    weights = largest.double().exp()
    of_k = weights.masked_fill(largest < least_of_k[:, None], 0.0)
    # Without top-k, the mass is that of the whole row, seen or not.
    total = torch.where(has_k, of_k.sum(1), scaled.exp().sum(1, dtype=torch.float64))
    cumulative = of_k.cumsum(1)
    # A token is kept while those before it hold less than top_p.
    kept = ((cumulative - of_k) < (truncation.top_p.double() * total)[:, None]).sum(1).clamp(min=1)
    p_known = keeps_all | (cumulative[:, -1] >= truncation.top_p * total)
    least_of_p = torch.where(has_p, largest.gather(1, (kept - 1)[:, None]).squeeze(1), lowest)

    least_of_min_p = truncation.min_p.log()  # relative to the largest, which is 0
    threshold = torch.maximum(torch.maximum(least_of_k, least_of_p), least_of_min_p)
    return threshold, (k_known | ~has_k) & (p_known | ~has_p)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first place at which the cumulative weights exceed uniform * total; so never one of weight 0. Sums in float64."""
    cumulative = weights.cumsum(1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    # Only rows that are not numbers go past the end; they are reported, and their place means nothing.
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=weights.shape[1] - 1)
