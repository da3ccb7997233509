"""A short supervised warm-up on worked answers, so that reinforcement learning starts from a policy that is sometimes right."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_shard.common.seeds import derive_seed
from verl_shard.config.data_files import DataFiles
from verl_shard.quickstart.reward import compute_score
from verl_shard.training.data_of_tasks import Row, entry_of, read_rows
from verl_shard.training.data_tasks import task_of, worked_answer

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 250
BATCH_SIZE = 32
LEARNING_RATE = 1e-3
MAX_RESPONSE_LENGTH = 24
"""Tokens; no worked answer is longer."""


@dataclass(frozen=True)
class WarmupResult:
    """What a warm-up came to.

    val_reward: the mean reward of greedy answers to the validation prompts, as verl validates by default.
    loss: the mean cross-entropy per answer token over the last tenth of the steps.
    """

    val_reward: float
    seconds: float
    steps: int
    loss: float


@dataclass(frozen=True)
class _Example:
    prompt: list[int]
    answer: list[int]


def warm_up(
    model_dir: Path,
    data: DataFiles,
    *,
    seed: int,
    progress: Callable[[int, int, float], None] | None = None,
    steps: int = STEPS,
) -> WarmupResult:
    """Trains the model in `model_dir` on worked answers to the training prompts and writes its weights back.

    The work is bounded by steps, not by time, and is the same for the same seed. The learning rate falls to zero over them.
    `progress` is called after each step with the step, all steps and the loss. The weights file is replaced in one move at
    the end: before that an interrupt leaves the untrained model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert steps > 0, "a warm-up of no steps"
    start = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    examples = _examples(tokenizer, read_rows(data.train), seed)
    batches = _batches(examples, random.Random(derive_seed(seed, "warmup", "order")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        loss = _answer_loss(model, next(batches), tokenizer.pad_token_id)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if progress is not None:
            progress(step + 1, steps, losses[-1])
    val_reward = greedy_reward(model, tokenizer, read_rows(data.val))
    _save_weights(model, model_dir)
    last = losses[-max(steps // 10, 1) :]
    return WarmupResult(val_reward, time.monotonic() - start, steps, sum(last) / len(last))


def greedy_reward(model: Any, tokenizer: Any, rows: Sequence[Row], batch_size: int = 128) -> float:
    """The mean reward of the most probable answers to the prompts of `rows`."""
    import torch

    model.eval()
    total = 0.0
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        inputs = tokenizer.apply_chat_template(
            [row["prompt"] for row in batch],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_RESPONSE_LENGTH)
        answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for row, answer in zip(batch, answers, strict=True):
            total += compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"], row["extra_info"])
    return total / len(rows)


def _examples(tokenizer: Any, rows: Sequence[Row], seed: int) -> list[_Example]:
    chance = random.Random(derive_seed(seed, "warmup", "bare"))
    examples = []
    for row in rows:
        task = task_of(row["data_source"])
        text = worked_answer(task, entry_of(row), bare=chance.random() < task.bare_share)
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        examples.append(_Example(prompt, [*tokenizer.encode(text), tokenizer.eos_token_id]))
    return examples


def _batches(examples: Sequence[_Example], chance: random.Random) -> Iterator[list[_Example]]:
    """Batches without end, each example once before any comes again; a small set makes smaller batches."""
    size = min(BATCH_SIZE, len(examples))
    while True:
        order = chance.sample(examples, len(examples))
        for first in range(0, len(order) - size + 1, size):
            yield order[first : first + size]


def _answer_loss(model: Any, batch: Sequence[_Example], pad: int) -> Tensor:
    """Mean cross-entropy per token of the answers; prompts and padding count for nothing."""
    import torch

    length = max(len(example.prompt) + len(example.answer) for example in batch)
    tokens = torch.full((len(batch), length), pad)
    attended = torch.zeros_like(tokens)
    labels = torch.full_like(tokens, -100)
    for index, example in enumerate(batch):
        start, end = len(example.prompt), len(example.prompt) + len(example.answer)
        tokens[index, :end] = torch.tensor(example.prompt + example.answer)
        attended[index, :end] = 1
        labels[index, start:end] = tokens[index, start:end]
    loss: Tensor = model(input_ids=tokens, attention_mask=attended, labels=labels).loss
    return loss


def _save_weights(model: Any, model_dir: Path) -> None:
    """Replaces the folder's weights in one move; everything else in it stays."""
    # save_pretrained keeps a tied weight under the embedding's name, where a model with another head looks for it too.
    temporary = model_dir / f".weights.{os.getpid()}"
    try:
        model.save_pretrained(temporary)
        os.replace(temporary / "model.safetensors", model_dir / "model.safetensors")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
