"""verl's configuration with what was given in it, as far as it goes: what does not fit is gathered, and the rest is still set."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from verl_shard.common.errors import Finding, MissingExtraError
from verl_shard.verl_plugin.check.given import UNKNOWN, Given, Setting, leaves, said_at

Unset = type("Unset", (), {"__repr__": lambda self: "unset", "__bool__": lambda self: False})
MISSING = Unset()
"""Of a key that has no value, or one that only a running shell knows."""


def verl_folder() -> Path:
    """Where verl is, which is not imported: that takes seconds. Raises MissingExtraError without it."""
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:
        raise MissingExtraError("verl-shard check", "verl", "verl")
    return Path(found.origin).parent


@dataclass
class Composed:
    """config: verl's tree with every setting in it. given: by key, the last setting of each.

    base: the tree as verl has it, pickled. unplaced: settings that it has no place for.
    """

    config: Any
    base: bytes = b""
    given: dict[str, Setting] = field(default_factory=dict)
    unplaced: list[Setting] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def value(self, key: str) -> Any:
        """Of a key, interpolations followed; MISSING where it is not known. None is null."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            found = OmegaConf.select(self.config, key, default=MISSING, throw_on_missing=False)
        except OmegaConfBaseException:
            return MISSING
        if isinstance(found, str) and (UNKNOWN in found or found == "???"):
            return MISSING
        return found

    def number(self, key: str) -> int | None:
        """Of a key that counts something; None where it does not."""
        found = self.value(key)
        if isinstance(found, bool) or not isinstance(found, int | float | str):
            return None
        try:
            return int(found)
        except ValueError:
            return None

    def on(self, key: str) -> bool:
        """Whether a switch is on."""
        found = self.value(key)
        return found.strip().lower() in ("true", "1", "yes", "on") if isinstance(found, str) else bool(found)

    def text(self, key: str) -> str:
        """Of a key with a name in it; empty where there is none."""
        found = self.value(key)
        return found if isinstance(found, str) else ""

    def fault(self, key: str, why: str, fix: str, level: str = "error", code: str = "verl-config") -> Finding:
        """About the value of a key, with where it was given."""
        setting = self.given.get(key)
        found = self.value(key)
        shown = "null" if found is None else "" if found is MISSING else str(found)
        at = f", {setting.at}" if setting is not None and setting.at else ""
        return Finding(level, code, key, shown, f"{why}{at}", fix)  # type: ignore[arg-type]

    @property
    def world(self) -> int | None:
        """Training processes, one for each GPU of the pool."""
        nodes, gpus = self.number("trainer.nnodes"), self.number("trainer.n_gpus_per_node")
        return None if nodes is None or gpus is None else nodes * gpus

    @property
    def strategy(self) -> str:
        """The actor's engine."""
        return self.text("actor_rollout_ref.actor.strategy")

    @property
    def sharded(self) -> bool:
        """Whether that is FSDP."""
        return self.strategy in ("fsdp", "fsdp2")

    @property
    def has_critic(self) -> bool:
        enabled = self.value("critic.enable")
        return (
            self.on("critic.enable")
            if enabled not in (None, MISSING)
            else self.text("algorithm.adv_estimator") == "gae"
        )

    @property
    def lora_rank(self) -> int:
        model = "actor_rollout_ref.model"
        return (self.number(f"{model}.lora.rank") or 0) or (self.number(f"{model}.lora_rank") or 0)

    @property
    def has_kl(self) -> bool:
        """Whether there is a KL to a reference."""
        return self.on("algorithm.use_kl_in_reward") or self.on("actor_rollout_ref.actor.use_kl_loss")

    @property
    def has_ref(self) -> bool:
        """Whether there is a reference of its own: with LoRA it is the actor without its adapters."""
        return self.has_kl and not self.lora_rank


def compose(given: Given) -> Composed:
    """Sets what was given in verl's tree, one setting after the other.

    Raises MissingExtraError without verl.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    from verl_shard.verl_plugin import search_path

    folder = verl_folder() / "trainer" / "config"
    search_path.register()
    groups = [s for s in given.settings if _is_group(s.key)]
    name = given.config_name or "ppo_trainer"
    findings: list[Finding] = []
    if not (folder / f"{name.removesuffix('.yaml')}.yaml").is_file():
        given.left_out.append(f"the configuration {name}, which is not verl's: give that file with --config")
        name = "ppo_trainer"
    base = (str(folder), name.removesuffix(".yaml"))
    try:
        whole = _base(*base, tuple(setting.text for setting in groups))
    except (HydraException, ValueError) as error:  # a group that is a number
        why = " ".join(str(error).split())[:200]
        fix = "Use model_engine=dp, megatron, veomni or torchtitan, or with verl_shard device_map"
        findings += [
            Finding("error", "no-such-group", setting.key, str(setting.value), said_at(why, setting.at), fix)
            for setting in groups
        ]
        whole = _base(*base, ())
    config = pickle.loads(whole)
    OmegaConf.set_struct(config, True)
    made = Composed(config, whole, findings=findings)
    for setting in given.settings:
        if not _is_group(setting.key) and setting.key.split(".")[0] != "hydra":
            _place(made, setting)
    return made


@cache
def _base(folder: str, name: str, groups: tuple[str, ...]) -> bytes:
    """A configuration of verl with its groups chosen, pickled. Raises HydraException."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(folder, version_base=None):
            return pickle.dumps(hydra_compose(name, overrides=list(groups)))
    finally:
        GlobalHydra.instance().hydra = before


def _is_group(key: str) -> bool:
    return key == "model_engine" or "@" in key or "/" in key


def _place(made: Composed, setting: Setting) -> None:
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    config, key = made.config, setting.key
    there = has_key(config, key)
    if setting.sign == "~":
        if not there:
            made.unplaced.append(setting)
            return
        parent, _, last = key.rpartition(".")
        with open_dict(config):
            del (OmegaConf.select(config, parent) if parent else config)[last]
        return
    if setting.sign == "+" and there and _occupied(config, key, setting.value):
        why, fix = said_at("verl has the key already, and Hydra adds none twice", setting.at), setting.text.lstrip("+")
        made.findings.append(Finding("error", "plus-on-a-key", key, str(setting.value), why, fix))
    if not there:
        made.unplaced.append(setting)
    try:
        with open_dict(config):
            OmegaConf.update(config, key, setting.value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        why = said_at(f"it does not go there ({' '.join(str(error).split())[:120]})", setting.at)
        made.findings.append(
            Finding("error", "wrong-value", key, str(setting.value), why, "Give one value of that kind")
        )
        return
    made.given[key] = setting
    if isinstance(setting.value, dict):
        made.given |= {f"{key}.{name}": setting for name, _ in leaves(setting.value)}


def _occupied(config: Any, key: str, value: Any) -> bool:
    from omegaconf import OmegaConf

    found = OmegaConf.select(config, key, throw_on_missing=False, throw_on_resolution_failure=False)
    return found is not None and not isinstance(value, dict | list)


def has_key(config: Any, key: str) -> bool:
    """Whether the tree has the key, with any value."""
    from omegaconf import DictConfig, OmegaConf

    parent, _, last = key.rpartition(".")
    at = (
        OmegaConf.select(config, parent, throw_on_missing=False, throw_on_resolution_failure=False)
        if parent
        else config
    )
    return isinstance(at, DictConfig) and last in at._content if isinstance(at, DictConfig) and at._content else False


Rule = Callable[[Composed], list[Finding]]
