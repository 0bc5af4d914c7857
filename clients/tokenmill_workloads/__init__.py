"""Which requests come when: the fixed workloads, arrival processes and recorded traces that benchmarks send and simulations play.

    from tokenmill_workloads import burst, poisson, read_trace

    arrivals = at_rate(read_trace(path)[:1000], rate=2.0)

The standard library only. Must not know: tokenmill's client, its services, or how anything is sent or simulated.
"""

from tokenmill_workloads.arrivals import Arrival, at_rate, poisson, prompts, scale_lengths
from tokenmill_workloads.fixed import FIXED, burst, decode_heavy, prefill_heavy, shared_prefix, single_stream
from tokenmill_workloads.traces import Columns, TraceError, read_trace

__all__ = [
    "FIXED",
    "Arrival",
    "Columns",
    "TraceError",
    "at_rate",
    "burst",
    "decode_heavy",
    "poisson",
    "prefill_heavy",
    "prompts",
    "read_trace",
    "scale_lengths",
    "shared_prefix",
    "single_stream",
]
