"""Ids, seeds and digests that the server draws or derives."""

from __future__ import annotations

import re
import subprocess
import sys

from tokenmill.inference.v1.types_pb2 import SamplingParams
from tokenmill_scheduler.intake import Intake
from tokenmill_scheduler.intake.request import digest_payload, draw_request_id

from tests.fakes.desk import FakeDesk
from tests.unit.servicers.calls import spec
from tests.unit.servicers.conftest import served_model


def test_drawn_ids_sort_by_time_and_are_well_formed() -> None:
    ids = [draw_request_id(now_s, lambda bits: (1 << bits) - 1) for now_s in (0.001, 1.0, 1_700_000_000.0, 1_700_000_000.001, 4e9)]
    ids.append(draw_request_id(4e9 + 0.001, lambda bits: 0))
    assert ids == sorted(set(ids))
    assert all(re.fullmatch(r"req-[0-9a-hjkmnp-tv-z]{26}", request_id) for request_id in ids)


async def test_a_seed_is_drawn_when_none_is_sent_and_kept_when_it_is_0() -> None:
    intake = Intake(FakeDesk(served_model()), clock=lambda: 1_700_000_000.0, randbits=lambda bits: (1 << bits) - 1)
    drawn = (await intake.take(spec(), detached=False)).request
    assert drawn.sampling.seed == 2**63 - 1
    assert drawn.arrival_s == 1_700_000_000.0
    assert (await intake.take(spec(sampling=SamplingParams(seed=0)), detached=False)).request.sampling.seed == 0


async def test_the_digest_is_of_what_was_sent_and_not_of_what_was_drawn() -> None:
    intake = Intake(FakeDesk(served_model()))
    first, second = [await intake.take(spec(request_id=request_id), detached=False) for request_id in ("a", "b")]
    assert first.request.sampling.seed != second.request.sampling.seed
    assert first.payload_digest == second.payload_digest


def test_the_digest_tells_payloads_apart() -> None:
    payloads = [
        spec(),
        spec(priority=1),
        spec(tenant="t"),
        spec(prompt=[5, 6]),
        spec(sampling=SamplingParams(max_tokens=9)),
        spec(sampling=SamplingParams(max_tokens=8, seed=0)),
        spec(sampling=SamplingParams(max_tokens=8, stop=["a", "b"])),
        spec(sampling=SamplingParams(max_tokens=8, stop=["b", "a"])),
    ]
    digests = {digest_payload(payload, detached) for payload in payloads for detached in (False, True)}
    assert len(digests) == 2 * len(payloads)


def test_the_digest_is_equal_in_another_process_and_does_not_follow_map_order() -> None:
    bias = dict.fromkeys(range(50), 1.0)
    here = digest_payload(spec(sampling=SamplingParams(logit_bias=bias)), detached=False)
    backwards = spec(sampling=SamplingParams(logit_bias=dict(reversed(bias.items()))))
    assert digest_payload(backwards, detached=False) == here
    program = (
        "import sys; from tokenmill.inference.v1.inference_pb2 import RequestSpec\n"
        "from tokenmill_scheduler.intake.request import digest_payload\n"
        "spec = RequestSpec.FromString(sys.stdin.buffer.read()); sys.stdout.buffer.write(digest_payload(spec, False))"
    )
    there = subprocess.run([sys.executable, "-c", program], input=backwards.SerializeToString(), capture_output=True, check=True)
    assert there.stdout == here
