"""What a step takes, by roofline (Williams et al., "Roofline", CACM 2009): the linear layers either read their weights or compute.

    seconds = fixed + max(weights, prefill tokens × p + decode tokens × d) + KV tokens read × k + query-key pairs × a

`fixed` is launches, sampling, the host. Attention is added, for it does not overlap with the linear layers: decodes read the K
and V of their whole context, chunks of a prefill compute the pairs of each token with all before it.

Must not know: plans, machines.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step has to do. `kv_tokens`: positions whose K and V are read; `pairs`: of prefill, query × key."""

    prefill_tokens: int
    decode_tokens: int
    kv_tokens: int
    pairs: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds: of a step, of reading all weights once, of a token, of a position of context read, of a query-key pair."""

    step_s: float
    weights_s: float
    prefill_token_s: float
    decode_token_s: float
    kv_token_s: float
    pair_s: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        linear_s = load.prefill_tokens * self.prefill_token_s + load.decode_tokens * self.decode_token_s
        attention_s = load.kv_tokens * self.kv_token_s + load.pairs * self.pair_s
        return self.step_s + max(self.weights_s, linear_s) + attention_s
