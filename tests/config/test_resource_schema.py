"""The JSON schema for editors is that of the code, and says of files what the code says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from verl_shard.common.errors import ConfigError
from verl_shard.config.resource_config import as_resource_config
from verl_shard.config.resource_schema import as_markdown, as_text, json_schema, shipped

DOCS = Path(__file__).parents[2] / "docs" / "resource_config.md"
REGENERATE = "run: python -m verl_shard.config.resource_schema docs/resource_config.md"


def test_the_shipped_file_is_that_of_the_code() -> None:
    assert shipped() == as_text(), REGENERATE


def test_the_docs_have_the_tables_of_the_code() -> None:
    assert as_markdown() in DOCS.read_text(encoding="utf-8"), REGENERATE


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


GOOD = [
    "actor: {device_type: cuda, device_ids: [0, 1], strategy: fsdp}\n"
    "rollout: {device_ids: [3], strategy: vllm, vllm_args: {tensor_parallel_size: 1, gpu_memory_utilization: 0.85}}\n"
    "comm_backend: nccl\ntimeout_seconds: 180",
    "actor: some/model\nref:\nnodes: 2",
    "reward: {device_type: cpu, device_ids: [], strategy: none}",
    'critic: {device_ids: "0-3", attention: sdpa}\ncolocation: [[actor, critic]]\nnodes: {count: 1, gpus: 8, memory: 80GiB}',
    "actor: {devices: 4}\ncolocation: separate",
]
BAD = [
    "actor: {stratgey: fsdp}", "actor: {strategy: vllm}", "rollout: {strategy: fsdp}", "critic: {device_ids: 0}",
    "comm_backend: nncl", "criticc: {}", "nodes: {count: 0}", "colocation: [[actor, judge]]", "timeout_seconds: soon",
    "rollout: {vllm_args: {gpu_memory_utilization: 1.5}}", "actor: [0, 1]", "actor: {model: 3}", "actor: {model: [x]}",
    "actor: {gradient_checkpointing: 1}", "actor: {lora_rank: true}", "rollout: {gpu_memory_utilization: true}",
    "nodes: {host_memory: true}",
]  # fmt: skip


@pytest.mark.parametrize("text", [*GOOD, *BAD])
def test_editors_are_told_what_the_loader_says(text: str) -> None:
    given: Any = yaml.safe_load(text)
    valid = jsonschema.Draft202012Validator(json_schema()).is_valid(given)
    assert valid is (text in GOOD)
    if valid:
        as_resource_config(given)
    else:
        with pytest.raises(ConfigError):
            as_resource_config(given)
