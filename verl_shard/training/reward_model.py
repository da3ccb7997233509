"""A reward model that scores in this process: a sequence classifier, loaded by load_sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_shard.common.errors import RunError
from verl_shard.runtime.dispatch import input_device
from verl_shard.runtime.load import load_sharded

Message = dict[str, Any]


class RewardModel:
    """Scores a response by a sequence classifier's one logit, over the whole conversation in the model's own tokens."""

    def __init__(
        self,
        path: str,
        *,
        device_map: Mapping[str, Any] | str = "cpu",
        devices: Sequence[Any] | None = None,
        dtype: str = "bfloat16",
        attn_implementation: str | None = None,
    ) -> None:
        """As for load_sharded; what cannot be as asked raises."""
        from transformers import AutoTokenizer

        self.path, self.tokenizer = path, AutoTokenizer.from_pretrained(path)
        self.model = load_sharded(
            path,
            device_map,
            devices=devices,
            task="reward",
            dtype=dtype,
            attn_implementation=attn_implementation,
            strict=True,
        )
        self._device = input_device(self.model)
        self._positions: int | None = getattr(self.model.config, "max_position_embeddings", None)
        self._vocabulary: int = self.model.get_input_embeddings().num_embeddings

    @torch.no_grad()
    def score(self, messages: Sequence[Message], response: str) -> float:
        """The score of a response. Raises RunError for a conversation that the model has no positions for: on a GPU that
        is a "device-side assert triggered"."""
        conversation = [*messages, {"role": "assistant", "content": response}]
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(conversation, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer("\n".join(str(message["content"]) for message in conversation))["input_ids"]
        if self._positions is not None and len(ids) > self._positions:
            raise RunError(
                f"{len(ids)} tokens to score, and the reward model {self.path} has {self._positions} positions"
            )
        if max(ids) >= self._vocabulary:
            raise RunError(
                f"its tokenizer makes token {max(ids)}, and the reward model {self.path} has {self._vocabulary}: "
                "they do not belong together"
            )
        logits = self.model(input_ids=torch.tensor([ids], device=self._device), use_cache=False).logits
        return float(logits[0, 0])
