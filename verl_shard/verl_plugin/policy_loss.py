"""verl's clipped policy loss, for what updates a model outside of verl's workers."""

from __future__ import annotations

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.workers.config import ActorConfig


def verl_policy_loss(
    old_log_probs: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The mean over tokens of verl's default loss. All are (batch, tokens); mask: 1 for tokens of responses."""
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    loss: torch.Tensor = compute_policy_loss_vanilla(old_log_probs, log_probs, advantages, mask, "token-mean", config)[
        0
    ]
    return loss
