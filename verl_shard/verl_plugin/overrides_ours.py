"""A plan for the device_map engine: one process with all GPUs of its node, generation on the actor's own module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_shard.common.errors import Finding
from verl_shard.planning.plan import Plan
from verl_shard.verl_plugin.overrides_shared import ACTOR, MODEL, REF, REWARD, ROLLOUT, Emission, named, raw_map

_STOCK_ONLY = ("param_offload", "optimizer_offload", "offload_policy")
_DTYPES = {"bf16": "bfloat16", "bf16-mixed": "float32", "fp32": "float32"}
_CPUS = 16


def ours(plan: Plan, plan_file: Path | None) -> tuple[dict[str, Any], list[Finding]]:
    """Keys with values, and what of the plan verl's trainer cannot have on this engine."""
    made = _Ours(plan)
    made.all(plan_file)
    return made.keys, made.faults


class _Ours(Emission):
    def all(self, plan_file: Path | None) -> None:
        plan = self.plan
        nodes = len(plan.inventory.nodes)
        if nodes > 1:
            why, fix = (
                f"one process has the GPUs of its node, and there are {nodes} nodes",
                "Plan for one node, or backend=fsdp2",
            )
            self.faults.append(Finding("error", "several-nodes", "nodes", str(nodes), why, fix))
        self.keys |= {
            "model_engine": "device_map",
            "trainer.device": "cuda",
            "trainer.nnodes": 1,
            "trainer.n_gpus_per_node": 1,
        }
        self.not_here()
        self.common()
        self.same_as_actor("attn_implementation")
        self.keys[f"+{MODEL}.override_config.attn_implementation"] = self.role("actor").get(
            "attn_implementation", "sdpa"
        )
        if plan_file is not None:
            self.keys[f"{ACTOR}.device_map.plan"] = plan_file.resolve()
        for role, key in (("actor", ACTOR), ("ref", REF), ("critic", "critic")):
            if role in plan.roles and not (role == "ref" and self.ref_in_actor):
                self.engine(role, key, plan_file)
        self.batches()
        self.keys |= {
            f"{ROLLOUT}.name": "hf",
            f"{ROLLOUT}.tensor_model_parallel_size": 1,
            f"{ROLLOUT}.agent.num_workers": 1,
            f"{ACTOR}.use_torch_compile": False,
            "reward.num_workers": 1,
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
            # verl asks for 3 CPUs a process whether they are there or not, and waits for ever when Ray has too few.
            "ray_kwargs.ray_init.num_cpus": _CPUS,
        }
        if "reward" in plan.roles:
            self.reward()

    def not_here(self) -> None:
        """What only FSDP has."""
        for role, own in self.plan.roles.items():
            for name in _STOCK_ONLY:
                if own.settings.get(name):
                    why = "the device_map engine keeps weights and states where the map puts them"
                    self.refuse(role, name, why, "Leave it out, or use backend=fsdp2")
            if role in ("actor", "ref") and own.settings.get("logits") == "chunked":
                why = "the engine always takes log-probabilities and entropies in chunks"
                self.refuse(role, "logits", why, "Use responses, full or fused")

    def engine(self, role: str, key: str, plan_file: Path | None) -> None:
        """Where a role is; with the plan's file the engine reads it there."""
        own = self.plan.roles[role]
        if role == "critic" and plan_file is not None:
            self.keys["critic.device_map.plan"] = plan_file.resolve()
        if plan_file is None:
            self.keys[f"{key}.device_map.precision"] = own.precision
            if role == "ref" and own.settings.get("strategy") == "data_parallel":
                self.keys[f"{key}.device_map.copies_on"] = list(own.devices)
            else:
                self.keys[f"{key}.device_map.device_map"] = self.map_of(role)
            if role == "ref" and own.model != self.plan.roles["actor"].model:
                why = "verl names one model for actor and ref; the engine reads another one from the plan's file"
                self.faults.append(Finding("error", "verl-has-not", "ref.model", own.model, why, "Give plan_file"))
            if own.settings.get("logits") == "full":
                self.keys[f"{key}.device_map.logits"] = "full"
            if (own.settings.get("in_flight") or 1) > 1:
                self.keys[f"{key}.device_map.in_flight"] = own.settings["in_flight"]
            if own.settings.get("offload", "none") != "none":
                self.keys[f"{key}.device_map.offload"] = own.settings["offload"]
        if role == "critic":
            attention = own.settings.get("attn_implementation", "sdpa")
            self.keys["+critic.model.override_config.attn_implementation"] = attention

    def map_of(self, role: str) -> Any:
        """A role's map as Hydra takes it."""
        device_map = self.plan.roles[role].device_map
        if device_map is None:
            why = "it was planned for another backend, and has no device map"
            self.faults.append(Finding("error", "no-device-map", role, "", why, "Plan with backend=device_map"))
            return None
        if "" not in device_map:
            return raw_map(device_map)
        if role != "reward" and len(self.plan.inventory) > 1:
            why = "all of it is on one GPU, which Hydra's grammar has no map for"
            fix = "Give plan_file, or --save plan.yaml: the engine reads the map from there"
            self.faults.append(Finding("error", "no-such-map", f"{role}.devices", str(device_map[""]), why, fix))
        return device_map[""] if role == "reward" else "balanced"

    def batches(self) -> None:
        w = self.plan.workload
        micro = self.role("actor").get("micro_batch_size") or 1
        self.keys |= {
            f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro,
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": micro,
            f"{ROLLOUT}.max_num_seqs": self.role("rollout").get("micro_batch_size") or w.sequences,
        }
        if "ref" in self.plan.roles:
            own = micro if self.ref_in_actor else self.role("ref").get("micro_batch_size") or 1
            self.keys[f"{REF}.log_prob_micro_batch_size_per_gpu"] = own
        if "critic" in self.plan.roles:
            self.keys["critic.ppo_micro_batch_size_per_gpu"] = self.role("critic").get("micro_batch_size") or 1

    def reward(self) -> None:
        own, planned = self.role("reward"), self.plan.roles["reward"]
        key, more = f"{REWARD}.rollout", f"+{REWARD}.rollout.engine_kwargs.hf"
        on_cpu = own.get("device_type") == "cpu"
        where = "cpu" if on_cpu else self.map_of("reward")
        self.keys |= {
            f"{REWARD}.enable": True,
            f"{REWARD}.enable_resource_pool": False,
            f"{REWARD}.model_path": named(planned),
            f"{key}.name": "hf",
            f"{key}.tensor_model_parallel_size": 1,
            f"{key}.dtype": _DTYPES[planned.precision],
            f"{more}.device_map": where,
            f"{more}.batch_size": own.get("micro_batch_size") or 1,
            f"{more}.attn_implementation": own.get("attn_implementation", "sdpa"),
        }
        if own.get("offload", "none") != "none":
            self.keys[f"{more}.offload"] = own["offload"]
