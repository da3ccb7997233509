"""A packed row under our engine's sdpa has the memory of flash_attention_2; under plain sdpa a mask of tokens x tokens more."""

from transformers import AutoConfig

from verl_shard.memory.estimate import estimate_memory

CONFIG = AutoConfig.for_model(
    "qwen2", vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
PASS = {"phase": "forward", "batch_size": 8, "seq_len": 512, "packed": True}


def test_no_mask() -> None:
    peaks = {
        name: estimate_memory(CONFIG, attn_implementation=name, **PASS).peak
        for name in ("sdpa", "sdpa_packed", "flash_attention_2")
    }
    assert peaks["sdpa_packed"] == peaks["flash_attention_2"]
    # The mask has a byte for each of 4096 x 4096 pairs; a fused kernel takes it as a bias of two.
    # Without it the peak may be elsewhere, where more is held beside it.
    assert 2 * 4096**2 <= peaks["sdpa"] - peaks["sdpa_packed"] <= 3 * 4096**2


def test_a_model_that_needs_its_mask() -> None:
    chunked = AutoConfig.for_model(
        "llama4_text", vocab_size=64, hidden_size=64, intermediate_size=128, intermediate_size_mlp=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, head_dim=16,
    )  # fmt: skip
    peaks = [estimate_memory(chunked, attn_implementation=name, **PASS).peak for name in ("sdpa", "sdpa_packed")]
    assert peaks[0] == peaks[1]
