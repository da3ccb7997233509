"""A reward model that scores in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_shard.runtime.scoring_model import TRAINING, ScoringModel

Message = Mapping[str, Any]


class RewardModel:
    """Scores responses by a ScoringModel, over the whole conversation in the model's own template and tokens.

    An empty response is scored as it is, which a notice says once: a policy in training may end at once, and is to learn
    from it. `empty_response="stop"` raises for it.
    """

    def __init__(
        self,
        path: str,
        *,
        device_map: Mapping[str, Any] | str = "cpu",
        devices: Sequence[Any] | None = None,
        dtype: str = "bfloat16",
        attn_implementation: str | None = None,
        **options: Any,
    ) -> None:
        """As for load_sharded; options: any more of ScoringModel's arguments. What cannot be as asked raises.

        path: a folder or a hub id. device_map: "cpu", "balanced", a device, or a map of module names to GPU ids.
        devices: the GPUs of a balanced map, in their order. dtype: of the weights. attn_implementation: by default sdpa.
        """
        self.path = path
        self.scorer = ScoringModel(
            path,
            device_map=device_map,
            devices=devices,
            dtype=dtype,
            attn_implementation=attn_implementation,
            **{**TRAINING, **options},
        )

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.scorer.model

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer."""
        return self.scorer.tokenizer

    def score(self, messages: Sequence[Message], response: str) -> float:
        """The score of a response. Raises RunError for one that cannot be scored; see ScoringModel.score."""
        return self.score_many([(messages, response)])[0]

    def score_many(self, asked: Sequence[tuple[Sequence[Message], str]]) -> list[float]:
        """The scores of several (messages, response), in their order and in batches."""
        return self.scorer.score([conversation(messages, response) for messages, response in asked])


def conversation(messages: Sequence[Any], response: str) -> list[Message]:
    """The messages with the response as the assistant's."""
    return [*messages, {"role": "assistant", "content": response}]
