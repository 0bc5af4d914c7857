"""Runs in OpenVINO GenAI's environment: reads workloads from standard input, a JSON object a line, and writes what each took.

python openvino_worker.py MODEL SLOTS
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    model, slots = sys.argv[1], int(sys.argv[2])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = slots
    scheduler.max_num_batched_tokens = 512
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 1
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    for line in sys.stdin:
        print(json.dumps(run(pipeline, json.loads(line))), flush=True)


def run(pipeline: Any, workload: dict[str, Any]) -> dict[str, Any]:
    inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in workload["prompts"]]
    configs = [config(count) for count in workload["output_tokens"]]
    start_s = time.perf_counter()
    results = pipeline.generate(inputs, configs)
    wall_s = time.perf_counter() - start_s
    return {"wall_s": wall_s, "made": [len(result.m_generation_ids[0]) for result in results]}


def config(count: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = count
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    main()
