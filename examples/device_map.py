"""A device map for a 7-billion-parameter model over four GPUs, on a machine that has none.

Run: python examples/device_map.py
"""

from transformers import Qwen2Config

from verl_shard import build_device_map

# The shape of Qwen2-7B. A folder or hub id works as well: only its config.json is read.
config = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152064, architectures=["Qwen2ForCausalLM"],
)  # fmt: skip
print(build_device_map(config, 4).report())
