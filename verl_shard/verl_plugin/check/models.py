"""Model paths: folders that are not here, and verl's default that few have."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from verl_shard.common.errors import Finding
from verl_shard.verl_plugin.check.tree import Composed


def find(made: Composed) -> Iterator[Finding]:
    """Of the roles that there are. A folder may be on the cluster only, so that these are warnings."""
    keys = ["actor_rollout_ref.model.path"]
    keys += ["critic.model.path"] if made.has_critic else []
    keys += ["reward.reward_model.model_path"] if made.on("reward.reward_model.enable") else []
    for key in keys:
        name = made.text(key)
        if key not in made.given:
            if key != "reward.reward_model.model_path":
                yield made.fault(
                    key, "it is not set, and this is verl's default", f"{key}=MODEL", "warning", "no-model"
                )
            continue
        folder = Path(name).expanduser()
        if not name or name.startswith("hdfs:"):
            continue
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                why = "the folder has no config.json"
                yield made.fault(key, why, f"{key}=FOLDER that save_pretrained wrote", code="no-model")
            elif key == "critic.model.path" and not _has_tokenizer(folder):
                why = "verl reads a critic's tokenizer before it starts, and the folder has none"
                yield made.fault(
                    key, why, "Save the tokenizer there: tokenizer.save_pretrained(folder)", code="no-model"
                )
        elif name.startswith(("/", ".", "~")) or name.count("/") > 1:
            why = "there is no such folder on this machine"
            yield made.fault(
                key, why, f"{key}=FOLDER or a hub id, such as Qwen/Qwen2.5-7B-Instruct", "warning", "no-model"
            )
    if (
        made.lora_rank
        and made.text("actor_rollout_ref.rollout.name") == "vllm"
        and importlib.util.find_spec("vllm") is None
    ):
        key = "actor_rollout_ref.model.lora_rank"
        why = "with LoRA verl's check imports vLLM where it is started, and it is not installed here"
        yield made.fault(key, why, "Start it where vLLM is", "warning", "no-vllm")


def _has_tokenizer(folder: Path) -> bool:
    return any(folder.glob("tokenizer*")) or any(folder.glob("vocab*"))
