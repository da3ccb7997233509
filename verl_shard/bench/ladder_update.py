"""One PPO update of an actor, step by step, so that it is known in which phase memory ran out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from verl_shard.memory.losses import log_probs_of_labels

CLIP = (0.2, 3.0)
"""The clipped ratio's distance from 1, and verl's second clip, for negative advantages (clip_ratio_c)."""
FUSED_CHUNK = 512
"""Tokens whose logits are there at a time under a fused head, as in verl's FusedLinearForPPO."""

PolicyLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(old log-probabilities, log-probabilities, advantages, mask), each (rows, tokens), to a mean over the mask's tokens."""


@dataclass(frozen=True)
class MicroBatch:
    """inputs: the model's keywords, input_ids (rows, tokens) among them; the others are (rows, tokens - 1)."""

    inputs: Mapping[str, Any]
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor


def policy_loss() -> tuple[PolicyLoss, str]:
    """verl's own where verl is installed, else ours; and a word on which."""
    if importlib.util.find_spec("verl") is not None:
        from verl_shard.verl_plugin.policy_loss import verl_policy_loss

        return verl_policy_loss, "verl's compute_policy_loss_vanilla"
    return own_policy_loss, "our copy of verl's compute_policy_loss_vanilla, since verl is not installed"


def own_policy_loss(
    old_log_probs: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """PPO's clipped loss with verl's second clip (Ye et al., arXiv 1912.09729), as verl 0.9.1 computes it by default."""
    ratio = torch.exp((log_probs - old_log_probs).clamp(-20.0, 20.0))
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP[0], 1 + CLIP[0]))
    losses = torch.where(advantages < 0, torch.minimum(-advantages * CLIP[1], losses), losses)
    return (losses * mask).sum() / (mask.sum() + 1e-8)


class FusedHead(torch.autograd.Function):
    """Log-probabilities of labels from hidden states, FUSED_CHUNK tokens at a time, and no logits kept for the backward.

    The operations are those of FusedLinearForPPO of verl 0.9.1, its entropy too, which verl always computes.
    hidden: (rows, tokens, size); weight: (vocabulary, size); labels: (rows, tokens). Returns (rows, tokens) in fp32.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat, wanted = hidden.flatten(0, 1), labels.flatten()
        found = torch.zeros(len(flat), device=flat.device)
        entropies = flat.new_zeros(len(flat))
        for at in range(0, len(flat), FUSED_CHUNK):
            part = slice(at, at + FUSED_CHUNK)
            logits = (flat[part] @ weight.t()).float()
            probabilities = logits.softmax(-1)
            entropies[part] = torch.logsumexp(logits, -1) - torch.sum(probabilities * logits, -1)
            found[part] = logits.log_softmax(-1).gather(-1, wanted[part, None])[:, 0]
        ctx.save_for_backward(hidden, weight, labels)
        return found.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weight, labels = ctx.saved_tensors
        flat, wanted, given = hidden.flatten(0, 1), labels.flatten(), gradients[0].flatten()
        of_hidden, of_weight = torch.zeros_like(flat), torch.zeros_like(weight)
        for at in range(0, len(flat), FUSED_CHUNK):
            part = slice(at, at + FUSED_CHUNK)
            logits = flat[part] @ weight.t()
            probabilities = logits.float().softmax(-1)
            one_hot = torch.zeros_like(probabilities).scatter_(-1, wanted[part, None], 1)
            of_logits = (given[part, None] * (one_hot - probabilities)).to(logits.dtype)
            of_hidden[part] += of_logits @ weight
            of_weight += of_logits.t() @ flat[part]
        return of_hidden.view(hidden.shape), of_weight, None


def fuse_head(model: Any) -> None:
    """Lets a causal language model give its last hidden states as its logits: the loss applies the head."""
    model.lm_head.forward = lambda hidden: hidden


def update_loss(model: Any, output: Any, batch: MicroBatch, loss: PolicyLoss, *, fused: bool) -> torch.Tensor:
    """The loss of one micro-batch, from what the model returned."""
    labels = batch.inputs["input_ids"][:, 1:]
    if fused:
        weight = model.lm_head.weight
        hidden = output.logits.to(weight.device)
        labels = torch.roll(batch.inputs["input_ids"], -1, 1).to(weight.device)  # of all tokens; the last is cut off
        log_probs = FusedHead.apply(hidden, weight, labels)[:, :-1]  # type: ignore[no-untyped-call]
    else:
        log_probs = log_probs_of_labels(output.logits[:, :-1], labels.to(output.logits.device))
    return loss(*(part.to(log_probs.device) for part in (batch.old_log_probs, log_probs, batch.advantages, batch.mask)))


def update(
    model: Any,
    batches: Sequence[MicroBatch],
    optimizer: torch.optim.Optimizer,
    loss: PolicyLoss,
    phase: Callable[[str], None],
    *,
    mixed: bool,
    fused: bool,
    in_flight: int = 0,
) -> float:
    """Forward and backward of each micro-batch, clipping and the optimizer's step; returns the loss.

    phase: told what comes next: "forward", "backward", "optimizer". mixed: under bf16 autocast. in_flight: 0 takes one
    micro-batch after the other; else a model of dispatch_model works on so many at a time, and its phase is "passes".
    """
    if in_flight:
        total = _in_flight(model, batches, loss, phase, mixed=mixed, fused=fused, in_flight=in_flight)
    else:
        total = _in_turn(model, batches, loss, phase, mixed=mixed, fused=fused)
    phase("optimizer")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total)


def _in_turn(
    model: Any,
    batches: Sequence[MicroBatch],
    loss: PolicyLoss,
    phase: Callable[[str], None],
    *,
    mixed: bool,
    fused: bool,
) -> torch.Tensor:
    losses = []
    for batch in batches:
        phase("forward")
        with _autocast(model, mixed):
            output = model(**batch.inputs, use_cache=False)
            made = update_loss(model, output, batch, loss, fused=fused) / len(batches)
        phase("backward")
        made.backward()  # type: ignore[no-untyped-call]
        losses.append(made.detach())
        del output, made
    return torch.stack(losses).sum()


def _in_flight(
    model: Any,
    batches: Sequence[MicroBatch],
    loss: PolicyLoss,
    phase: Callable[[str], None],
    *,
    mixed: bool,
    fused: bool,
    in_flight: int,
) -> torch.Tensor:
    from verl_shard.runtime.micro_batches import run_micro_batches

    phase("passes")
    given: list[dict[str, Any]] = [{**batch.inputs, "use_cache": False} for batch in batches]
    of = {id(inputs): batch for inputs, batch in zip(given, batches, strict=True)}

    def loss_of(output: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        with _autocast(model, mixed):
            return update_loss(model, output, of[id(inputs)], loss, fused=fused)

    ran = run_micro_batches(UnderAutocast(model, mixed), given, loss_of, in_flight=in_flight, scale="mean")
    assert ran.loss is not None, "it was trained"
    return ran.loss


class UnderAutocast(torch.nn.Module):
    """A model whose forward alone is under bf16 autocast: what autocast keeps of the weights goes before the backward, as
    in our engine and in a plain loop."""

    def __init__(self, model: Any, mixed: bool) -> None:
        super().__init__()
        self.model, self._mixed = model, mixed

    def forward(self, **inputs: Any) -> Any:
        with _autocast(self.model, self._mixed):
            return self.model(**inputs)


def _autocast(model: Any, mixed: bool) -> AbstractContextManager[Any]:
    return torch.autocast(model.device.type, torch.bfloat16) if mixed else nullcontext()
