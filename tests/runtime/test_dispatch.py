"""Where inputs go, and outputs that stay where they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from verl_shard.runtime.dispatch import input_device, keep_outputs_in_place


def test_inputs_go_where_the_embedding_is(small_config: Callable[..., Any]) -> None:
    model = transformers.AutoModelForCausalLM.from_config(small_config("qwen3", tie_word_embeddings=False))
    model.model.embed_tokens.to("meta")
    assert input_device(model) == torch.device("meta")
    model.model.embed_tokens.to_empty(device="cpu")
    model.lm_head.to("meta")
    assert input_device(model) == torch.device("cpu")


def test_a_module_without_an_embedding_takes_its_first_parameter() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2))
    assert input_device(module) == torch.device("meta")


def test_outputs_are_not_sent_back_to_the_first_device() -> None:
    # "meta" stands for a second device: accelerate's root hook sends outputs back to where the inputs were.
    module = torch.nn.Linear(2, 3)
    add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    there = torch.zeros(1, 2, dtype=torch.float32)
    sent_back = module(there.to("cpu"))
    assert sent_back.shape == (1, 3)
    hook: Any = module._hf_hook
    hook.input_device = torch.device("meta")
    assert hook.post_forward(module, torch.ones(1)).device.type == "meta"
    keep_outputs_in_place(module)
    assert hook.post_forward(module, torch.ones(1)).device.type == "cpu"


def test_a_model_that_is_not_dispatched_is_left_alone() -> None:
    keep_outputs_in_place(torch.nn.Linear(1, 1))
