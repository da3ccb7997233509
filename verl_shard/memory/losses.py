"""Losses as trainers compute them, for their memory; and the log-probabilities that our verl engine takes."""

from __future__ import annotations

from typing import Any

import torch

CHUNK = 2**24
"""Logits that are worked on at once: 64 MiB in fp32."""


def log_probs_of_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log_softmax(logits)[labels], in chunks of rows. logits: (..., vocabulary); labels: (...); returns (...).

    In place of verl's `logprobs_from_logits_v2`, which it uses where flash-attn is not installed and which goes through the
    tokens one by one to save memory: half of a small model's forward and backward. A chunk keeps both. As there, fp32 takes the
    difference to logsumexp, which saves no second copy of the logits for the backward, and other dtypes log_softmax.
    """
    flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1, 1)
    rows = max(1, CHUNK // flat.shape[-1])
    pieces = []
    for piece, label in zip(torch.split(flat, rows), torch.split(wanted, rows), strict=True):
        if piece.dtype in (torch.float32, torch.float64):
            pieces.append(piece.gather(-1, label).squeeze(-1) - torch.logsumexp(piece, dim=-1))
        else:
            pieces.append(torch.log_softmax(piece, dim=-1).gather(-1, label).squeeze(-1))
    return torch.cat(pieces).view(labels.shape)


def entropy_of_logits(logits: torch.Tensor) -> torch.Tensor:
    """logsumexp(logits) - sum(softmax(logits) * logits), in chunks of rows. logits: (..., vocabulary); returns (...).

    In place of verl's `entropy_from_logits`, which works on all rows at once: three times the logits in fp32 under
    autocast, the most that scoring with a large vocabulary takes. Each row is computed as there.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    pieces = []
    for piece in torch.split(flat, max(1, CHUNK // flat.shape[-1])):
        probabilities = torch.softmax(piece, dim=-1)
        pieces.append(torch.logsumexp(piece, dim=-1) - torch.sum(probabilities * piece, dim=-1))
    return torch.cat(pieces).view(logits.shape[:-1])


def token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in fp32 of the next token, at the last positions that there are logits for."""
    logits = logits.float()[:, :-1]
    labels = ids[:, -logits.shape[1] :]
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def ppo_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Clipped ratio of the log-probabilities of `ids`. logits: (batch, length, vocabulary); ids: (batch, length)."""
    log_probs = log_probs_of_labels(logits[:, :-1], ids[:, -logits.shape[1] :][:, 1:])
    ratio = torch.exp(log_probs - log_probs.detach())
    advantages = torch.ones_like(ratio)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def verl_ppo_loss(logits: torch.Tensor, ids: torch.Tensor, *, entropy: bool, packed: bool) -> torch.Tensor:
    """The same as verl's engine computes it: of a padded batch the logits are copied without the padding.

    Source: FSDPEngineWithLMHead.prepare_model_outputs and entropy_from_logits of verl 0.9.1, at temperature 1, which
    leaves the logits as they are. Where there are logits of responses only, so are labels.
    """
    entropies = entropy_of_logits(logits) if entropy else None
    unpadded = logits.squeeze(0) if packed else torch.cat(list(logits))
    log_probs = log_probs_of_labels(unpadded, torch.roll(ids.reshape(-1), -1)[: len(unpadded)])
    ratio = torch.exp(log_probs - log_probs.detach())
    loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()
    return loss if entropies is None else loss + entropies.mean()


def value_loss(values: torch.Tensor) -> torch.Tensor:
    """Clipped squared error of values. values: (batch, length) or (batch, length, 1)."""
    values = values.float()
    returns = values.detach() + 1
    clipped = values.detach() + (values - values.detach()).clamp(-0.5, 0.5)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()


def other_loss(result: Any) -> torch.Tensor:
    """A scalar of whatever a model computes."""
    out = getattr(result, "logits", None)
    if out is None:
        out = result if isinstance(result, torch.Tensor) else result[0]
    total: torch.Tensor = out.float().sum()
    return total
