"""What a step takes, by roofline (Williams et al., "Roofline", CACM 2009): the linear layers either read their weights or compute.

    seconds = fixed + max(weights, rows × r) + decodes × d + KV tokens read × k + query-key pairs × a + chunks × c + copied × h

Every token computed is a row of the linear layers, of a prompt or decoded. `fixed` is launches and the host; a decode's own part is
what is done for each sequence beside its row: its logits over the vocabulary, sampling, its attention's start. A prompt's chunk
has all that too, and rows that fill no tile of a matrix product. Attention is added, for it does not overlap with the linear
layers: decodes read the K and V of their whole context, chunks compute the pairs of each token with all before it. A step waits for
K and V that come back from the host's memory; what goes there is copied beside the steps.

`ServiceCost` is what lies around the steps. Must not know: plans, machines.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step has to do. `kv_tokens`: positions whose K and V are read; `pairs`, query × key, and `chunks`: of prefill.

    `copied_tokens`: positions whose K and V come from the host's memory first.
    """

    prefill_tokens: int
    decode_tokens: int
    kv_tokens: int
    pairs: int
    chunks: int
    copied_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds: of a step, of reading all weights once, of a row, a decode, a position of context read, a pair, a chunk, a position
    copied."""

    step_s: float
    weights_s: float
    row_s: float
    decode_s: float
    kv_token_s: float
    pair_s: float = 0.0
    chunk_s: float = 0.0
    copy_token_s: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        linear_s = max(self.weights_s, (load.prefill_tokens + load.decode_tokens) * self.row_s)
        attention_s = load.kv_tokens * self.kv_token_s + load.pairs * self.pair_s
        sequences_s = load.decode_tokens * self.decode_s + load.chunks * self.chunk_s
        return self.step_s + linear_s + sequences_s + attention_s + load.copied_tokens * self.copy_token_s


@dataclass(frozen=True, slots=True)
class ServiceCost:
    """What the service adds, in seconds; as it is here where nobody has measured it.

    - client_s: between a client and the core, both ways together, in no queue: messages, validation, the commits of the request and
      of its first token, while steps keep the machine busy.
    - link_s: one way between scheduler and executor.
    - lead_s: how long before the end of a step the next plan is asked for, on average; who comes later than that waits for one step
      more. `prefill_lead`: as a share of a step that computes a prompt, for how long a chunk takes is not foreseen as well.
    """

    client_s: float = 0.0
    lead_s: float = 0.001
    prefill_lead: float = 0.0
    link_s: float = 0.0002

    def lead_of(self, step_s: float, prefills: bool) -> float:
        return max(self.lead_s, self.prefill_lead * step_s) if prefills else self.lead_s


UNMEASURED = ServiceCost()
