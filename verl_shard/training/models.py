"""The models of a run: what was given for each role, as a folder or hub id that both runners load from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_shard.common.errors import Finding, config_error
from verl_shard.common.notices import notice
from verl_shard.models.meta import task_of
from verl_shard.models.source import read_config

_TASKS = {"actor": ("causal-lm",), "ref": ("causal-lm",), "critic": ("causal-lm", "value"), "reward": ("reward",)}
_KINDS = {
    "causal-lm": "a causal language model",
    "value": "a value model (token classifier with one label)",
    "reward": "a reward model (sequence classifier)",
    "process-reward": "a process reward model (token classifier)",
    "other": "neither",
}


def check_model(role: str, given: Any) -> None:
    """Raises ConfigError unless the model is one that the role can have. Reads a config.json at most."""
    where = f"{role}_model"
    if hasattr(given, "peft_config"):
        why = "it is wrapped by PEFT, and verl makes its own adapters"
        raise config_error(
            "peft-model", where, type(given).__name__, why, "Give the base model and ppo_config lora_rank"
        )
    if hasattr(given, "state_dict"):
        if not hasattr(given, "save_pretrained"):
            why = "it is a module, but none of transformers'"
            raise config_error(
                "not-a-model", where, type(given).__name__, why, "Give a transformers model or its folder"
            )
        config = given.config
    elif isinstance(given, str | Path):
        config = read_config(str(given))
    else:
        why = "neither a model nor the name of one"
        raise config_error("not-a-model", where, type(given).__name__, why, "Give a hub id, a folder or a loaded model")
    wanted, found = _TASKS[role], task_of(config, type(given).__name__ if hasattr(given, "state_dict") else None)
    if found not in wanted or config.is_encoder_decoder:
        named = next(iter(getattr(config, "architectures", None) or ()), config.model_type)
        is_ = "an encoder-decoder" if config.is_encoder_decoder else _KINDS[found]
        why = f"{named} is {is_}, and the {role} is {' or '.join(_KINDS[task] for task in wanted)}"
        raise config_error("wrong-kind-of-model", where, named, why, "Give a model of that kind")


def load_tokenizer(actor: Any, given: Any) -> Any:
    """The tokenizer of a run: as given, or the one that lies with the actor. Raises ConfigError when there is none."""
    from transformers import AutoTokenizer

    if given is not None and not isinstance(given, str | Path):
        return given
    name = given or (actor if isinstance(actor, str | Path) else getattr(actor.config, "_name_or_path", ""))
    try:
        if not name:
            raise OSError("the model does not know where it was loaded from")
        return AutoTokenizer.from_pretrained(str(name))
    except (OSError, ValueError, KeyError) as error:
        why = f"no tokenizer is found with it ({' '.join(str(error).split())[:200].rstrip('. ')})"
        raise config_error(
            "no-tokenizer", "tokenizer", name or None, why, "Give tokenizer=, an object or a folder"
        ) from error


def as_folder(role: str, given: Any, tokenizer: Any, folder: Path) -> str:
    """Where the role's model is loaded from: the name that was given, or `folder`, into which a loaded module is saved."""
    if isinstance(given, str | Path):
        path = Path(given).expanduser()
        return str(path.resolve()) if path.is_dir() else str(given)
    why = "the run's engine lays models out itself"
    notice("module-saved", f"{role}_model", type(given).__name__, why, f"its weights saved to {folder} and loaded there; "
           "the module given is left as it is, and .save() writes the trained one")  # fmt: skip
    given.save_pretrained(folder)
    if role in ("actor", "reward"):
        tokenizer.save_pretrained(folder)
    return str(folder)


def no_effect(where: str, given: object, why: str) -> Finding:
    """A finding for something that was given and would change nothing."""
    return Finding("error", "no-effect", where, str(given), why, "Leave it out")
