"""What a pass may be, and that all that is wrong with one is said at once."""

from __future__ import annotations

import pytest
import torch

from verl_shard.common.errors import ConfigError
from verl_shard.memory.passes import PassSpec, pass_spec


def test_precision_by_phase() -> None:
    assert PassSpec().used_precision == "bf16-mixed"
    assert PassSpec().weight_dtype == torch.float32
    assert PassSpec(phase="forward").used_precision == "bf16"
    assert PassSpec(precision="bf16").weight_dtype == torch.bfloat16


def test_all_faults_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        PassSpec(batch_size=0, seq_len=-1, optimizer="adam", precision="fp8", in_flight=True)  # type: ignore[arg-type]
    assert [finding.where for finding in caught.value.findings] == [
        "precision",
        "optimizer",
        "batch_size",
        "seq_len",
        "in_flight",
    ]


def test_an_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match='Did you mean "batch_size"'):
        pass_spec({"batchsize": 4})
