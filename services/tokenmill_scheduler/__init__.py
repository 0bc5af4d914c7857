"""The scheduler service: one asyncio loop that owns the core, and what lies between it and clients, executors and the database.

A map of its files, along a request's way; `loop` is the place to begin.

    it comes           servicers/, intake/, desk/, `loop_desk`; `arrivals` through the `gate` with its `tenants`, into ledger/
    it is decided on   `loop` and core/, asked for plans by the `pump`; `live` is what the loop knows of it, `stops` finds its
                       stop strings, the `recorder` has what happened made durable and told
    it runs            `executors`: a `link` to each address, a `session` an epoch, a `drive` at the `pacing` of its plans;
                       `wire` is the plan protocol in protobuf, `result_check` what may be answered
    it is told         `streams`, `readers`; `ranking` of several choices; text/
    it is changed      `control`, `changes`, `lookup`, `reads`; by operators through `operators`, `ordering_choice`
    its client goes    `abandoned`: by one that does not come back, or is `idle`
    it is kept         ledger/, `recovery` after a restart, `retention`; journal/ of every decision
    others             `peers` of the same database: `lease`, `relay` of commands, `followers` of streams, `handover` of requests
    it is watched      `overview`, `metrics`, `latency`, `tally`, `exposition`, `health`
    the process        `__main__`, `settings` from `flags`, `process`, `server` with `grpc_server`, `access`, `models`, `shutdown`;
                       the `clock`
"""
