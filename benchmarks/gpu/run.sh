#!/usr/bin/env bash
# The executor on a GPU in one command: is it right, and how near to the device's bounds is it. Under eight minutes on an H200.
#
#   benchmarks/gpu/run.sh [--device cuda] [--model SmolLM2.gguf] [--budget-s 450] [--out DIR]
#   benchmarks/gpu/run.sh --device cpu --tiny          the same script on small shapes, Triton interpreted: that it runs at all
#
# Needs torch (CUDA build, which brings triton) and numpy. What else a machine lacks can travel as wheels in a folder named by WHEELS:
# structlog, which all of it needs; for --model also gguf, safetensors and tokenizers (with pyyaml and tqdm). transformers, where it is
# there, runs beside.
# PYTHON names the interpreter, OUT a folder for the results in place of benchmarks/gpu/results.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="protos:services:executor:clients${PYTHONPATH:+:$PYTHONPATH}"
if [[ -n "${WHEELS:-}" ]]; then
  unpacked=$(mktemp -d)
  trap 'rm -rf "$unpacked"' EXIT
  # One by one: a wheel for another Python costs the part that needs it, and not the run.
  for wheel in "$WHEELS"/*.whl; do
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$unpacked" "$wheel" || echo "left out: $wheel" >&2
  done
  PYTHONPATH="$PYTHONPATH:$unpacked"
fi
"$PYTHON" -m benchmarks.gpu "$@"
