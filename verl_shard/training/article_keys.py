"""Every key of PPOTrainer's dicts and what it does: one table, from which values are checked and the docs are written."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.common.units import parse_bytes
from verl_shard.config.roles import Offload
from verl_shard.mapping.devices import parse_device
from verl_shard.models.dtypes import parse_dtype
from verl_shard.runtime.scoring_inputs import AGGREGATES
from verl_shard.runtime.scoring_outputs import TASKS

ROLES = ("actor", "critic", "reward", "ref", "rollout")
_SCORING, _REWARD = ("ref", "reward"), ("reward",)
GROUPED = (
    "grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "grpo_passk", "gpg", "rloo_vectorized", "grpo_vectorized",
)  # fmt: skip
"""verl's estimators that compare the responses to a prompt; each needs more than one of them."""
ESTIMATORS = ("gae", "reinforce_plus_plus", *GROUPED)
NOT_ESTIMATED = {
    "remax": "it needs the reward of a greedy response, which verl's V1 trainer does not make",
    "optimal_token_baseline": "it needs sum_pi_squared, which verl's V1 trainer does not hand to it",
    "tir_optimal_token_baseline": "it needs sum_pi_squared, which verl's V1 trainer does not hand to it",
    "gdpo": "it needs several rewards by name, which verl's V1 trainer does not hand to it",
}
KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
POLICY_LOSSES = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
)

Check = Callable[[Any], str | None]
"""Says what is wrong with a value, or None."""


def _count(value: Any) -> str | None:
    return (
        None if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else "not a number of 1 or more"
    )


def _number(low: float, high: float = math.inf, *, over: bool = False) -> Check:
    def check(value: Any) -> str | None:
        fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if fine and (low < value if over else low <= value) and value <= high:
            return None
        top = "" if high == math.inf else f" and at most {high:g}"
        return f"not a number {'over' if over else 'of at least'} {low:g}{top}"

    return check


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "neither True nor False"


def _choice(*choices: Any) -> Check:
    return lambda value: None if value in choices else f"not one of {', '.join(map(str, choices))}"


def _parsed(parse: Callable[[Any], Any], kind: str) -> Check:
    def check(value: Any) -> str | None:
        try:
            parse(value)
        except ConfigError:
            return f"not {kind}"
        return None

    return check


def _frequency(value: Any) -> str | None:
    return None if value == -1 else _count(value) and "not a number of steps, nor -1 for never"


def _estimator(value: Any) -> str | None:
    if value in NOT_ESTIMATED:
        return NOT_ESTIMATED[value]
    return _choice(*ESTIMATORS)(value)


def _only(value: Any, why: str) -> Check:
    return lambda given: None if given == value else why


def _devices(value: Any) -> str | None:
    if not isinstance(value, list | tuple) or not value:
        return "not a list of devices"
    return next((wrong for item in value if (wrong := _parsed(parse_device, "a list of devices")(item))), None)


def _mapping(value: Any) -> str | None:
    return None if isinstance(value, Mapping) and value else "not a map from module names to devices"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str | Path) and str(value) else "not a text"


def _label(value: Any) -> str | None:
    fine = isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
    return None if fine else "not the index or name of an output"


@dataclass(frozen=True)
class Key:
    """A key that is taken. does: what it does, as the docs say it. check: what is wrong with a value."""

    section: str
    name: str
    does: str
    check: Check
    article: bool = False
    """Whether it stands in the articles' code."""
    roles: tuple[str, ...] = ROLES
    """Of model_config: the roles that it is for."""


KEYS = (
    Key("model_config", "device", "The one device that holds the role's model.", _parsed(parse_device, "a device"), True),
    Key("model_config", "devices", "The GPUs that the model is laid over by an exact, balanced map.", _devices),
    Key("model_config", "device_map", "Which module is on which GPU; checked as check_device_map does.", _mapping, True),
    Key("model_config", "dtype", "What weights are held in: bfloat16 or float32; a reward model's may be float16. Of a "
        "role that trains, bfloat16 loses small updates, which a notice says.", _parsed(parse_dtype, "a dtype"), True),
    Key("model_config", "torch_dtype", "The same as dtype, by transformers' older name.", _parsed(parse_dtype, "a dtype"), True),
    Key("model_config", "precision", "bf16-mixed: float32 weights under bfloat16 autocast; or bf16 or fp32, as dtype says them.",
        _choice("bf16-mixed", "bf16", "fp32")),
    Key("model_config", "attn_implementation", "The attention, by transformers' name. By default sdpa.",
        _choice("sdpa", "eager", "flash_attention_2"), True),
    Key("model_config", "offload", "Of ref and reward: stream keeps the blocks in host memory and copies each in while others "
        "compute; or accelerate's cpu_offload or cpu_offload_with_hook, many times slower; auto where the GPU lacks room. [none]",
        _choice(*get_args(Offload))),
    Key("model_config", "embeddings_on_host", "Of ref and reward with offload stream: True leaves the input embedding on the "
        "host too, and only the rows that are looked up travel. [False]", _choice(True, False), roles=_SCORING),
    Key("model_config", "pin_limit", "Of ref and reward with offload stream or auto: the most host memory that a process pins "
        "for all its models, such as 40GiB. [what the host can spare]",
        _parsed(partial(parse_bytes, where="pin_limit"), "a number of bytes"), roles=_SCORING),
    Key("model_config", "copies_on", "Of ref and reward: a whole copy on each of these devices; batches are split over them, and "
        "results keep the order of the responses.", _devices, roles=_SCORING),
    Key("model_config", "strategy", "What a resource config says of a role that names no device: none, the first GPU of this "
        "process; device_map, laid over all of them; of ref and reward data_parallel, a copy on each. [device_map]",
        _choice("none", "device_map", "data_parallel"), roles=("actor", "critic", "ref", "reward")),
    Key("model_config", "task", "Of reward: reward, one score a response, or process-reward, one a step. [as its architecture "
        "says]", _choice(*TASKS), roles=_REWARD),
    Key("model_config", "tokenizer", "Of reward: the hub id or folder of its tokenizer. [the model's own]", _text, roles=_REWARD),
    Key("model_config", "chat_template", "Of reward: a Jinja text, or the file that holds one. [its tokenizer's]", _text,
        roles=_REWARD),
    Key("model_config", "label", "Of reward: the index or name of the output that is the score, where there are several.", _label,
        roles=_REWARD),
    Key("model_config", "aggregate", "Of a reward model of steps: min, last, mean or product of them. [min]",
        _choice(*AGGREGATES), roles=_REWARD),
    Key("model_config", "separator", "Of a reward model of steps: what stands between two. [two line ends]", _text,
        roles=_REWARD),
    Key("model_config", "step_mark", "Of a reward model of steps: what it reads after each. [the separator]", _text,
        roles=_REWARD),
    Key("model_config", "batch_size", "Of reward: conversations in one forward pass. [16]", _count, roles=_REWARD),
    Key("model_config", "too_long", "Of reward: for a conversation longer than the model takes, stop the run, or truncate its "
        "beginning. [stop]", _choice("stop", "truncate"), roles=_REWARD),
    Key("model_config", "empty_response", "Of reward: score an empty response as it is, or stop the run. [score]",
        _choice("score", "stop"), roles=_REWARD),
    Key("generation_config", "max_new_tokens", "The longest response, in tokens. [128]", _count, True),
    Key("generation_config", "do_sample", "True, as it always is: PPO learns from samples. False is refused.",
        _only(True, "a greedy response explores nothing, and PPO learns from samples"), True),
    Key("generation_config", "temperature", "Divides the logits, in the rollout and in every log-probability. [1.0]",
        _number(0, over=True)),
    Key("generation_config", "top_p", "Samples from the fewest tokens that have this probability. [1.0]",
        _number(0, 1, over=True), True),
    Key("generation_config", "top_k", "Samples from so many of the likeliest tokens; 0 or -1 from all. [0]",
        lambda value: None if value in (0, -1) else _count(value)),
    Key("generation_config", "batch_size", "Responses that are generated at a time in a process: less memory, more time. [256]",
        _count, True),
    Key("generation_config", "enforce_eager", "Without CUDA graphs, which generation has on one GPU: no memory for them, several "
        "times slower. [False]", _flag),
    Key("generation_config", "num_return_sequences", "Responses to each prompt, as ppo_config's n.", _count),
    Key("ppo_config", "kl_coef", "The weight of the KL to the reference; 0 leaves the reference out. [0.05]", _number(0), True),
    Key("ppo_config", "max_epochs", "How often a step goes over its batch, for actor and critic. [1]", _count, True),
    Key("ppo_config", "ppo_epochs", "The same as max_epochs, by verl's name.", _count),
    Key("ppo_config", "adv_estimator", "verl's advantage estimator: gae has a critic, the others have none. [gae]", _estimator),
    Key("ppo_config", "kl_in", "Where the KL is: reward or loss. [reward with gae, else loss]", _choice("reward", "loss")),
    Key("ppo_config", "kl_penalty", "verl's estimate of the KL. [kl in the reward, low_var_kl in the loss]",
        _choice(*KL_PENALTIES)),
    Key("ppo_config", "steps", "Steps to train. [100]", _count),
    Key("ppo_config", "batch_size", "Prompts in a step. [8]", _count),
    Key("ppo_config", "mini_batch_size", "Prompts in an optimizer step, over all processes. [batch_size]", _count),
    Key("ppo_config", "micro_batch_size", "Responses in a forward and backward of a process. [4, or what divides]", _count),
    Key("ppo_config", "n", "Responses to each prompt. [1 with gae and reinforce_plus_plus, else 4]", _count),
    Key("ppo_config", "lr", "The actor's learning rate. [1e-6]", _number(0)),
    Key("ppo_config", "learning_rate", "The same as lr.", _number(0)),
    Key("ppo_config", "critic_lr", "The critic's learning rate. [1e-5]", _number(0)),
    Key("ppo_config", "gamma", "Discount of later rewards. [1.0]", _number(0, 1)),
    Key("ppo_config", "lam", "GAE's lambda. [1.0]", _number(0, 1)),
    Key("ppo_config", "clip_ratio", "How far from 1 the policy ratio is clipped. [0.2]", _number(0)),
    Key("ppo_config", "entropy_coeff", "The weight of an entropy bonus in the loss. [0]", _number(0)),
    Key("ppo_config", "policy_loss", "verl's policy loss by name. [vanilla]", _choice(*POLICY_LOSSES)),
    Key("ppo_config", "max_prompt_length", "The longest prompt allowed, in tokens. [the longest there is]", _count),
    Key("ppo_config", "lora_rank", "Trains adapters of this rank; the reference is then the actor without them. [0]",
        lambda value: None if value == 0 else _count(value)),
    Key("ppo_config", "lora_alpha", "The adapters' scale, times their rank. [16]", _count),
    Key("ppo_config", "test_freq", "Steps from one validation to the next; -1 for never. [-1]", _frequency),
    Key("ppo_config", "save_freq", "Steps from one checkpoint to the next; -1 for never. [-1]", _frequency),
    Key("ppo_config", "seed", "Of everything that is random. [0]",
        lambda value: None if value == 0 else _count(value) and "not a number of 0 or more"),
    Key("gradient_checkpointing_kwargs", "use_reentrant", "False, as it always is: the other kind loses gradients of frozen "
        "inputs, and is refused.", _only(False, "reentrant checkpointing loses the gradients of adapters"), True),
)  # fmt: skip

REFUSED = {
    ("generation_config", "repetition_penalty"): "verl's log-probabilities would not be those of the samples; leave it out",
    ("generation_config", "min_new_tokens"): "verl's rollout has no such setting; leave it out",
    ("generation_config", "num_beams"): "PPO samples, and a beam does not; leave it out",
    ("generation_config", "max_length"): "write max_new_tokens: the prompt's length is ppo_config's max_prompt_length",
    ("generation_config", "pad_token_id"): "it is the tokenizer's; set it there",
    ("generation_config", "eos_token_id"): "it is that of the model's generation_config.json; set it there",
    ("ppo_config", "init_kl_coef"): "write kl_coef",
    ("ppo_config", "target_kl"): 'write overrides=["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=..."]',
    ("ppo_config", "cliprange"): "write clip_ratio",
    ("ppo_config", "model_name"): "the model is PPOTrainer's actor_model",
    ("model_config", "max_memory"): "write device_map=build_device_map(model, devices=[...], max_memory={...})",
    ("model_config", "load_in_8bit"): "quantized weights are not trained; leave it out",
    ("model_config", "load_in_4bit"): "quantized weights are not trained; leave it out",
}  # fmt: skip
"""Keys that people write and that are not taken, each with what to write instead."""
SAME = {"torch_dtype": "dtype", "ppo_epochs": "max_epochs", "learning_rate": "lr"}
"""Keys that are another's other name."""
_BEGIN, _END = "<!-- keys: begin -->\n", "<!-- keys: end -->"
_BY_NAME = {(key.section, key.name): key for key in KEYS}


def read_section(section: str, given: Mapping[str, Any] | None, where: str = "", role: str = "") -> dict[str, Any]:
    """The values of a section by the keys' first names. role: whose model_config it is.

    Raises ConfigError for every unknown, refused or wrong one, and for one that the role does not have.
    """
    where = where or section
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(_fault("not-a-dict", where, type(given).__name__, "not a dict", "Write {key: value}"))
    faults, values = [], {}
    for name, value in (given or {}).items():
        place = f"{where}[{name!r}]"
        key = _BY_NAME.get((section, name))
        if key is None:
            faults.append(_unknown(section, str(name), value, place))
        elif role and role not in key.roles:
            why = f"it is for {' and '.join(key.roles)}, and changes nothing of the {role}"
            faults.append(_fault("no-effect", place, value, why, "Leave it out"))
        elif (wrong := key.check(value)) is not None:
            faults.append(_fault("wrong-value", place, value, wrong, key.does))
        elif SAME.get(name, name) in values:
            fix = f"Leave out {name}"
            faults.append(_fault("key-twice", place, value, f"{SAME.get(name, name)} is given too", fix))
        else:
            values[SAME.get(name, name)] = value
    if faults:
        raise ConfigError(faults)
    return values


def _unknown(section: str, name: str, value: Any, place: str) -> Finding:
    if (section, name) in REFUSED:
        fix = REFUSED[section, name]
        return _fault("refused-key", place, value, "PPOTrainer does not take it", fix[0].upper() + fix[1:])
    names = [key.name for key in KEYS if key.section == section]
    near = difflib.get_close_matches(name, names, 1)
    meant = f"Did you mean {near[0]}? It takes" if near else "Use"
    if section == "generation_config":
        from transformers import GenerationConfig

        why = (
            "verl's rollout has no such setting"
            if hasattr(GenerationConfig(), name)
            else "transformers does not know it"
        )
        return _fault("unknown-key", place, value, why, f"{meant} {', '.join(names)}")
    return _fault("unknown-key", place, value, "there is no such key", f"{meant} {', '.join(names)}")


def _fault(code: str, where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, where, str(given), why, fix)


def as_markdown() -> str:
    """The tables of the docs: the keys by section, and those that are refused."""
    lines: list[str] = []
    for section in dict.fromkeys(key.section for key in KEYS):
        lines += [f"### `{section}`", "", "| key | what it does | in the articles |", "|---|---|---|"]
        lines += [
            _row(f"`{key.name}`", key.does, "yes" if key.article else "") for key in KEYS if key.section == section
        ]
        lines.append("")
    lines += ["### Refused by name", "", "| key | what to do instead |", "|---|---|"]
    lines += [_row(f'`{section}["{name}"]`', fix) for (section, name), fix in REFUSED.items()]
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_table(docs: Path) -> None:
    """Puts the tables between the marks of a page."""
    text = docs.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    docs.write_text(f"{before}{_BEGIN}{as_markdown()}{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_table(Path(sys.argv[1]))
