"""The share of a GPU that a rollout or reward engine of stock verl needs to start, and the settings that give it that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.common.units import format_bytes, format_count
from verl_shard.config.inventory import Inventory
from verl_shard.config.roles import Role
from verl_shard.config.workload import Workload
from verl_shard.memory.kv_cache import kv_cache_bytes
from verl_shard.memory.stock import terms
from verl_shard.planning.models import Models
from verl_shard.planning.settings import Settings

ROOMY = 0.6
"""Of an engine's share, what its weights take at most where the planner chooses: the rest is for the KV cache."""
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
"""gpu_memory_utilization, verl's default first."""
_ENGINES: tuple[Role, ...] = ("rollout", "reward")


@dataclass(frozen=True)
class EngineShares:
    """Whether engines can start, on equal nodes."""

    models: Models
    workload: Workload
    inventory: Inventory

    def need(self, settings: Settings, role: Role, parallel: int) -> tuple[int, int]:
        """Bytes on each of its GPUs: of the weights, and of the KV cache of one sequence, which vLLM wants room for."""
        spec, module = self.models.read(settings.roles[role], torch.bfloat16)
        length = self.workload.sequence_length
        config = module.config
        cache = sum(kv_cache_bytes(config, batch_size=1, seq_len=length, itemsize=2, latent=True))
        return terms.engine_weights(spec.n_params, parallel), terms.engine_cache(cache, parallel, _kv_heads(config))

    def can_start(self, settings: Settings) -> bool:
        """Whether each engine's share holds its weights and one sequence."""
        return all(not self._lacking(settings, role) for role in self._engines(settings))

    def completed(self, settings: Settings) -> Settings:
        """The fewest GPUs an engine and the smallest share, of those that were left blank, with which engines start:
        with room for a KV cache where there can be.

        Raises ConfigError for engines that can start with none.
        """
        faults = []
        for role in self._engines(settings):
            choices = list(self._choices(settings, role))
            if not choices:
                faults.append(self._fault(settings, role))
                continue
            roomy = [made for made in choices if self._room(made, role)]
            settings = (roomy or choices)[0]
        if faults:
            raise ConfigError(faults)
        return settings

    def _engines(self, settings: Settings) -> list[Role]:
        return [role for role in _ENGINES if role in settings.roles and settings.roles[role].device_type == "cuda"]

    def _choices(self, settings: Settings, role: Role) -> Iterator[Settings]:
        """Settings with which it starts, the nearest to the defaults first: more GPUs an engine, then a larger share."""
        own, blank = settings.roles[role], settings.blank[role]
        shares = SHARES if "gpu_memory_utilization" in blank else (own.gpu_memory_utilization,)
        sizes = self._sizes(settings, role) if "tensor_parallel_size" in blank else [own.tensor_parallel_size or 1]
        for share in shares:
            for size in sizes:
                made = settings.changed(role, tensor_parallel_size=size, gpu_memory_utilization=share)
                if not self._lacking(made, role):
                    yield made

    def _sizes(self, settings: Settings, role: Role) -> list[int]:
        """Sizes that divide a node and the attention heads, as vLLM wants it."""
        n, heads = self._on_node, _heads(self.models.read(settings.roles[role], torch.bfloat16)[1].config)
        return [size for size in range(1, n + 1) if n % size == 0 and heads % size == 0]

    @property
    def _on_node(self) -> int:
        return len(self.inventory.nodes[0].cards)

    def _share(self, settings: Settings, role: Role) -> int:
        return terms.rollout_engine(
            settings.roles[role].gpu_memory_utilization or 0.0, self.inventory.gpus[0].card.memory
        )

    def _lacking(self, settings: Settings, role: Role) -> bool:
        parallel = settings.roles[role].tensor_parallel_size or 1
        return sum(self.need(settings, role, parallel)) > self._share(settings, role)

    def _room(self, settings: Settings, role: Role) -> bool:
        parallel = settings.roles[role].tensor_parallel_size or 1
        return self.need(settings, role, parallel)[0] <= ROOMY * self._share(settings, role)

    def _fault(self, settings: Settings, role: Role) -> Finding:
        own, card = settings.roles[role], self.inventory.gpus[0].card
        blank = settings.blank[role]
        sizes = self._sizes(settings, role) if "tensor_parallel_size" in blank else [own.tensor_parallel_size or 1]
        share = SHARES[-1] if "gpu_memory_utilization" in blank else own.gpu_memory_utilization or 0.0
        weights, cache = self.need(settings, role, sizes[-1])
        spec, _ = self.models.read(own, torch.bfloat16)
        why = (
            f"{format_count(spec.n_params)} parameters in bf16 over {sizes[-1]} GPUs are {format_bytes(weights)} a GPU, and "
            f"one sequence's KV cache {format_bytes(cache)}; the engine has {share:g} of {format_bytes(card.memory)}, "
            f"which is {format_bytes(int(share * card.memory))}"
        )
        given = f"tensor_parallel_size={own.tensor_parallel_size}, gpu_memory_utilization={own.gpu_memory_utilization}"
        both = frozenset({"tensor_parallel_size", "gpu_memory_utilization"})
        free = replace(settings, blank={**settings.blank, role: blank | both})
        if can := next(self._choices(free, role), None):
            said = can.roles[role]
            fix = f"Use tensor_parallel_size={said.tensor_parallel_size} and gpu_memory_utilization={said.gpu_memory_utilization}"
        else:
            fix = 'Use a smaller model, cards with more memory, more of them in a node, or backend="device_map"'
        return Finding("error", "engine-too-small", role, given, why, fix)


def _heads(config: object) -> int:
    text = config.get_text_config(decoder=True)  # type: ignore[attr-defined]
    return int(text.num_attention_heads)


def _kv_heads(config: object) -> int:
    """1 for latents, which all heads share."""
    text = config.get_text_config(decoder=True)  # type: ignore[attr-defined]
    if getattr(text, "kv_lora_rank", None):
        return 1
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
