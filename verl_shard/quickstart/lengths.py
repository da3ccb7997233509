"""How long prompts are, so that none has to be cut or dropped in silence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.config.data_files import DataFiles
from verl_shard.training.data_of_tasks import read_rows

OWN_RESPONSE = 128
"""Tokens of a response when nobody says, for a model of the user's own."""


@dataclass(frozen=True)
class Lengths:
    """Longest prompt and response, in tokens."""

    prompt: int
    response: int


def prompt_lengths(path: Path, model: Path | str) -> list[int]:
    """The tokens of each row's prompt under the model's chat template, with what opens the answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [row["prompt"] for row in read_rows(path)]
    texts: Sequence[str] = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
    return [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def choose_lengths(
    files: DataFiles,
    model: Path | str,
    *,
    max_prompt_length: int | None,
    max_response_length: int | None,
    default_response: int,
    batch_size: int,
) -> Lengths:
    """The lengths for verl: the longest prompt there is unless one is given, and the response's.

    Raises ConfigError, with all faults, for prompts longer than what is given, for fewer rows than a batch takes, and
    when prompt and response have more tokens than the model has positions.
    """
    from transformers import AutoConfig

    train, val = prompt_lengths(files.train, model), prompt_lengths(files.val, model)
    longest = max([*train, *val])
    lengths = Lengths(max_prompt_length or longest, max_response_length or default_response)
    faults = []
    if longest > lengths.prompt:
        longer = sum(length > lengths.prompt for length in [*train, *val])
        faults.append(
            Finding("error", "prompts-too-long", "--max-prompt-length", str(lengths.prompt),
                    f"{longer} of {len(train) + len(val)} prompts are longer, the longest has {longest} tokens",
                    f"Give {longest} or more, or take the long prompts out of the data")
        )  # fmt: skip
    if len(train) < batch_size:
        faults.append(
            Finding("error", "too-few-rows", "--batch-size", str(batch_size), f"there are only {len(train)} rows to train on",
                    f"Give {len(train)} or less, or more data")
        )  # fmt: skip
    positions = getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", None)
    if positions is not None and lengths.prompt + lengths.response > positions:
        room = positions - lengths.prompt
        faults.append(
            Finding("error", "too-long-for-model", "--max-response-length", str(lengths.response),
                    f"prompt {lengths.prompt} + response {lengths.response} = {lengths.prompt + lengths.response} tokens, and "
                    f"the model has {positions} positions",
                    f"Give {room} or less" if room > 0 else "Take shorter prompts, or a model with more positions")
        )  # fmt: skip
    if faults:
        raise ConfigError(faults)
    return lengths
