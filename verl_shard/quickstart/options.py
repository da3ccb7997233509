"""What `verl-shard quickstart` can be asked for; the texts here are the command's help."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.verl_plugin.overrides import ALGORITHMS

DEFAULT_STEPS = 80
DEMO = "demo"
"""As --reward-model: one is made for the run."""


@dataclass(frozen=True)
class QuickstartOptions:
    """Everything that decides a quick start. Raises ConfigError with all faults at once."""

    model: Annotated[
        str | None,
        "Folder or hub id of the model to train. By default a small Llama is made and taught the answers' form first.",
    ] = None
    data: Annotated[
        tuple[Path, ...],
        "Parquet file to train on, in verl's columns (repeat for several). By default prompts of reasoning-gym tasks.",
    ] = ()
    val_data: Annotated[
        tuple[Path, ...], "Parquet file to validate on (repeat for several). By default a tenth of --data is held out."
    ] = ()
    reward: Annotated[
        str | None,
        "Reward function for --data, as FILE.py:FUNCTION. By default verl's own for each row's data_source.",
    ] = None
    reward_model: Annotated[
        str | None,
        "Folder of a sequence classifier with one label, whose score is the reward. It takes 4 bytes a parameter of host memory "
        "(2 where those are too many), and on the CPU, for a billion of them, about 4 s a response of 200 tokens on two cores. "
        "Or demo: a small one (10 MB) is trained first on right and wrong answers to the tasks, in under 30 s on two "
        "cores (after its warm-up, with a --model of your own). The task's own reward, or --reward's, is measured beside it.",
    ] = None
    reward_device: Annotated[
        str | None,
        "Where the reward model scores: cpu, or a GPU such as cuda:0, on which a large one is streamed from host memory. By "
        "default the run's first GPU, and the CPU where there is none.",
    ] = None
    task: Annotated[
        tuple[str, ...], "reasoning-gym task to take prompts from (repeat for several). By default all known."
    ] = ()
    algorithm: Annotated[
        str, "ppo: GAE with a critic; grpo: groups of responses and no critic, which saves its memory."
    ] = "ppo"
    steps: Annotated[int, "Training steps."] = DEFAULT_STEPS
    out: Annotated[Path | None, "Run folder. By default the next free runs/quickstart-N."] = None
    seed: Annotated[int, "Seed of everything that is random."] = 0
    resume: Annotated[bool, "Go on with the run in --out (by default the newest) from its last whole checkpoint."] = (
        False
    )
    gpus: Annotated[
        int | None,
        "GPUs to lay the models over. By default all that are visible, and the CPU where there are none.",
    ] = None
    batch_size: Annotated[int | None, "Prompts in a step."] = None
    n: Annotated[int | None, "Responses to each prompt."] = None
    micro_batch_size: Annotated[
        int | None, "Responses in one forward and backward: halving it halves the activations' memory, at some time."
    ] = None
    max_prompt_length: Annotated[int | None, "Longest prompt, in tokens."] = None
    max_response_length: Annotated[int | None, "Longest response, in tokens."] = None
    lr: Annotated[float | None, "Learning rate of the actor."] = None
    critic_lr: Annotated[float | None, "Learning rate of the critic."] = None
    kl_coef: Annotated[
        float | None, "Weight of the KL to the reference policy. By default 0.01, and 0.1 where a reward model scores."
    ] = None
    gradient_checkpointing: Annotated[
        bool, "Recompute activations in the backward: their memory falls to one block's, at about a third more time."
    ] = False
    attn_implementation: Annotated[
        str, "Attention: sdpa, eager, or flash_attention_2, which is quicker on long sequences and needs a GPU."
    ] = "sdpa"
    save_freq: Annotated[int | None, "Steps from one checkpoint to the next; the last two are kept."] = None

    def __post_init__(self) -> None:
        faults = [*self._number_faults(), *self._name_faults()]
        if faults:
            raise ConfigError(faults)

    def _number_faults(self) -> list[Finding]:
        counts = (
            "steps", "gpus", "batch_size", "n", "micro_batch_size", "max_prompt_length", "max_response_length", "save_freq",
        )  # fmt: skip
        faults = []
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                fix = "Leave out --gpus to run on the CPU" if name == "gpus" else "Give 1 or more"
                faults.append(Finding("error", "not-a-count", flag(name), str(value), f"{value} is less than 1", fix))
        for name in ("lr", "critic_lr", "kl_coef"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                faults.append(
                    Finding("error", "not-a-rate", flag(name), str(value), "not a number from 0 on", "Give one")
                )
        if self.seed < 0:
            faults.append(Finding("error", "not-a-seed", "--seed", str(self.seed), "it is negative", "Give 0 or more"))
        return faults

    def _name_faults(self) -> list[Finding]:
        faults = []
        if self.algorithm not in ALGORITHMS:
            faults.append(
                Finding("error", "unknown-algorithm", "--algorithm", self.algorithm, "no such algorithm",
                        f"Use one of {', '.join(ALGORITHMS)}")
            )  # fmt: skip
        if self.attn_implementation not in (choices := _attentions()):
            faults.append(
                Finding("error", "unknown-attention", "--attn-implementation", self.attn_implementation, "no such attention",
                        f"Use one of {', '.join(choices)}")
            )  # fmt: skip
        if self.data and self.task:
            faults.append(
                Finding("error", "data-and-task", "--task", ", ".join(self.task), "--data takes the place of tasks",
                        "Give --data or --task")
            )  # fmt: skip
        if self.data and self.reward_model == DEMO:
            faults.append(
                Finding("error", "demo-and-data", "--reward-model", DEMO, "it is trained on answers to our tasks, not to --data",
                        "Give the folder of a reward model, or leave out --data")
            )  # fmt: skip
        if self.reward_device is not None:
            if re.fullmatch(r"cpu|cuda|(cuda:)?\d+", self.reward_device) is None:
                faults.append(
                    Finding("error", "not-a-device", "--reward-device", self.reward_device, "not a device",
                            "Write cpu, or a GPU such as cuda:0")
                )  # fmt: skip
            if self.reward_model is None:
                faults.append(
                    Finding("error", "needs-reward-model", "--reward-device", self.reward_device, "--reward-model is not given",
                            "Give --reward-model too")
                )  # fmt: skip
        for name in ("val_data", "reward"):
            if getattr(self, name) and not self.data:
                faults.append(
                    Finding("error", "needs-data", flag(name), str(getattr(self, name)), "--data is not given",
                            "Give --data too")
                )  # fmt: skip
        return faults

    def identity(self) -> dict[str, Any]:
        """What a run keeps when it is resumed, by flag name. The rest, such as steps, may differ."""
        kept = ("model", "data", "val_data", "reward", "reward_model", "task", "algorithm", "seed", "batch_size", "n")
        return {name.replace("_", "-"): _plain(getattr(self, name)) for name in kept}

    def settings(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}


def flag(name: str) -> str:
    """The command-line flag of an option."""
    return "--" + name.replace("_", "-")


def _attentions() -> list[str]:
    """Those that a pass is planned with, but for the one of packed rows: the engine takes that by itself."""
    from verl_shard.memory.passes import ATTENTIONS  # imports torch, which the command's help does without
    from verl_shard.models.packed import PACKED

    return [name for name in ATTENTIONS if name != PACKED]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
