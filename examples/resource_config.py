"""Which component has which GPUs, from a YAML file: checked, shown, and as the pools of stock verl.

Run: python examples/resource_config.py [FILE]
"""

import sys
from pathlib import Path

from verl_shard import load_resource_config
from verl_shard.common.tables import out
from verl_shard.config.resource_config import ownership
from verl_shard.config.resource_pools import pool_overrides

FILE = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".yaml")

config = load_resource_config(FILE)  # every fault at once, each with its line
out.print(ownership(config))
print("On stock verl, beside models, data and lengths:")
print(*pool_overrides(config, train_batch_size=32, mini_batch_size=8), sep="\n")
