"""What options may be, by name, and what they are by default: the checks read it, and so do the help texts.

Nothing is imported here, as a command that only shows its help is to be quick.
"""

from __future__ import annotations

from typing import Literal

Task = Literal["causal-lm", "reward", "process-reward", "value", "other"]
Purpose = Literal["inference", "training"]
Phase = Literal["train", "forward", "generate"]
Precision = Literal["bf16-mixed", "bf16", "fp32"]
Optimizer = Literal["adamw", "adamw-fused", "sgd"]
Attention = Literal["sdpa", "sdpa_packed", "flash_attention_2", "eager"]
Loss = Literal["causal-lm", "ppo", "verl-ppo", "verl-fused", "value"]

BATCH_SIZE = 1
"""Sequences of a pass, where none are given."""
SEQ_LEN = 2048
"""Tokens of a sequence, where none are given."""
