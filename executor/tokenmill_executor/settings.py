"""The executor's settings: flags, each also an environment variable TOKENMILL_<FLAG>, validated once at start.

Must not know: torch, gRPC. What only the loaded model can tell (whether it fits) is checked in `loading.py`.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tokenmill_executor.prefix import HASH_ALGORITHMS

SIMULATED = "simulated"
DEFAULT_LISTEN = "127.0.0.1:7601"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class SettingsError(Exception):
    """An operator's mistake; the text is one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class SimulatedCost:
    """Of the simulated runner: what a step takes, with which output token a sequence ends (0: none), which token kills it."""

    step_ms: float
    prefill_token_us: float
    decode_token_us: float
    eos_every: int
    poison_token: int | None


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Paths of PEM files. With `client_ca`, clients must show a certificate that it has signed (mutual TLS)."""

    cert: Path
    key: Path
    client_ca: Path | None


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
    block_size: int
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    num_gpu_blocks_override: int | None
    enable_prefix_caching: bool
    prefix_caching_hash_algo: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    served_model_name: str | None
    pipeline_depth: int
    threads: int | None
    max_message_bytes: int
    shutdown_timeout_s: float
    port_file: Path | None
    log_format: str
    log_level: str
    simulated: SimulatedCost
    tls: ServerTls | None


def parse_settings(argv: SequenceOf[str], environ: Mapping[str, str]) -> Settings:
    """Flags win over the environment. Raises SettingsError; `--help` prints and raises SystemExit."""
    flags = parser()
    values = vars(flags.parse_args([*_environment_flags(flags, environ), *argv]))
    cost = SimulatedCost(
        step_ms=values.pop("simulated_step_ms"),
        prefill_token_us=values.pop("simulated_prefill_token_us"),
        decode_token_us=values.pop("simulated_decode_token_us"),
        eos_every=values.pop("simulated_eos_every"),
        poison_token=values.pop("simulated_poison_token"),
    )
    values["model"] = resolve_model(values["model"], environ)
    tls = _server_tls(values)
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
    folder = model_cache(environ) / model.lower()
    if not folder.is_dir():
        raise SettingsError(
            f"--model {model} is no path, and no model in {folder.parent}: give a path, or run `tokenmill models pull`"
        )
    files = sorted(folder.glob("*.gguf"))
    return str(files[0] if len(files) == 1 else folder)


# ---- flags ---------------------------------------------------------------------------------------------------------------------


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def parser() -> argparse.ArgumentParser:
    """Of all flags; `docs/settings.md` is made from it."""
    parser = _Parser(
        prog="python -m tokenmill_executor",
        description="Runs a model for a tokenmill scheduler.",
        epilog="Each flag is also an environment variable: --max-num-seqs is TOKENMILL_MAX_NUM_SEQS. A flag wins.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    for group, flags in _FLAGS.items():
        section = parser.add_argument_group(group)
        for flag, options in flags.items():
            section.add_argument(flag, **options)
    return parser


def _environment_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> list[str]:
    flags = []
    for action in parser._actions:
        value = environ.get(f"TOKENMILL_{action.dest.upper()}")
        if value is not None and action.option_strings:
            flags.append(_environment_flag(action, value))
    return flags


def _environment_flag(action: argparse.Action, value: str) -> str:
    if not isinstance(action, argparse.BooleanOptionalAction):
        return f"{action.option_strings[-1]}={value}"
    on, off = action.option_strings
    words = {"1": on, "true": on, "yes": on, "0": off, "false": off, "no": off}
    if value.lower() not in words:
        raise SettingsError(f"TOKENMILL_{action.dest.upper()} is {value!r}: say true or false")
    return words[value.lower()]


def _server_tls(values: Mapping[str, Any]) -> ServerTls | None:
    cert, key, client_ca = values["tls_cert"], values["tls_key"], values["tls_client_ca"]
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise SettingsError("--tls-cert and --tls-key are needed for TLS, one is missing: give a certificate and its private key")
    if values["listen"].startswith("unix:"):
        raise SettingsError("--tls-cert is of no use on a unix socket, which its file's permissions guard: leave it out")
    return ServerTls(cert, key, client_ca)


def _file(text: str) -> Path | None:
    """Empty: none, which takes back what the environment says."""
    return Path(text) if text else None


def _count(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _count_or_zero(text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _fraction(text: str) -> float:
    value = _duration(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return value


def parse_bytes(text: str) -> int:
    """A number of bytes, with a unit or without: 2GiB, 512 MiB, 4e9 is not one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text.strip(), re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS or (size := int(float(match[1]) * _UNITS[match[2].upper()])) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2GiB or 512MiB")
    return size


_FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "model": {
        "--model": {"required": True, "help": "a Hugging Face folder, a GGUF file, a name in the model cache, or `simulated`"},
        "--served-model-name": {"help": "the name clients use; without it, the model's own"},
        "--dtype": {
            "choices": ("auto", "float32", "bfloat16"),
            "default": "auto",
            "help": "float32 gives the tokens of transformers; auto is fast: bfloat16 on CUDA and where a CPU has kernels for it",
        },
        "--quantization": {"choices": ("int8",), "help": "of the weights, on a CPU; faster, a little less exact"},
        "--device": {"default": "auto", "help": "cpu, cuda or cuda:N; auto is CUDA if there is a device"},
        "--max-model-len": {"type": _count, "help": "most tokens of a sequence, prompt and output; without it, the model's limit"},
        "--threads": {"type": _count, "help": "threads of a CPU forward pass; without it, torch's choice"},
    },
    "KV cache": {
        "--kv-cache-dtype": {
            "choices": ("auto", "bfloat16", "int8"),
            "default": "auto",
            "help": "auto is the model's type; int8, on a CPU, halves the cache",
        },
        "--block-size": {"type": _count, "default": 16, "help": "token positions in a KV block"},
        "--kv-cache-memory-bytes": {
            "type": parse_bytes,
            "help": "for the KV cache, such as 2GiB; on a CPU without it, a quarter of the memory, at most 4GiB",
        },
        "--gpu-memory-utilization": {"type": _fraction, "default": 0.9, "help": "share of a GPU's memory for weights and KV cache"},
        "--num-gpu-blocks-override": {"type": _count, "help": "number of KV blocks, whatever the memory"},
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
    },
    "steps": {
        "--max-num-seqs": {"type": _count, "default": 256, "help": "most sequences in a step"},
        "--max-num-batched-tokens": {"type": _count, "default": 8192, "help": "most tokens in a step"},
        "--pipeline-depth": {"type": _count, "default": 2, "help": "most plans unanswered at once"},
    },
    "service": {
        "--listen": {"default": DEFAULT_LISTEN, "help": "HOST:PORT (port 0: any free one), or unix:PATH"},
        "--name": {"help": "unique name of this executor; without it, host name and address"},
        "--max-message-bytes": {"type": parse_bytes, "default": "64MiB", "help": "largest plan or result"},
        "--shutdown-timeout-s": {"type": _duration, "default": 30.0, "help": "on SIGTERM, how long plans in hand may take"},
        "--port-file": {"type": Path, "help": "a file to write the address to, once ready"},
        "--log-format": {"choices": ("console", "json"), "default": "console", "help": "of the log on standard error"},
        "--log-level": {"choices": ("debug", "info", "warning", "error"), "default": "info", "help": "least level logged"},
    },
    "security": {
        "--tls-cert": {"type": _file, "default": None, "help": "PEM file of the certificate to serve with; turns on TLS"},
        "--tls-key": {"type": _file, "default": None, "help": "PEM file of its private key"},
        "--tls-client-ca": {
            "type": _file,
            "default": None,
            "help": "PEM file of the authority whose certificates clients must show (mutual TLS)",
        },
    },
    "simulated model": {
        "--simulated-step-ms": {"type": _duration, "default": 10.0, "help": "what each step takes"},
        "--simulated-prefill-token-us": {"type": _duration, "default": 50.0, "help": "and for each token of a prompt"},
        "--simulated-decode-token-us": {"type": _duration, "default": 20.0, "help": "and for each decoding sequence"},
        "--simulated-poison-token": {
            "type": _count_or_zero,
            "metavar": "ID",
            "help": "a step that computes this token kills the process, to try what the scheduler makes of that",
        },
        "--simulated-eos-every": {"type": _count_or_zero, "default": 0, "help": "end a sequence with this output token; 0: never"},
    },
}


def settings_from_process(argv: SequenceOf[str]) -> Settings:
    return parse_settings(argv, os.environ)
