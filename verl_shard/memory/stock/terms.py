"""What stock verl holds on a GPU and on the host, term by term: closed formulas, each with where verl has it.

Bytes, ints. Symbols: `held` bytes of an element of the weights (fsdp_config.model_dtype, fp32 by default), `ranks` of
the shard group, T tokens of a micro-batch on a GPU, V vocabulary, h hidden size, L layers. Paths are of verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Iterable

from verl_shard.memory.constants import Constant

BUCKET = Constant(
    "weight bucket", 2048 * 2**20, "rollout.checkpoint_engine.update_weights_bucket_megabytes, default 2048"
)
BESIDE_TORCH = Constant(
    "contexts, NCCL, graphs", 4 * 10**9, "trainer and rollout engine together, as users report it; not measured"
)


def shard(n_params: int, ranks: int) -> int:
    """Elements of a rank's shard: ceil(P / N); FSDP pads to equal shards (torch/distributed/fsdp/_flat_param.py)."""
    return -(-n_params // ranks)


def weights(n_params: int, ranks: int, held: int) -> int:
    """held P / N: the sharded weights (workers/engine/fsdp/transformer_impl.py, _build_module)."""
    return held * shard(n_params, ranks)


def gradients(n_trained: int, ranks: int, held: int) -> int:
    """held P / N: gradients are reduced in fp32 and kept in the dtype of the weights (fsdp_utils.py, MixedPrecision)."""
    return held * shard(n_trained, ranks)


def adam(n_trained: int, ranks: int, held: int) -> int:
    """2 held P / N: two states in the dtype of the weights, made by the first step (workers/config/optimizer.py)."""
    return 2 * held * shard(n_trained, ranks)


def foreach(n_trained: int, ranks: int, held: int) -> int:
    """held P / N: the square roots that AdamW makes as lists, its default on CUDA (torch/optim/adam.py)."""
    return held * shard(n_trained, ranks)


def gathered_unit(n_params: int, itemsize: int = 2) -> int:
    """2 elements: the unit itself, and its gather buffer or the unit that is gathered ahead, in bf16."""
    return 2 * itemsize * n_params


def checkpointed_activations(tokens: int, hidden: int, layers: int) -> int:
    """2 T h L: the input of each layer in bf16, with gradient checkpointing; one layer's own activations come on top."""
    return 2 * tokens * hidden * layers


def logits_copy(tokens: int, vocab: int) -> int:
    """2 T V: one copy of the logits in bf16 (prepare_model_outputs; none with use_fused_kernels)."""
    return 2 * tokens * vocab


def saved_log_softmax(tokens: int, vocab: int) -> int:
    """4 T V: log_softmax in fp32, kept for the backward where flash-attn's cross-entropy is missing
    (utils/torch_functional.py, logprobs_from_logits_v2)."""
    return 4 * tokens * vocab


def eager_entropy(tokens: int, vocab: int) -> int:
    """12 T V: softmax, a cast of the logits and logsumexp's temporary, all fp32, in entropy_from_logits when it is not
    compiled (utils/torch_functional.py; without remove_padding always)."""
    return 12 * tokens * vocab


def fused_head(vocab: int, chunk: int = 512) -> int:
    """20 x 512 V: what FusedLinearForPPO has of a chunk at a time in its backward
    (utils/experimental/torch_functional.py)."""
    return 20 * chunk * vocab


def update_backward(
    n_params: int, ranks: int, held: int, *, layer: int, root: int, activations: int, logits: int
) -> int:
    """p + g + a, the root and two layers gathered, activations and logits: the backward of an update, by formula."""
    states = weights(n_params, ranks, held) + gradients(n_params, ranks, held) + adam(n_params, ranks, held)
    return states + gathered_unit(layer) + 2 * root + activations + logits


def update_step(n_params: int, ranks: int, held: int) -> int:
    """p + g + a + f: the optimizer's step, by formula."""
    return (
        weights(n_params, ranks, held)
        + gradients(n_params, ranks, held)
        + adam(n_params, ranks, held)
        + foreach(n_params, ranks, held)
    )


def rollout_engine(gpu_memory_utilization: float, card: int) -> int:
    """U: the share of the whole card that vLLM or SGLang takes, weights, activations and cache together."""
    return int(gpu_memory_utilization * card)


def engine_weights(n_params: int, tensor_parallel: int) -> int:
    """2 P / TP: the engine's copy in bf16; mapped before the weights are sent (engine_workers.py, update_weights)."""
    return 2 * shard(n_params, tensor_parallel)


def engine_cache(cache: int, tensor_parallel: int, kv_heads: int) -> int:
    """cache / min(TP, heads): a rank's keys and values; heads are shared out, and repeated where there are fewer than
    ranks (vllm/model_executor/models/qwen2.py; latents, which have one head, are on every rank)."""
    return -(-cache // min(tensor_parallel, kv_heads))


def exported_fsdp(n_params: int, n_aliases: int, ranks: int, held: int, *, root: int, layer: int) -> int:
    """What state_dict() makes of an fsdp module at the weight sync (get_per_tensor_param; torch's _state_dict_utils.py).

    One rank: a clone of all, held (P + aliases): a tied weight is cloned under each of its names. Several: a copy of
    each shard, held P / N, while the root and one layer are unsharded in the dtype of the weights, held (root + layer).
    """
    if ranks == 1:
        return held * (n_params + n_aliases)
    return held * (shard(n_params, ranks) + root + layer)


def exported_fsdp2(largest: int, ranks: int, held: int) -> int:
    """held x the largest tensor: fsdp2 gathers one tensor at a time (full_tensor); on one rank nothing is copied."""
    return held * largest if ranks > 1 else 0


def pinned(sizes: Iterable[int]) -> int:
    """Blocks of pinned memory are rounded up to powers of two (torch: CachingHostAllocator)."""
    return sum(1 << (size - 1).bit_length() if size > 0 else 0 for size in sizes)


def host_ref_gradients(n_params: int, ranks: int, held: int, backend: str) -> int:
    """held P / N: fsdp's CPUOffload reserves pinned gradients at the first forward, also for a ref that has none
    (torch: _flat_param.py, init_flat_param_attributes). fsdp2 does not."""
    return held * shard(n_params, ranks) if backend == "fsdp" else 0


def host_load(n_params: int, held: int, *, tied: bool, ranks_on_node: int, sources_on_node: int) -> int:
    """held P for each rank that reads the checkpoint to the host: with tied embeddings every rank does, else the
    first of each shard group (utils/fsdp_utils.py, get_init_weight_context_manager)."""
    return held * n_params * (ranks_on_node if tied else sources_on_node)
