"""How long the phases of stock verl take: compute by tokens, generation by memory bandwidth, offloads by the host link."""

from __future__ import annotations

from math import ceil

import torch

from verl_shard.config.inventory import Inventory
from verl_shard.config.roles import Role
from verl_shard.config.workload import Workload
from verl_shard.memory.kv_cache import kv_cache_bytes
from verl_shard.memory.stock.phases import PhaseRow
from verl_shard.planning.models import Models
from verl_shard.planning.rates import Rates
from verl_shard.planning.settings import Settings

_RECOMPUTED = 4 / 3
"""Of a training pass's FLOPs, with gradient checkpointing: a forward more to a forward and a backward of two."""
_BESIDE_WEIGHTS = 0.9
"""Of the share of the GPU that a rollout engine has beside its weights, what its KV cache gets (vLLM keeps the rest)."""
_MOST_AT_ONCE = 256
_MOVED_A_PARAMETER = 16
"""Bytes of an optimizer's step: weight, gradient and two states in fp32, once."""
_LOG_PROBS = ("old_log_prob", "ref_log_prob", "update_actor")
_ROW_OPERATIONS = {"fp32": (5, 3), "other": (5, 5)}
"""Of the host for each token, in a forward and in a backward, where flash-attn is missing: verl then makes log-probabilities
in a loop over tokens (verl.utils.torch_functional.logprobs_from_logits_v2). Of 16-bit logits a cast, log_softmax, unsqueeze,
gather and squeeze; select, zeros, scatter_add, the backward of log_softmax and a cast: 98 and 141 us by default rates. Two
hosts beside an H200 took 91 and 140, and 72 and 115 (the second is docs/results/h200_offload_advice.json's). Of fp32 logits
it is one logsumexp, which counts as many by its share of the others' time on a CPU."""


def phase_seconds(
    row: PhaseRow,
    settings: Settings,
    workload: Workload,
    inventory: Inventory,
    models: Models,
    rates: Rates | None,
    *,
    flash_attn: bool,
) -> float:
    """Seconds of one phase; nobody has measured them for several ranks, and they are for comparing settings.

    Scoring takes 2 P FLOPs a token and training 6 P (Kaplan et al. 2020, table 1), 8 P with gradient checkpointing, each
    rank a share of the tokens, and no less than its shard's gathers over the link. Generation reads the weights and the KV
    cache for each token of a batch. Offloaded bytes cross the host link twice a phase. flash_attn: whether it is installed;
    otherwise the host takes `_ROW_OPERATIONS` for each token's log-probability, while the GPU waits.
    """
    used = rates or Rates.of(inventory.gpus[0].card)
    n = len(inventory)
    role: Role = row.role  # type: ignore[assignment]
    own = settings.roles[role]
    spec, module = models.read(own, torch.bfloat16)
    if row.phase == "generate":
        parallel = own.tensor_parallel_size or 1
        engines = max(n // parallel, 1)
        room = max(
            (own.gpu_memory_utilization or 0.5) * inventory.gpus[0].card.memory * parallel - 2 * spec.n_params, 1.0
        )
        length = workload.mean_sequence_length
        a_sequence = sum(kv_cache_bytes(module.config, batch_size=1, seq_len=length, itemsize=2))
        mine = ceil(workload.sequences / engines)
        at_once = max(min(mine, int(_BESIDE_WEIGHTS * room / a_sequence), _MOST_AT_ONCE), 1)
        n_tokens = (workload.mean_response_length or workload.response_length) * ceil(mine / at_once)
        a_token = (2 * spec.n_params + at_once * a_sequence / 2) / parallel / used.memory_bandwidth
        return n_tokens * (a_token + used.token_s)
    if row.phase == "weight_sync":
        return 2 * spec.n_params / used.link_bandwidth + 4 * spec.n_params / n / used.host_bandwidth
    tokens = workload.sequences * workload.mean_sequence_length / n
    training = row.phase.startswith("update")
    per_token = 6 * (_RECOMPUTED if own.gradient_checkpointing else 1.0) if training else 2
    rate = used.fp32_flops if own.precision == "fp32" else used.bf16_flops
    seconds = per_token * spec.n_params * tokens / rate * (workload.ppo_epochs if training else 1)
    n_micro = ceil(workload.sequences / n / (own.micro_batch_size or 1))
    gathered = 2 * spec.n_params * n_micro * (3 if training else 1)
    over = used.host_bandwidth if role == "ref" or own.offload_policy else used.link_bandwidth
    seconds = max(seconds, gathered / over if n > 1 or over == used.host_bandwidth else 0.0)
    if row.phase in _LOG_PROBS and own.logits != "fused" and not flash_attn:
        forward, backward = _ROW_OPERATIONS["fp32" if own.precision == "fp32" else "other"]
        a_row = forward * used.forward_s + training * backward * used.backward_s
        seconds += a_row * tokens * (workload.ppo_epochs if training else 1)
    if training:
        steps = workload.ppo_epochs * ceil(workload.sequences / workload.mini_batch_sequences)
        seconds += steps * _MOVED_A_PARAMETER * spec.n_params / n / used.memory_bandwidth
    moved = 4 * spec.n_params / n * (bool(own.param_offload) + 2 * bool(own.optimizer_offload and training))
    return seconds + 2 * moved / used.host_bandwidth
