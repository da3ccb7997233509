"""Workload: what one RL step does, in verl's words."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.config.validated import config_class

# verl's advantage estimators (verl.trainer.ppo.core_algos.AdvantageEstimator), and "ppo" for "gae".
Algorithm = Literal[
    "ppo", "gae", "grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo",
    "rloo_vectorized", "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline", "gdpo",
]  # fmt: skip
Kl = Literal["none", "loss", "reward"]
Count = Annotated[int, Field(ge=1)]


@config_class
class Workload:
    """One step: prompts are answered n times each, scored, and trained on in mini-batches.

    Raises ConfigError with every fault at once.
    """

    algorithm: Algorithm = Field(
        "ppo", description="ppo (gae, with a critic), or one of verl's other estimators, without."
    )
    train_batch_size: Count = Field(default=256, description="Prompts in a step (data.train_batch_size).")
    n: Count = Field(default=1, description="Responses to each prompt (rollout.n).")
    prompt_length: Count = Field(default=512, description="Longest prompt, in tokens (data.max_prompt_length).")
    shortest_prompt_length: Count = Field(
        default=1,
        description="Shortest prompt, in tokens: of padded rows our engine makes no logits before it. Memory is promised only "
        "while no prompt is shorter.",
    )
    response_length: Count = Field(default=1024, description="Longest response, in tokens (data.max_response_length).")
    mean_response_length: Count | None = Field(
        default=None, description="Tokens of a response on average, for times; by default the longest."
    )
    ppo_mini_batch_size: Count | None = Field(
        default=None,
        description="Prompts in one optimizer step (actor.ppo_mini_batch_size); by default the whole batch.",
    )
    ppo_epochs: Count = Field(default=1, description="Times a batch is trained on (actor.ppo_epochs).")
    kl: Kl = Field(
        "loss", description="Where the KL to the reference policy goes: loss, reward, or none, without a ref."
    )
    remove_padding: bool = Field(
        default=False, description="Inputs are packed, without padding (model.use_remove_padding)."
    )

    def __post_init__(self) -> None:
        faults = []
        shortest = self.shortest_prompt_length
        if shortest > self.prompt_length:
            why = f"it is more than the longest prompt, {self.prompt_length}"
            faults.append(_fault("shortest_prompt_length", shortest, why, f"Give {self.prompt_length} or less"))
        mini, mean = self.ppo_mini_batch_size, self.mean_response_length
        if mini is not None and mini > self.train_batch_size:
            why = f"it is more than the {self.train_batch_size} prompts of a step"
            faults.append(_fault("ppo_mini_batch_size", mini, why, f"Give {self.train_batch_size} or less"))
        elif mini is not None and self.train_batch_size % mini:
            # verl counts both in samples, n times as many, and its loader asserts the same of those on each GPU
            # (verl/utils/tensordict_utils.py, make_iterator): n and the GPUs cancel.
            whole = self.train_batch_size
            why = f"train_batch_size {whole} % {mini} = {whole % mini}, not 0: a step is cut into whole mini-batches"
            less = next(size for size in range(mini, 0, -1) if whole % size == 0)
            more = next(size for size in range(mini, whole + 1) if whole % size == 0)
            faults.append(
                _fault("ppo_mini_batch_size", mini, why, f"Give {less} or {more}, or another divisor of {whole}")
            )
        if mean is not None and mean > self.response_length:
            why = f"it is more than the longest response, {self.response_length}"
            faults.append(_fault("mean_response_length", mean, why, f"Give {self.response_length} or less"))
        if faults:
            raise ConfigError(faults)

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest sequence, prompt and response."""
        return self.prompt_length + self.response_length

    @property
    def mean_sequence_length(self) -> int:
        """Tokens that a sequence has on average, for times."""
        return self.prompt_length + (self.mean_response_length or self.response_length)

    @property
    def sequences(self) -> int:
        """Sequences in a step."""
        return self.train_batch_size * self.n

    @property
    def mini_batch_sequences(self) -> int:
        """Sequences in one optimizer step."""
        return (self.ppo_mini_batch_size or self.train_batch_size) * self.n

    @property
    def has_critic(self) -> bool:
        """Whether the algorithm learns values."""
        return self.algorithm in ("ppo", "gae")


def group_of_one(algorithm: str, n: int) -> tuple[str, str] | None:
    """Why a group of one response is worth a warning, and what to do; None where the algorithm has no groups, or larger ones.

    Source: compute_grpo_outcome_advantage and group_mean_std of verl 0.9.1, which both set mean 0 and deviation 1 then.
    """
    if n != 1 or algorithm not in ("grpo", "grpo_vectorized"):
        return None
    why = (
        "each group is one response, for which verl takes 0 as the mean and 1 as the deviation: its advantage is its reward "
        "itself, and nothing is compared with the rest of a group"
    )
    return why, "Use 2 or more, such as 4 or 8, or an algorithm without groups, such as reinforce_plus_plus"


def _fault(where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", where.replace("_", "-"), where, str(given), why, fix)
