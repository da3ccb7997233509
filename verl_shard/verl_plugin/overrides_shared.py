"""What the overrides of a plan have in common on every backend: refusals, models, optimizers, logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_shard.common.errors import Finding
from verl_shard.planning.plan import Plan, PlannedRole
from verl_shard.verl_plugin.overrides import hydra_value

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
REWARD = "reward.reward_model"


@dataclass
class Emission:
    """Keys with their values, and the settings of the plan that have none."""

    plan: Plan
    keys: dict[str, Any] = field(default_factory=dict)
    faults: list[Finding] = field(default_factory=list)

    def refuse(self, role: str, name: str, why: str, fix: str) -> None:
        """A setting that verl cannot have."""
        value = self.role(role).get(name)
        given = "" if value is None else str(value)
        self.faults.append(Finding("error", "verl-has-not", f"{role}.{name}", given, why, fix))

    def role(self, role: str) -> Mapping[str, Any]:
        """The settings of a role; none where there is no such role."""
        own = self.plan.roles.get(role)
        return {} if own is None else own.settings

    def asked(self, role: str, name: str) -> bool:
        """Whether the setting was asked for, and not chosen by the planner."""
        own = self.plan.roles.get(role)
        return own is not None and own.settings.get(name) is not None and name not in own.chosen

    @property
    def ref_in_actor(self) -> bool:
        """Whether the reference is the actor without its adapters."""
        return "ref" in self.plan.roles and bool(self.role("actor").get("lora_rank"))

    def models(self) -> Iterator[tuple[str, str]]:
        """The keys of the model entries, by the role that decides each."""
        yield "actor", MODEL
        if "critic" in self.plan.roles:
            yield "critic", "critic.model"

    def common(self) -> None:
        """Models, their attention, checkpointing and adapters, and the optimizers."""
        for role, key in self.models():
            own, optim = self.role(role), f"{ACTOR if role == 'actor' else 'critic'}.optim"
            self.keys |= {
                f"{key}.path": named(self.plan.roles[role]),
                f"{key}.use_remove_padding": self.plan.workload.remove_padding,
                f"{key}.enable_gradient_checkpointing": bool(own.get("gradient_checkpointing")),
            }
            if own.get("lora_rank"):
                self.keys[f"{key}.lora_rank"] = own["lora_rank"]
            if own.get("optimizer") == "adamw-fused":
                self.keys[f"+{optim}.override_optimizer_config.fused"] = True
            elif own.get("optimizer") == "sgd":
                self.keys[f"{optim}.optimizer"] = "SGD"
        self.keys[f"{MODEL}.use_fused_kernels"] = self._fused()

    def _fused(self) -> bool:
        """Of actor and ref, which have one model entry; what is fused needs less memory and computes the same."""
        logits = {role: self.role(role).get("logits", "full") for role in ("actor", "ref") if role in self.plan.roles}
        if self.ref_in_actor:
            logits.pop("ref")
        if "fused" not in logits.values():
            return False
        for role, how in logits.items():
            if how != "fused" and self.asked(role, "logits"):
                other = next(name for name in logits if name != role)
                why = f"{other}.logits is fused, and verl has one model entry for both"
                self.refuse(role, "logits", why, f"Set {role}.logits=fused, or leave it out")
        return True

    def same_as_actor(self, name: str) -> None:
        """Refuses a ref whose setting is not the actor's, where verl has one key for both."""
        own, actor = self.role("ref"), self.role("actor")
        if "ref" in self.plan.roles and not self.ref_in_actor and own.get(name) != actor.get(name):
            why = f"verl has one entry for actor and ref, and the actor's is {actor.get(name)}"
            self.refuse("ref", name, why, f"Set ref.{name}={actor.get(name)}")


def named(role: PlannedRole) -> str:
    """A role's model as verl's processes find it: a folder that is here by its whole path."""
    path = Path(role.model).expanduser()
    return str(path.resolve()) if path.is_dir() else role.model


class Raw(str):
    """Text that is Hydra's grammar already."""


def raw_map(content: Mapping[str, Any]) -> Raw:
    """A mapping as Hydra's grammar has it; its keys take no quotes there."""
    return Raw("{" + ",".join(f"{key}:{hydra_value(value)}" for key, value in content.items()) + "}")
