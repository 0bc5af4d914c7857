"""The running service gives transformers' greedy tokens, exactly, in float32: every process is real, and so is the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenmill_client import AsyncClient
from tokenmill_client.options import GenerateOptions
from tokenmill_client.records import Output

from tests.fakes.models import greedy_choices, random_model, smollm2_path, transformers_smollm2
from tests.fakes.processes import Processes

NEW_TOKENS = 64
PATIENCE_S = 200.0
TOPICS = (
    "the tides", "a recipe for bread", "prime numbers", "the French revolution", "how a bicycle stays upright", "borrow checkers",
    "volcanoes", "a letter to an old friend", "chess openings", "the water cycle", "why cats purr", "SQL joins",
)  # fmt: skip
FORMS = (
    "<|im_start|>user\nTell me in a few plain sentences about {}.<|im_end|>\n<|im_start|>assistant\n",
    "Chapter 7. On {}, with an aside of 1,234 words – 日本語 and café included\n\n",
)
PROMPTS = [form.format(topic) for topic in TOPICS for form in FORMS]


async def generate_together(
    address: str, prompts: Mapping[str, Sequence[str] | Sequence[list[int]]], count: int
) -> list[list[Output]]:
    """The outputs of all prompts of all models, sent at once."""
    async with AsyncClient(address) as client:
        await client.wait_ready(timeout=PATIENCE_S)

        async def one(model: str, prompt: str | list[int]) -> Output:
            options: GenerateOptions = {"model": model, "temperature": 0.0, "max_tokens": count, "ignore_eos": True}
            if isinstance(prompt, str):
                return await client.generate(prompt, **options).result()
            options["token_ids"] = prompt
            return await client.generate(**options).result()

        flat = await asyncio.gather(*(one(model, prompt) for model, several in prompts.items() for prompt in several))
        outputs = iter(flat)
        return [[next(outputs) for _ in several] for several in prompts.values()]


async def preemptions(address: str) -> int:
    async with AsyncClient(address) as client:
        return (await client.admin.get_load()).preemptions


# A busy machine takes minutes for the service's part, and as long again for transformers to read the file.
@pytest.mark.timeout(900)
async def test_24_prompts_in_chunks_with_preemptions_on_smollm2(processes: Processes) -> None:
    # 16 tokens a step for up to 12 sequences: every prompt is computed in chunks. 12 sequences grow to more blocks than 48.
    executor = processes.executor(
        "--model", str(smollm2_path()), "--served-model-name", "smollm2", "--dtype", "float32", "--num-gpu-blocks-override", "48",
        "--threads", "2", "--no-enable-prefix-caching",
    )  # fmt: skip
    scheduler = processes.scheduler(executor.address, flags=("--max-num-seqs", "12", "--max-num-batched-tokens", "16"))
    (outputs,) = await generate_together(scheduler.address, {"smollm2": PROMPTS}, NEW_TOKENS)
    assert await preemptions(scheduler.address) > 0
    executor.stop()

    oracle, _ = transformers_smollm2(smollm2_path())
    tokenizer = Tokenizer.from_str(_tokenizer_of_smollm2())
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer.encode(prompt).ids
        assert len(ids) > 16
        tokens = list(output.token_ids)
        assert len(tokens) == NEW_TOKENS
        assert tokens == greedy_choices(oracle, [*ids, *tokens], len(ids)), prompt


async def test_one_scheduler_serves_random_models_of_four_families(processes: Processes, tmp_path: Path) -> None:
    families = ("llama", "mistral", "qwen2", "qwen3")
    models = {family: random_model(family) for family in families}
    executors = []
    for family, model in models.items():
        folder = tmp_path / family
        model.save_pretrained(folder)
        _write_tokenizer(folder, model.config.vocab_size)
        executors.append(processes.executor("--model", str(folder), "--dtype", "float32", "--threads", "1", name=family))
    scheduler = processes.scheduler(*(executor.address for executor in executors), flags=("--max-num-batched-tokens", "64"))

    prompts = [[3 + n, 5, 7 * n + 4, 11] * (n + 1) for n in range(6)]
    outputs = await generate_together(scheduler.address, dict.fromkeys(families, prompts), 24)
    for family, of_model in zip(families, outputs, strict=True):
        for ids, output in zip(prompts, of_model, strict=True):
            tokens = list(output.token_ids)
            assert tokens == greedy_choices(models[family], [*ids, *tokens], len(ids)), (family, ids)


def _tokenizer_of_smollm2() -> str:
    from tokenmill_executor.model.tokenizer_files import tokenizer_files
    from tokenmill_executor.model.weights import load_checkpoint

    return tokenizer_files(load_checkpoint(smollm2_path()).source)["tokenizer.json"].decode()


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    words = {f"w{token}": token for token in range(vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(2)
