"""Keys that verl does not have: where each went, what is near to it, or whether it only lacks its +."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from verl_shard.common.errors import Finding
from verl_shard.verl_plugin.check.articles import KEYS
from verl_shard.verl_plugin.check.given import Setting
from verl_shard.verl_plugin.check.tree import Composed, verl_folder
from verl_shard.verl_plugin.overrides import hydra_value

MOVED = {
    "critic.model.fsdp_config": "critic.fsdp",
    "critic.fsdp_config": "critic.fsdp",
    "reward_model.model.fsdp_config": "reward.reward_model.rollout",
    "actor_rollout_ref.actor.use_remove_padding": "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.actor.enable_gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.actor.gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.model.gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.model.attn_implementation": "+actor_rollout_ref.model.override_config.attn_implementation",
    "actor_rollout_ref.rollout.micro_batch_size": "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.tensor_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.max_tokens": "data.max_response_length",
    "trainer.hybrid_engine": "actor_rollout_ref.hybrid_engine",
    "trainer.micro_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "algorithm.kl_penalty_coef": "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_coef": "algorithm.kl_ctrl.kl_coef",
}
"""Beginnings of keys that are elsewhere in 0.9; the longest that fits counts."""
OPEN = (
    "override_config",
    "engine_kwargs",
    "ray_init",
    "sampler_kwargs",
    "reward_kwargs",
    "runtime_env",
    "custom",
    "kw_args",
)
"""Sections that take any key."""


LEGACY = ("reward_model", "custom_reward_function", "sandbox_fusion")
"""Sections of older versions, which are there and which nothing reads."""


def find(made: Composed) -> Iterator[Finding]:
    """Of every setting that has no place in verl's tree."""
    parts: dict[tuple[str, str], list[Setting]] = {}
    for setting in made.unplaced:
        yield from _of_key(made, setting, parts)


def _of_key(made: Composed, setting: Setting, parts: dict[tuple[str, str], list[Setting]]) -> Iterator[Finding]:
    key, last = setting.key, setting.key.rpartition(".")[2]
    first = key.split(".")[0]
    value = str(setting.value)
    at = f", {setting.at}" if setting.at else ""
    line = _written(setting)

    def finding(code: str, why: str, fix: str, level: str = "error") -> Finding:
        return Finding(level, code, key, value, f"{why}{at}", fix)  # type: ignore[arg-type]

    moved = max((old for old in MOVED if key == old or key.startswith(f"{old}.")), key=len, default=None)
    if moved is not None and not (setting.sign and is_field(made, key)):
        there = MOVED[moved] + key[len(moved) :]
        if moved == "reward_model.model.fsdp_config":
            why = "a reward model is a server since 0.6, and no FSDP module"
            yield finding("moved-key", why, "reward.reward_model.rollout.free_cache_engine=True lets it sleep")
            return
        yield finding("moved-key", "it is elsewhere in verl 0.9", f"{there}={hydra_value(setting.value)}")
        return
    inside_open = any(part in OPEN for part in key.split(".")[:-1])
    if inside_open or is_field(made, key):
        if not setting.sign and not setting.in_file:
            yield finding("needs-plus", "verl's files do not have the key, so that Hydra wants it added", f"+{line}")
        return
    if last in KEYS or first in KEYS:
        group = "key" if last in KEYS else "section"
        why, fix = KEYS[last] if last in KEYS else KEYS[first]
        if ("said", first if group == "section" else key) in parts:
            return
        parts["said", first if group == "section" else key] = [setting]
        yield finding("never-in-verl", why, fix)
        return
    if first in ("actor", "rollout", "ref"):
        whole = f"actor_rollout_ref.{key}"
        why = f"verl has no section {first} at the top"
        instead = f"{whole}={hydra_value(setting.value)}" if whole in known_keys(made) else _nearest(made, whole)
        yield finding("unknown-key", why, instead or f"actor_rollout_ref.{first}.KEY=VALUE")
        return
    added = " (added with +, it is there and read by nothing, or stops the worker)" if setting.sign else ""
    yield finding("unknown-key", f"verl has no such key{added}", _nearest(made, key) or "Leave it out")


def _written(setting: Setting) -> str:
    return f"{setting.key}={hydra_value(setting.value)}"


def _nearest(made: Composed, key: str) -> str | None:
    """The nearest keys: in the same section first, then of the same last name anywhere."""
    known = [name for name in known_keys(made) if name.split(".")[0] not in LEGACY]
    parent, _, last = key.rpartition(".")
    beside = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    beside += sorted(_fields_at(made, parent))
    near = get_close_matches(last, beside, 1, 0.75)
    if near:
        plus = "" if f"{parent}.{near[0]}" in known else "+"
        return f"Did you mean {plus}{parent}.{near[0]}?" if parent else f"Did you mean {near[0]}?"
    same = [name for name in known if name.rpartition(".")[2] == last]
    if same:
        return f"Did you mean {' or '.join(_by_likeness(key, same)[:3])}?"
    sections = {name.rpartition(".")[0] for name in known}
    near = get_close_matches(key, [name for name in known if name not in sections], 1, 0.7)
    return f"Did you mean {near[0]}?" if near else None


def _by_likeness(key: str, names: list[str]) -> list[str]:
    return get_close_matches(key, names, len(names), 0.0)


def known_keys(made: Composed) -> list[str]:
    """All keys of verl's own tree, sections too."""
    return _keys_of(made.base)


@cache
def _keys_of(base: bytes) -> list[str]:
    from omegaconf import DictConfig

    found: list[str] = []

    def walk(node: Any, before: str) -> None:
        if not isinstance(node, DictConfig) or not node._content:
            return
        content: dict[Any, Any] = node._content  # type: ignore[assignment]
        for name, child in content.items():
            key = f"{before}.{name}" if before else str(name)
            found.append(key)
            walk(child, key)

    walk(pickle.loads(base), "")
    return found


def is_field(made: Composed, key: str) -> bool:
    """Whether verl's dataclass of the section has the key, though its files do not."""
    parent, _, last = key.rpartition(".")
    if last in _fields_at(made, parent):
        return True
    # A section that the files lack: its own keys are a matter of the class.
    above, _, section = parent.rpartition(".")
    return bool(above) and section in _fields_at(made, above) and not _has_class(made, parent)


def _has_class(made: Composed, section: str) -> bool:
    return bool(_class_of(made, section))


def _class_of(made: Composed, section: str) -> str:
    target = made.value(f"{section}._target_")
    return target.rpartition(".")[2] if isinstance(target, str) else ""


def _fields_at(made: Composed, section: str) -> frozenset[str]:
    return fields_of(_class_of(made, section))


def takes_only_fields(made: Composed, section: str) -> bool:
    """Whether verl makes a dataclass of the section, which refuses other keys."""
    return bool(_fields_at(made, section))


def fields_of(name: str) -> frozenset[str]:
    """The fields of one of verl's configuration classes by its name, read from its source."""
    classes = _classes(verl_folder())
    found: set[str] = set()
    todo = [name]
    while todo:
        bases, own = classes.get(todo.pop(), ((), ()))
        found |= set(own)
        todo += bases
    return frozenset(found)


@cache
def _classes(folder: Path) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """(bases, annotated names) of the classes in verl's configuration modules. Importing them would take seconds."""
    files = [
        *(folder / "workers" / "config").glob("*.py"), *(folder / "trainer" / "config").glob("*.py"),
        folder / "utils" / "profiler" / "config.py", Path(__file__).parents[1] / "config.py",
    ]  # fmt: skip
    made = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = tuple(base.id for base in node.bases if isinstance(base, ast.Name))
                own = tuple(
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                )
                made[node.name] = (bases, own)
    return made
