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


def find(made: Composed, card: Card | None, *, elsewhere: bool = False) -> Iterator[Finding]:
    """card: what it is made for; None is not known, and of its name only the memory may be. elsewhere: machines were named,
    and what is installed on this one says nothing of them."""
    if made.sharded:
        yield from _flash(made, card, elsewhere)
        yield from _critic(made)
    if card is not None and _too_old(card):
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


def not_looked_at(made: Composed, card: Card | None, *, elsewhere: bool) -> str:
    """In words, what only the machines that were named know; empty where there is no such thing."""
    if not (made.sharded and elsewhere and _uses_flash(made)) or (card is not None and _too_old(card)):
        return ""
    return (
        "whether those machines have flash-attn, without which flash_attention_2 stops the worker with an ImportError "
        f"(+{MODEL}.{_KEY}=sdpa does without)"
    )


def _uses_flash(made: Composed) -> bool:
    return (made.text(f"{MODEL}.{_KEY}") or "flash_attention_2") == "flash_attention_2"


def _too_old(card: Card) -> bool:
    return _named(card) and card.capability < AMPERE


def _flash(made: Composed, card: Card | None, elsewhere: bool) -> Iterator[Finding]:
    key = f"{MODEL}.{_KEY}"
    if not _uses_flash(made):
        return
    default = "" if key in made.given else "flash_attention_2 is verl's default, and "
    if card is not None and _too_old(card):
        major, minor = card.capability
        why = f"{default}{card.name} has compute capability {major}.{minor}, and flash-attn needs 8.0"
        yield made.fault(key, why, f"+{key}=sdpa", code="attention")
        if made.has_critic:
            why = f"verl loads a critic with flash_attention_2 whatever is set, and {card.name} cannot run it"
            fix = "algorithm.adv_estimator=grpo, or model_engine=device_map of verl_shard"
            yield made.fault("critic.enable", why, fix, code="attention")
    elif not elsewhere and importlib.util.find_spec("flash_attn") is None:
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
