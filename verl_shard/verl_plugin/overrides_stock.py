"""A plan for stock verl: FSDP or FSDP2 over all GPUs, with vLLM or SGLang beside it."""

from __future__ import annotations

from typing import Any

from verl_shard.common.errors import Finding
from verl_shard.planning.plan import Plan
from verl_shard.verl_plugin.overrides_shared import ACTOR, MODEL, REF, REWARD, ROLLOUT, Emission, Raw, named

_SERVED = 2048
"""reward.reward_model.rollout.prompt_length and response_length, as verl has them."""
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def stock(plan: Plan, backend: str, rollout: str) -> tuple[dict[str, Any], list[Finding]]:
    """Keys with values, and what of the plan stock verl cannot have."""
    made = _Stock(plan)
    made.all(backend, rollout)
    return made.keys, made.faults


class _Stock(Emission):
    def all(self, backend: str, rollout: str) -> None:
        nodes = self.plan.inventory.nodes
        self.keys |= {
            "trainer.nnodes": len(nodes),
            "trainer.n_gpus_per_node": len(nodes[0].cards),
            f"{ACTOR}.strategy": backend,
        }
        self.placed_otherwise()
        self.common()
        self.actor(backend)
        if self.ref_in_actor:  # read by nothing then, and asked for by verl's check
            self.keys[f"{REF}.log_prob_micro_batch_size_per_gpu"] = self.keys[f"{ACTOR}.ppo_micro_batch_size_per_gpu"]
        elif "ref" in self.plan.roles:
            self.ref()
        if "critic" in self.plan.roles:
            self.critic(backend)
        self.rollout(rollout)
        if "reward" in self.plan.roles:
            self.reward(rollout)

    def placed_otherwise(self) -> None:
        """What only the device_map backend has."""
        nodes = self.plan.inventory.nodes
        if len({len(node.cards) for node in nodes}) > 1:
            why, fix = "verl's pool has as many GPUs on every node", "Plan for equal nodes"
            self.faults.append(Finding("error", "unequal-nodes", "gpus", str([len(n.cards) for n in nodes]), why, fix))
        n = len(self.plan.inventory)
        for role, own in self.plan.roles.items():
            at = own.devices
            if own.device_map is not None and sorted(at) != list(range(n)):
                why = f"verl lays every role over all {n} GPUs, and the plan has it on {', '.join(map(str, at)) or 'the CPU'}"
                fix = f"Plan without {role}.devices, or use backend=device_map"
                self.faults.append(Finding("error", "verl-has-not", f"{role}.devices", str(list(at)), why, fix))
            if (own.settings.get("in_flight") or 1) > 1:
                why = "verl's loop runs the backward of a micro-batch before the next forward"
                self.refuse(role, "in_flight", why, "Set it to 1, or use PPOTrainer with runner=local")
            if own.settings.get("offload", "none") not in ("none", None):
                why = (
                    "verl keeps an FSDP reference in host memory anyway"
                    if role == "ref"
                    else "its server sleeps instead"
                )
                self.refuse(role, "offload", why, "Leave it out")

    def sharded(self, role: str, key: str, backend: str) -> None:
        """Precision and offloads of a role under FSDP."""
        own = self.role(role)
        # verl's mixed precision is bf16 around weights of model_dtype, unless it is told otherwise.
        self.keys[f"{key}.model_dtype"] = "bf16" if own.get("precision") == "bf16" else "fp32"
        if own.get("precision") == "fp32":
            self.keys[f"+{key}.mixed_precision"] = Raw("{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}")
        if role == "ref":
            return
        for name in ("param_offload", "optimizer_offload"):
            self.keys[f"{key}.{name}"] = bool(own.get(name))
        if own.get("offload_policy") and backend == "fsdp":
            self.refuse(role, "offload_policy", "FSDP1 does not have it", "Use backend=fsdp2")
        else:
            self.keys[f"{key}.offload_policy"] = bool(own.get("offload_policy"))

    def actor(self, backend: str) -> None:
        own = self.role("actor")
        mini = self.mine("actor")
        micro = min(own.get("micro_batch_size") or 1, mini)
        self.attention("actor", MODEL)
        self.sharded("actor", f"{ACTOR}.fsdp_config", backend)
        self.keys |= {
            f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro,
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": micro,
            f"{ACTOR}.entropy_from_logits_with_chunking": own.get("logits") == "chunked",
        }

    def ref(self) -> None:
        own = self.role("ref")
        if self.plan.roles["ref"].model != self.plan.roles["actor"].model:
            why = "verl's reference is always the model that the actor begins with"
            fix = "Leave ref.model out, or use backend=device_map, which loads another one"
            self.faults.append(Finding("error", "verl-has-not", "ref.model", self.plan.roles["ref"].model, why, fix))
        self.same_as_actor("attn_implementation")
        self.sharded("ref", f"{REF}.fsdp_config", "")
        self.keys |= {
            f"{REF}.log_prob_micro_batch_size_per_gpu": min(own.get("micro_batch_size") or 1, self.mine("ref")),
            f"{REF}.entropy_from_logits_with_chunking": own.get("logits") == "chunked",
        }

    def critic(self, backend: str) -> None:
        own, length = self.role("critic"), self.plan.workload.sequence_length
        micro = min(own.get("micro_batch_size") or 1, self.mine("critic"))
        if own.get("attn_implementation") not in (None, "flash_attention_2"):
            why = "verl's loader of value models asks for flash_attention_2 whatever is set"
            fix = "Leave it out where flash-attn is installed, use an algorithm without a critic, or backend=device_map"
            self.refuse("critic", "attn_implementation", why, fix)
        self.sharded("critic", "critic.fsdp", backend)
        self.keys |= {
            "critic.strategy": backend,
            # Asked for by verl's check and read by nothing: its critic is batched by tokens alone.
            "critic.ppo_micro_batch_size_per_gpu": micro,
            "+critic.ppo_infer_max_token_len_per_gpu": micro * length,
        }

    def rollout(self, name: str) -> None:
        own, w = self.role("rollout"), self.plan.workload
        self.keys |= {
            f"{ROLLOUT}.name": name,
            f"{ROLLOUT}.tensor_model_parallel_size": own.get("tensor_parallel_size") or 1,
            f"{ROLLOUT}.gpu_memory_utilization": own.get("gpu_memory_utilization") or 0.5,
            # The engine wants room for one sequence of this length; by default it is the model's, which may be 128 k.
            f"{ROLLOUT}.max_model_len": w.sequence_length,
        }
        self.dtype_of("rollout", f"{ROLLOUT}.dtype")
        if self.asked("rollout", "attn_implementation"):
            self.refuse("rollout", "attn_implementation", f"{name} chooses its attention itself", "Leave it out")
        if self.asked("rollout", "micro_batch_size"):
            self.keys[f"{ROLLOUT}.max_num_seqs"] = own["micro_batch_size"]
        if self.role("actor").get("lora_rank"):
            # The engine gets the adapters only, so that the weights under them come from the checkpoint.
            self.keys |= {f"{ROLLOUT}.load_format": "safetensors", f"{ROLLOUT}.layered_summon": True}

    def reward(self, name: str) -> None:
        own, w = self.role("reward"), self.plan.workload
        if own.get("device_type") == "cpu":
            why = "verl serves reward models on GPUs"
            self.refuse("reward", "device_type", why, "Leave it out, give a reward function, or use backend=device_map")
        if self.asked("reward", "attn_implementation"):
            self.refuse("reward", "attn_implementation", f"{name} chooses its attention itself", "Leave it out")
        key = f"{REWARD}.rollout"
        self.keys |= {
            f"{REWARD}.enable": True,
            f"{REWARD}.enable_resource_pool": False,
            f"{REWARD}.model_path": named(self.plan.roles["reward"]),
            f"{key}.name": name,
            f"{key}.tensor_model_parallel_size": own.get("tensor_parallel_size") or 1,
            f"{key}.gpu_memory_utilization": own.get("gpu_memory_utilization") or 0.5,
            f"{key}.prompt_length": max(_SERVED, w.prompt_length),
            f"{key}.response_length": max(_SERVED, w.response_length),
        }
        self.dtype_of("reward", f"{key}.dtype")
        if self.asked("reward", "micro_batch_size"):
            self.keys[f"{key}.max_num_seqs"] = own["micro_batch_size"]

    def dtype_of(self, role: str, key: str) -> None:
        precision = self.role(role).get("precision")
        if precision in _DTYPES:
            self.keys[key] = _DTYPES[precision]
        elif self.asked(role, "precision"):
            self.refuse(role, "precision", "an engine has its weights in one precision", "Use bf16 or fp32")

    def attention(self, role: str, key: str) -> None:
        value = self.role(role).get("attn_implementation") or "flash_attention_2"
        self.keys[f"+{key}.override_config.attn_implementation"] = value

    def mine(self, role: str) -> int:
        """Sequences on each GPU: of a mini-batch, or for scoring of a step."""
        w = self.plan.workload
        return max((w.sequences if role == "ref" else w.mini_batch_sequences) // len(self.plan.inventory), 1)
