"""The counter between the servicers, which speak protobuf, and the loop, which owns the core: what may be asked of a scheduler.

`port.py` has the questions, `records.py` what they are answered with, `errors.py` what they raise. `service.Service` implements
`port.Desk`; servicers know nothing else of it. Must not know: protobuf, SQL, the plan protocol.
"""
