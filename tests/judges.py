"""Random reward models of sixty words, and what transformers alone says of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 60
TEMPLATE = "{% for m in messages %}w7 {{ m['content'] }} {% endfor %}w8"
CONVERSATIONS = [
    [{"role": "user", "content": "w10 w11"}, {"role": "assistant", "content": text}]
    for text in ("w12", "w13 w14 w15 w16 w17", "w18 w19", "w20 w21 w22 w23 w24 w25 w26 w27", "w28", "w29 w30 w31")
]


def save_tokenizer(folder: Path, *, words: int = WORDS, template: str | None = TEMPLATE, pad: str = "<pad>") -> Path:
    """One token a word: "w12" is 12, and "|" is 4."""
    special = {0: "<pad>", 2: "<eos>", 3: "<unk>", 4: "|"}
    vocab = {special.get(n, f"w{n}"): n for n in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token="<eos>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def save_judge(folder: Path, config: Any, task: str = "SequenceClassification", *, pad: int | None = 0) -> Path:
    """A folder with a random model of `config` and its tokenizer; its scores differ clearly from text to text."""
    torch.manual_seed(0)
    config.pad_token_id = None
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.config.pad_token_id = pad
    model.save_pretrained(folder)
    return save_tokenizer(folder)


def plain(folder: Path, words: str, task: str = "SequenceClassification") -> torch.Tensor:
    """The logits of one text alone, straight from transformers; the tokens are written out, not made by a tokenizer."""
    model = getattr(transformers, f"AutoModelFor{task}").from_pretrained(folder, dtype=torch.float32).eval()
    special = {"|": 4, "<eos>": 2}
    ids = [special[word] if word in special else int(word[1:]) for word in words.split()]
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return logits


def alone(folder: Path, conversation: Any) -> float:
    """The score of one conversation in TEMPLATE."""
    return float(plain(folder, f"w7 {conversation[0]['content']} w7 {conversation[1]['content']} w8")[0])
