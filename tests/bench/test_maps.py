"""What the bench says of a map is what it is: judged on maps whose faults are known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_shard import build_device_map
from verl_shard.bench.maps import _judge, optimum, zoo
from verl_shard.bench.rivals import accelerate_map, answer, build, quiet
from verl_shard.models.read import read_spec


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_the_optimum_is_the_best_of_all_splits(sizes: Sequence[int], n: int) -> None:
    splits = combinations_with_replacement(range(len(sizes) + 1), n - 1)
    assert optimum(sizes, n) == min(
        max(sum(sizes[i:j]) for i, j in pairwise((0, *cuts, len(sizes)))) for cuts in splits
    )


def test_a_judgement(small_config: Any) -> None:
    spec = read_spec(small_config("llama"))
    best = optimum([block.n_bytes for block in spec.blocks], 2)
    cells = [("llama", "", {}, [(2, None), (2, best)])]
    good = dict(build_device_map(spec, 2))
    all_on_one = dict.fromkeys(spec.order, 0)
    spilled = {**good, "lm_head": "cpu"}
    q = _judge([spec], cells, [[good, good]])
    assert (q.median, q.worst, q.empty, q.spilled, q.feasible) == (1.0, 1.0, 0, 0, 1)
    q = _judge([spec], cells, [[all_on_one, spilled]])
    assert q.worst == pytest.approx(spec.n_bytes / best)
    assert (q.empty, q.spilled) == (1, 1)
    assert _judge([spec], cells, [[good, "it raised"]]).spilled == 1


def test_the_rivals_answer() -> None:
    quiet()
    entry = next(entry for entry in zoo() if entry["name"] == "qwen2-0.5b")
    fields = {**entry["kwargs"], "num_hidden_layers": 4}
    (made,) = answer([(entry["model_type"], entry["auto"], fields, [(2, None)])])
    assert {0, 1} >= set(made[0].values())
    model = build(entry["model_type"], entry["auto"], fields)
    assert accelerate_map(model, 2, None).keys() == made[0].keys()
