"""A byte-level tokenizer trained on the quick start's own text, with a ChatML template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

MAX_LENGTH = 512
"""Positions of the quick start's model; prompt and answer together take far fewer."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_APART = r" ?</?answer>|\d| ?(?!</?answer>)[^\w\s] ?"
"""What text is cut at: the answer's tags, each digit, and each sign with the space around it."""

_FREQUENT = 2.5e-4
"""A piece between two cuts becomes one token when it makes up this share of all texts, so that a question's unchanging
words cost as much as a digit. Rarer ones, the words that are to be spelled, stay letters."""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes and the pieces frequent in `texts`. It encodes any text and decodes it unchanged."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    cut = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_APART), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    same = Counter(texts)
    pieces: Counter[str] = Counter()
    for text, count in same.items():
        for piece, _ in cut.pre_tokenize_str(text):
            pieces[piece] += count
    frequent = sorted(piece for piece, count in pieces.items() if count >= max(_FREQUENT * same.total(), 5))
    tokens = dict.fromkeys([PAD, START, END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *frequent])
    # No merges: a piece is one token as a whole, or its bytes.
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=MAX_LENGTH,
    )
