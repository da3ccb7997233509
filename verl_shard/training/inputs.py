"""What PPOTrainer was given, looked at before anything is loaded: all faults at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, Faults, config_error
from verl_shard.models.dtypes import dtype_name
from verl_shard.models.meta import task_of
from verl_shard.models.source import read_config
from verl_shard.runtime.scoring_outputs import choose_outputs
from verl_shard.training.callbacks import Callbacks
from verl_shard.training.data import Row, check_rows, complete_rows, read_given
from verl_shard.training.models import check_model, load_tokenizer
from verl_shard.training.placement import Places, RolePlace, given_by_role, read_places
from verl_shard.training.rewards import Rewards, is_function, read_rewards
from verl_shard.training.settings import Settings

_OF_OUTPUTS = ("task", "label", "aggregate", "separator", "step_mark")
RUNNERS = ("local", "verl")
LOGGERS = ("console", "tensorboard", "wandb")


@dataclass(frozen=True)
class Inputs:
    """What a run is made of. models: by role, as given; rewards: None for verl's own by data_source."""

    models: Mapping[str, Any]
    settings: Settings
    places: Places
    callbacks: Callbacks
    tokenizer: Any
    rows: list[Row]
    held_out: list[Row]
    longest_prompt: int
    rewards: Rewards | None

    @property
    def pass_fields(self) -> dict[str, Any]:
        """Of a training pass, for device maps."""
        return {
            "batch_size": self.settings.ppo["micro_batch_size"],
            "seq_len": self.longest_prompt + self.settings.generation["max_new_tokens"],
            "gradient_checkpointing": self.settings.gradient_checkpointing,
        }


def read_inputs(
    *,
    models: Mapping[str, Any],
    model_config: Any,
    settings: Mapping[str, Any],
    data: tuple[Any, Any],
    runner: str,
    tokenizer: Any,
    callbacks: Sequence[Any],
    loggers: Sequence[str],
    processes: int,
) -> Inputs:
    """Raises ConfigError with every fault of settings, places, models, data and rewards.

    What is looked at together, such as prompts beside the model's positions, is looked at where each of these is right.
    models: by role, None where none was given. settings: the arguments of Settings.read. data: (train_data, val_data).
    """
    faults = Faults()
    heard, read, places = Callbacks(()), None, None
    with faults.gathering():
        heard = Callbacks(callbacks)
    with faults.gathering():
        _check_runner(runner, processes)
    with faults.gathering():
        _check_loggers(loggers)
    with faults.gathering():
        read = Settings.read(**settings, processes=processes)
    by_role: Mapping[str, Any] | None = None
    with faults.gathering():
        by_role = given_by_role(model_config)
    actor, reward = models["actor"], models["reward"]
    reward_models = [item for item in _items(reward) if not is_function(item)] if reward is not None else []
    sound: list[Any] = []
    """Models that their roles can have."""
    unread: set[str] = set()
    """Names behind which there is no model: roles with one name have that fault in common, and a hub is asked for long."""
    for role, model in models.items():
        for given in [item for item in reward_models if _is_model(item)] if role == "reward" else [model]:
            if isinstance(given, str | Path) and str(given) in unread:
                continue
            n_before = len(faults.findings)
            with faults.gathering():
                if (given is not None or role == "actor") and not (role == "reward" and _scores_steps(given)):
                    check_model(role, given)
                sound.append(given)
            if any(finding.where == "model" for finding in faults.findings[n_before:]):
                unread.add(str(given))
    if read is not None:
        with faults.gathering():
            _check_roles(models, read)
        with faults.gathering():
            roles = ("actor", *(["critic"] if read.has_critic else []), *(["ref"] if read.has_ref else []))
            more = ("reward",) if reward_models else ()
            if by_role is not None:
                places = read_places(by_role, (*roles, *more), lora=bool(read.ppo["lora_rank"]))
    for model in reward_models:
        with faults.gathering():
            if places is not None and _is_in(model, sound):
                _check_outputs(model, places.roles["reward"].scoring)
    found = None
    with faults.gathering():
        if _is_in(actor, sound) or tokenizer is not None:
            found = load_tokenizer(actor, tokenizer)
    rewards: Rewards | None = None
    with faults.gathering():
        rewards = _rewards(reward, data[0], places)
    rows: list[Row] = []
    held: list[Row] = []
    with faults.gathering():
        own, own_held = read_given(*data)
        if reward is None and own is not None and all(row["data_source"] == "prompts" for row in own):
            why = "there is none, and the data names no data_source by which verl would have one"
            faults.findings += config_error(
                "no-reward", "reward_model", None, why, "Give a function or a model"
            ).findings
        if read is not None:
            rows, held = complete_rows(own, own_held, seed=read.ppo["seed"])
    longest = 0
    with faults.gathering():
        if read is not None and rows:
            longest = _check_lengths(rows, held, found, read, actor if _is_in(actor, sound) else None)
    faults.check()
    assert read is not None
    assert places is not None
    return Inputs(models, read, places, heard, found, rows, held, longest, rewards)


def _is_model(given: Any) -> bool:
    """Whether a reward that is no function is a model, or may name one; of the rest read_rewards says what is wrong."""
    return isinstance(given, str | Path) or hasattr(given, "state_dict")


def _is_in(model: Any, models: list[Any]) -> bool:
    """By identity: modules and folders do not compare with each other."""
    return any(other is model for other in models)


def _scores_steps(model: Any) -> bool:
    """Whether a reward model, as given, is one of steps."""
    if not isinstance(model, str | Path) and not hasattr(model, "save_pretrained"):
        return False
    config = read_config(str(model)) if isinstance(model, str | Path) else model.config
    named = None if isinstance(model, str | Path) else type(model).__name__
    return task_of(config, named) in ("process-reward", "value") and not hasattr(model, "peft_config")


def _check_outputs(model: Any, scoring: Mapping[str, Any]) -> None:
    """Raises ConfigError for keys of model_config["reward"] that do not go with a reward model."""
    named = isinstance(model, str | Path)
    config = read_config(str(model)) if named else model.config
    try:
        asked = {name: scoring.get(name) for name in _OF_OUTPUTS}
        choose_outputs(str(model) if named else type(model).__name__, config, **asked)
    except ConfigError as error:
        where = "model_config['reward'][{!r}]"
        raise ConfigError(replace(finding, where=where.format(finding.where)) for finding in error.findings) from error


def _items(reward: Any) -> list[Any]:
    listed = reward if isinstance(reward, list) else [reward]
    return [item[0] if isinstance(item, tuple) and len(item) == 2 else item for item in listed]


def _rewards(reward: Any, train_data: Any, places: Places | None) -> Rewards | None:
    if reward is None:
        return read_rewards("pkg://verl_shard.quickstart.reward:compute_score", {}) if train_data is None else None
    model: dict[str, Any] = {}
    if places is not None and (place := places.roles.get("reward")) is not None:
        model = loading(place, cpu=places.cpu)
    listed = reward if isinstance(reward, list) else [reward]
    pairs = [item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0) for item in listed]
    # A loaded module is saved later, and then named by its folder.
    named = [(f"reward-{i}" if hasattr(source, "state_dict") else source, w) for i, (source, w) in enumerate(pairs)]
    return read_rewards(named, model)


def loading(place: RolePlace, *, cpu: bool) -> dict[str, Any]:
    """How a reward model is loaded: the arguments of RewardModel. cpu: whether the run is there."""
    dtype = dtype_name(place.dtype) if place.dtype is not None else "float32" if cpu else "bfloat16"
    made: dict[str, Any] = {"dtype": dtype, "attn_implementation": place.attn_implementation, **place.scoring}
    if place.offload != "none":
        made |= {"offload": place.offload, **place.offloading}
    if place.copies:
        return made | {"copies_on": list(place.devices)}
    if place.device_map is not None:
        return made | {"device_map": dict(place.device_map)}
    if len(place.devices) > 1:
        return made | {"device_map": "balanced", "devices": place.devices}
    return made | {"device_map": {"": place.devices[0]}}


def _check_runner(runner: str, processes: int) -> None:
    if runner not in RUNNERS:
        raise config_error("unknown-runner", "runner", runner, "no such runner", f"Use one of {', '.join(RUNNERS)}")
    if runner == "verl" and processes > 1:
        why = f"it was started in {processes} processes, and verl starts its own on Ray"
        raise config_error("runner-and-launcher", "runner", runner, why, "Start the script with python")


def _check_loggers(loggers: Sequence[str]) -> None:
    if isinstance(loggers, str):
        raise config_error("unknown-logger", "loggers", loggers, "a text, not a list", f"Write [{loggers!r}]")
    if unknown := [name for name in loggers if name not in LOGGERS]:
        fix = f"Use some of {', '.join(LOGGERS)}; metrics.jsonl is written anyway"
        raise config_error("unknown-logger", "loggers", ", ".join(unknown), "no logger of this trainer", fix)
    if absent := [name for name in loggers if name != "console" and importlib.util.find_spec(name) is None]:
        fix = f"pip install {' '.join(absent)}"
        raise config_error("logger-not-installed", "loggers", ", ".join(absent), "it is not installed", fix)


def _check_roles(models: Mapping[str, Any], settings: Settings) -> None:
    if models["critic"] is not None and not settings.has_critic:
        why = f"{settings.ppo['adv_estimator']} has no critic"
        raise config_error("no-effect", "critic_model", models["critic"], why, "Leave it out, or use adv_estimator gae")
    if models["ref"] is not None and not settings.has_ref:
        raise config_error("no-effect", "ref_model", models["ref"], "kl_coef is 0", "Leave it out")
    if models["ref"] is not None and settings.ppo["lora_rank"]:
        why = "with lora_rank the reference is the actor without its adapters"
        raise config_error("no-effect", "ref_model", models["ref"], why, "Leave it out")


def _check_lengths(rows: list[Row], held: list[Row], tokenizer: Any, settings: Settings, actor: Any) -> int:
    """The longest prompt that the run allows. Raises ConfigError with what does not go together.

    tokenizer, actor: None where they are not right; what needs them is then not looked at.
    """
    faults, longest = Faults(), settings.ppo.get("max_prompt_length")
    found = 0
    with faults.gathering():
        if tokenizer is not None:
            found = check_rows([*rows, *held], tokenizer, longest=longest, where="train_data and val_data")
    batch = settings.ppo["batch_size"]
    with faults.gathering():
        if len(rows) < batch:
            why = f"there are only {len(rows)} prompts to train on"
            raise config_error("too-few-rows", "ppo_config['batch_size']", batch, why, f"Give {len(rows)} or less")
    positions = None if actor is None else _positions(actor)
    prompt, response = found or longest or 0, settings.generation["max_new_tokens"]
    with faults.gathering():
        if positions is not None and prompt + response > positions:
            why = f"prompt {prompt} + response {response} = {prompt + response} tokens, and the model has {positions} positions"
            fix = f"Give {positions - prompt} or less" if prompt < positions else "Take shorter prompts"
            raise config_error("too-long-for-model", "generation_config['max_new_tokens']", response, why, fix)
    faults.check()
    return longest or found


def _positions(actor: Any) -> int | None:
    config = actor.config if hasattr(actor, "config") else read_config(str(actor))
    most: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return most
