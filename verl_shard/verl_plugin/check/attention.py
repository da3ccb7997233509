"""Attention and number formats that the card, or this machine, cannot run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from verl_shard.common.errors import Finding
from verl_shard.config.cards import Card
from verl_shard.verl_plugin.check.tree import Composed

MODEL = "actor_rollout_ref.model"
_KEY = "override_config.attn_implementation"
AMPERE = (8, 0)
"""The first cards that flash-attn 2 and bfloat16 run on."""


def find(made: Composed, card: Card | None) -> Iterator[Finding]:
    """card: what it is made for; None is not known, and of its name only the memory may be."""
    if made.sharded:
        yield from _flash(made, card)
        yield from _critic(made)
    if card is not None and _named(card) and card.capability < AMPERE:
        for key in ("actor_rollout_ref.rollout.dtype", "reward.reward_model.rollout.dtype"):
            if made.text(key) in ("bfloat16", "bf16") and (
                not key.startswith("reward") or made.on("reward.reward_model.enable")
            ):
                major, minor = card.capability
                why = f"{card.name} has compute capability {major}.{minor} and no bfloat16, which the engine refuses"
                yield made.fault(key, why, f"{key}=float16", code="no-bfloat16")


def _named(card: Card) -> bool:
    """Whether more than its memory is known."""
    return "only the memory" not in card.source


def _flash(made: Composed, card: Card | None) -> Iterator[Finding]:
    key = f"{MODEL}.{_KEY}"
    attention = made.text(key) or "flash_attention_2"
    if attention != "flash_attention_2":
        return
    default = "" if key in made.given else "flash_attention_2 is verl's default, and "
    too_old = card is not None and _named(card) and card.capability < AMPERE
    if card is not None and too_old:
        major, minor = card.capability
        why = f"{default}{card.name} has compute capability {major}.{minor}, and flash-attn needs 8.0"
        yield made.fault(key, why, f"+{key}=sdpa", code="attention")
        if made.has_critic:
            why = f"verl loads a critic with flash_attention_2 whatever is set, and {card.name} cannot run it"
            fix = "algorithm.adv_estimator=grpo, or model_engine=device_map of verl_shard"
            yield made.fault("critic.enable", why, fix, code="attention")
    elif importlib.util.find_spec("flash_attn") is None:
        why = f"{default}flash-attn is not installed here; where it is missing the worker stops with an ImportError"
        yield made.fault(key, why, f"pip install flash-attn, or +{key}=sdpa", "warning", "attention")


def _critic(made: Composed) -> Iterator[Finding]:
    key = f"critic.model.{_KEY}"
    attention = made.text(key)
    if made.has_critic and attention and attention != "flash_attention_2":
        why = (
            "verl's loader of value models asks for flash_attention_2 whatever is set; without flash-attn it fails and "
            "says 'please install trl'"
        )
        fix = "Install flash-attn and leave it out, or use model_engine=device_map of verl_shard"
        yield made.fault(key, why, fix, "warning", "no-effect")
