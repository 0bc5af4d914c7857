"""The executor's settings: flags, each also an environment variable TOKENMILL_<FLAG>, validated once at start.

Must not know: torch, gRPC. What only the loaded model can tell (whether it fits) is checked in `loading.py`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill_service.address import check_address, check_metrics_address
from tokenmill_service.flags import (
    LOG_FLAGS,
    METRICS_FLAGS,
    TLS_FLAGS,
    FlagParser,
    SettingsError,
    count,
    count_or_zero,
    fraction,
    message_bytes,
    number,
    seconds,
    size_bytes,
)
from tokenmill_service.tls import ServerTls, server_tls

from tokenmill_executor.prefix import HASH_ALGORITHMS

SIMULATED = "simulated"
DEFAULT_LISTEN = "127.0.0.1:7601"


@dataclass(frozen=True, slots=True)
class SimulatedCost:
    """Of the simulated runner: what a step takes, with which output token a sequence ends (0: none), which token kills it."""

    step_ms: float
    prefill_token_us: float
    decode_token_us: float
    eos_every: int
    poison_token: int | None


@dataclass(frozen=True, slots=True)
class Settings:
    """`model` is "simulated" or an existing path. None leaves the choice to the model or the machine; no `tls` is plaintext."""

    model: str
    name: str | None
    listen: str
    dtype: str
    device: str
    quantization: str | None
    kv_cache_dtype: str
    attention_backend: str
    block_size: int
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    num_gpu_blocks_override: int | None
    sliding_window: int | None
    attention_sinks: int
    enable_prefix_caching: bool
    prefix_caching_hash_algo: str
    kv_offloading_size: float
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    served_model_name: str | None
    pipeline_depth: int
    enforce_eager: bool
    threads: int | None
    max_message_bytes: int
    shutdown_timeout_s: float
    metrics_address: str
    port_file: Path | None
    log_format: str
    log_level: str
    simulated: SimulatedCost
    tls: ServerTls | None


def parse_settings(argv: SequenceOf[str], environ: Mapping[str, str]) -> Settings:
    """Flags win over the environment. Raises SettingsError; `--help` prints and raises SystemExit."""
    values = parser().values(argv, environ)
    cost = SimulatedCost(
        step_ms=values.pop("simulated_step_ms"),
        prefill_token_us=values.pop("simulated_prefill_token_us"),
        decode_token_us=values.pop("simulated_decode_token_us"),
        eos_every=values.pop("simulated_eos_every"),
        poison_token=values.pop("simulated_poison_token"),
    )
    values["model"] = resolve_model(values["model"], environ)
    values["listen"] = check_address(values["listen"], "--listen")
    values["metrics_address"] = check_metrics_address(values["metrics_address"])
    tls = server_tls(values)
    for flag in ("tls_cert", "tls_key", "tls_client_ca"):
        del values[flag]
    return Settings(**values, simulated=cost, tls=tls)


def model_cache(environ: Mapping[str, str]) -> Path:
    """Where models fetched by name lie: TOKENMILL_CACHE, or tokenmill/ in the user's cache folder."""
    if cache := environ.get("TOKENMILL_CACHE"):
        return Path(cache) / "models"
    user_cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache"
    return Path(user_cache) / "tokenmill" / "models"


def resolve_model(model: str, environ: Mapping[str, str]) -> str:
    """The path that `model` means: itself, or a folder of the model cache (the GGUF file in it, if it holds exactly one)."""
    if model == SIMULATED or Path(model).exists():
        return model
    cache = model_cache(environ)
    folder = cache / model.lower()
    if not folder.is_dir():
        raise SettingsError(f"--model {model} is no path, and no model in {cache}: give a path, or run `tokenmill models pull`")
    files = sorted(folder.glob("*.gguf"))
    return str(files[0] if len(files) == 1 else folder)


# ---- flags ---------------------------------------------------------------------------------------------------------------------


def parser() -> FlagParser:
    """Of all flags; `docs/settings.md` is made from it."""
    return FlagParser(
        _FLAGS,
        prog="python -m tokenmill_executor",
        description="Runs a model for a tokenmill scheduler.",
        epilog="Each flag is also an environment variable: --max-num-seqs is TOKENMILL_MAX_NUM_SEQS. A flag wins.",
    )


_FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "model": {
        "--model": {"required": True, "help": "a Hugging Face folder, a GGUF file, a name in the model cache, or `simulated`"},
        "--served-model-name": {"help": "the name clients use; without it, the model's own"},
        "--dtype": {
            "choices": ("auto", "float32", "bfloat16"),
            "default": "auto",
            "help": "float32 gives the tokens of transformers; auto is fast: bfloat16 on CUDA and where a CPU has kernels for it",
        },
        "--quantization": {
            "choices": ("int8", "int4", "fp8"),
            "help": "of the weights; faster, less exact; int4 is for a CPU and takes Q4_0 and Q4_1 of GGUF files as they are, "
            "fp8 is for CUDA",
        },
        "--device": {"default": "auto", "help": "cpu, cuda or cuda:N; auto is CUDA if there is a device"},
        "--max-model-len": {"type": count, "help": "most tokens of a sequence, prompt and output; without it, the model's limit"},
        "--threads": {"type": count, "help": "threads of a CPU forward pass; without it, torch's choice"},
    },
    "KV cache": {
        "--kv-cache-dtype": {
            "choices": ("auto", "bfloat16", "int8", "int4", "fp8"),
            "default": "auto",
            "help": "auto is the model's type; int8 and fp8 halve a bfloat16 cache, int4 has more than three times its tokens and "
            "is less exact; on a CPU the C++ kernels have auto, bfloat16 and int8",
        },
        "--attention-backend": {
            "choices": ("auto", "reference", "triton", "flashinfer"),
            "default": "auto",
            "help": "on CUDA; auto is triton; flashinfer needs the package flashinfer-python, and an unquantised cache",
        },
        "--block-size": {"type": count, "default": 16, "help": "token positions in a KV block"},
        "--kv-cache-memory-bytes": {
            "type": size_bytes,
            "help": "for the KV cache, such as 2GiB; on a CPU without it, a quarter of the memory of the machine or the "
            "container, at most 4GiB; on a CPU it is taken from the system while there is nothing else to do, not under load",
        },
        "--gpu-memory-utilization": {"type": fraction, "default": 0.9, "help": "share of a GPU's memory for weights and KV cache"},
        "--num-gpu-blocks-override": {"type": count, "help": "number of KV blocks, whatever the memory"},
        "--sliding-window": {
            "type": count,
            "help": "most positions that a token attends to; layers of the model that have a shorter window keep it",
        },
        "--attention-sinks": {
            "type": count_or_zero,
            "default": 0,
            "help": "first positions of a sequence that tokens attend to although their window has left them behind",
        },
        "--enable-prefix-caching": {
            "action": argparse.BooleanOptionalAction,
            "default": True,
            "help": "keep the blocks of ended sequences, and start sequences that begin alike from them",
        },
        "--prefix-caching-hash-algo": {
            "choices": HASH_ALGORITHMS,
            "default": "sha256",
            "help": "xxhash, from the package of that name, is faster, but prompts can be made that pass for one another, and the "
            "scheduler cannot foretell what is cached",
        },
        "--kv-offloading-size": {
            "type": number,
            "default": 0.0,
            "help": "GiB of host memory for blocks that the prefix cache has no room for, those of preempted sequences among them: "
            "they are copied back where that is quicker than to compute them; 0: none; on a CPU it is the same memory as the cache",
        },
    },
    "steps": {
        "--max-num-seqs": {"type": count, "default": 256, "help": "most sequences in a step"},
        "--max-num-batched-tokens": {"type": count, "default": 8192, "help": "most tokens in a step"},
        "--pipeline-depth": {"type": count, "default": 2, "help": "most plans unanswered at once"},
        "--enforce-eager": {
            "action": argparse.BooleanOptionalAction,
            "default": False,
            "help": "on CUDA, launch decode steps operation by operation and capture no graphs: a quicker start and slower steps, "
            "most of all for few sequences",
        },
    },
    "service": {
        "--listen": {"default": DEFAULT_LISTEN, "help": "HOST:PORT (port 0: any free one), or unix:PATH"},
        "--name": {"help": "unique name of this executor; without it, host name and address"},
        "--max-message-bytes": {"type": message_bytes, "default": "64MiB", "help": "largest plan or result"},
        "--shutdown-timeout-s": {"type": seconds, "default": 30.0, "help": "on SIGTERM, how long plans in hand may take"},
        "--port-file": {"type": Path, "help": "a file to write the address to, once ready"},
        **METRICS_FLAGS,
        **LOG_FLAGS,
    },
    "security": TLS_FLAGS,
    "simulated model": {
        "--simulated-step-ms": {"type": number, "default": 10.0, "help": "what each step takes"},
        "--simulated-prefill-token-us": {"type": number, "default": 50.0, "help": "and for each token of a prompt"},
        "--simulated-decode-token-us": {"type": number, "default": 20.0, "help": "and for each decoding sequence"},
        "--simulated-poison-token": {
            "type": count_or_zero,
            "metavar": "ID",
            "help": "a step that computes this token kills the process, to try what the scheduler makes of that",
        },
        "--simulated-eos-every": {"type": count_or_zero, "default": 0, "help": "end a sequence with this output token; 0: never"},
    },
}


def settings_from_process(argv: SequenceOf[str]) -> Settings:
    return parse_settings(argv, os.environ)
