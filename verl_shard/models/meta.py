"""What a configuration is for, and a module built from it that has shapes and no memory."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Literal, get_args

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from verl_shard.common.errors import config_error

Task = Literal["causal-lm", "reward", "process-reward", "value", "other"]
"""What a model computes: next-token logits, one score for a sequence, classes for each token, one value for each
token; "other" is what none of these names, such as a masked language model."""

_AUTO = {
    "causal-lm": "AutoModelForCausalLM",
    "reward": "AutoModelForSequenceClassification",
    "process-reward": "AutoModelForTokenClassification",
    "value": "AutoModelForTokenClassification",
}
_OTHER = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForPreTraining": "AutoModelForPreTraining",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForImageTextToText": "AutoModelForImageTextToText",
}


def parse_task(task: str | None) -> Task | None:
    """`task` if it is one; None stays None (what the architecture says). Raises ConfigError otherwise."""
    if task is not None and task not in get_args(Task):
        choices = ", ".join(f'"{name}"' for name in get_args(Task))
        raise config_error("unknown-task", "task", task, "not a task", f"Use one of {choices}, or leave it out")
    return task  # type: ignore[return-value]


def task_of(config: PretrainedConfig | None, architecture: str | None = None) -> Task:
    """The task that an architecture's name says; of a configuration that names none, "causal-lm"."""
    named = architecture or next(iter(getattr(config, "architectures", None) or ()), None)
    if named is None:
        return "causal-lm" if config is not None else "other"
    if named.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return "causal-lm"
    if named.endswith("ForSequenceClassification"):
        return "reward"
    if named.endswith("ForTokenClassification"):
        return "value" if getattr(config, "num_labels", None) == 1 else "process-reward"
    return "other"


def config_for(config: PretrainedConfig, task: Task) -> PretrainedConfig:
    """A copy of `config` with the labels that `task` needs.

    A reward or value model has one label. A checkpoint that is a classifier already keeps its own number for
    "reward", as its head would not load otherwise. A value model gets no dropout before its head unless it asks for
    one, as in verl; transformers' default is 0.1.
    """
    made = copy.deepcopy(config)
    has_head = getattr(config, "architectures", None) is not None and task_of(config) == "reward"
    if task == "value" or (task == "reward" and not has_head):
        made.num_labels = 1
    if task == "value" and getattr(made, "classifier_dropout", None) is None:
        made.classifier_dropout = 0.0
    return made


def positions_of(module: nn.Module | None) -> int | None:
    """How many positions a transformers model has, where it has a limit."""
    config = getattr(module, "config", None)
    if not isinstance(config, PretrainedConfig):
        return None
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def auto_class(config: PretrainedConfig, task: Task) -> Any:
    """The transformers auto class that builds and loads `config` for `task`."""
    architecture = next(iter(getattr(config, "architectures", None) or ()), "")
    if task == "causal-lm" and architecture.endswith("ForConditionalGeneration"):
        kind = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForImageTextToText"
        return getattr(transformers, kind)
    if task != "other":
        return getattr(transformers, _AUTO[task])
    suffix = next((end for end in _OTHER if architecture.endswith(end)), "")
    return getattr(transformers, _OTHER.get(suffix, "AutoModel"))


def build_on_meta(
    config: PretrainedConfig, task: Task | None = None, *, dtype: torch.dtype, trust_remote_code: bool = False
) -> nn.Module:
    """The model of `config` on the meta device: real names and shapes, no memory, no weights read.

    `config` is not changed, and has the labels it should (config_for). The attention implementation is set to "eager"
    for the build: it holds no tensors, and others refuse to be built where they cannot run.
    Raises ConfigError when the architecture has no model for the task.
    """
    task = task or task_of(config)
    cls = auto_class(config, task)
    try:
        with torch.device("meta"):
            model = cls.from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
            )
    except ValueError as error:
        text = " ".join(str(error).split())
        if "Unrecognized configuration class" not in text:
            raise config_error("model-not-built", "model", config.model_type, text, "Check its config.json") from error
        why = f'transformers has no {cls.__name__} for "{config.model_type}"'
        raise config_error("no-model-for-task", "task", task, why, "Use another task, or another model") from error
    assert isinstance(model, nn.Module)
    return model


def makes_logits_to_keep(module: nn.Module) -> bool:
    """Whether a model makes the logits at the positions that it is asked for, and no others: those of transformers that take
    logits_to_keep. Code of others may mean something else by it."""
    plain: Any = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
    known = type(plain).__module__.startswith("transformers.")
    return known and "logits_to_keep" in inspect.signature(plain.forward).parameters
