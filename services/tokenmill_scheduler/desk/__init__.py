"""The counter between the servicers, which speak protobuf, and the loop, which owns the core: what may be asked of a scheduler.

`port.py` has the questions, `records.py` what they are answered with, `errors.py` what they raise. `LoopDesk` and `Operators`
answer them; servicers know nothing else of either. Must not know: protobuf, SQL, how it is answered.
"""
