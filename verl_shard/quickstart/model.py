"""The quick start's model: a Llama of about two million parameters, as an ordinary Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_shard.common.seeds import derive_seed
from verl_shard.config.data_files import DataFiles
from verl_shard.quickstart.tokenizer import END, MAX_LENGTH, PAD, train_tokenizer
from verl_shard.training.data_of_tasks import Row, entry_of, read_rows
from verl_shard.training.data_tasks import task_of, worked_answer


def make_model(out_dir: Path, data: DataFiles, *, seed: int) -> Path:
    """Writes an untrained model and its tokenizer to `out_dir` and returns it; the folder is whole or not there.

    It loads with AutoModelForCausalLM and AutoTokenizer as any model does. A folder that is there already is replaced.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer(_texts(read_rows(data.train)))
    end, pad = (tokenizer.convert_tokens_to_ids(token) for token in (END, PAD))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model"))
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, bos_token_id=None, eos_token_id=end, pad_token_id=pad)
    save_model(model, tokenizer, out_dir)
    return out_dir


def save_model(model: Any, tokenizer: Any, out_dir: Path) -> None:
    """Writes both, in place of what is there: a reader sees the old folder or the whole new one."""
    temporary = out_dir.with_name(f".{out_dir.name}.{os.getpid()}")
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if out_dir.exists():
            shutil.rmtree(out_dir)
        os.replace(temporary, out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _texts(rows: list[Row]) -> Iterator[str]:
    """What the model will read and write, as the chat template joins it between its special tokens."""
    for row in rows:
        for message in row["prompt"]:
            yield f"{message['role']}\n{message['content']}"
        yield "assistant\n"
        yield worked_answer(task_of(row["data_source"]), entry_of(row))
