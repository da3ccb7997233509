"""verl's custom reward function for the quick start: reasoning-gym's own verifier."""

from __future__ import annotations

import json
import re
from typing import Any

from verl_shard.common.errors import config_error
from verl_shard.training.data_tasks import SOURCE, verifier

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """The verifier's score, 0 to 1, of the last answer in tags; without tags the verifier is given None.

    `extra_info["entry"]` is the reasoning-gym entry as JSON text, as `write_data` writes it.
    """
    if not data_source.startswith(SOURCE) or not (extra_info or {}).get("entry"):
        raise config_error(
            "not-a-reasoning-gym-row",
            "data_source",
            data_source,
            f'this reward is for rows of {SOURCE}<task> whose extra_info has the key "entry"',
            "Score other data with verl's own reward (leave reward.custom_reward_function unset) or with your own",
        )
    assert extra_info is not None
    answers = _ANSWER.findall(solution_str)
    answer = answers[-1].strip() if answers else None
    return float(verifier(data_source.removeprefix(SOURCE))(answer, json.loads(extra_info["entry"])))
