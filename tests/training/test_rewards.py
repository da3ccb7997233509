"""Several rewards of several responses, and where their models are."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from verl_shard.common.errors import RunError
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.training import handed_reward
from verl_shard.training.reward_model import RewardModel
from verl_shard.training.rewards import Part, Rewards, ScoreMany
from verl_shard.verl_plugin.reward import actor


def length(response: str) -> float:
    return float(len(response))


def told(prompt: str, ground_truth: str) -> dict[str, Any]:
    return {"score": float(prompt == ground_truth), "seen": prompt}


def row(response: str, truth: str = "p") -> dict[str, Any]:
    info = {"messages_json": json.dumps([{"role": "system", "content": "s"}, {"role": "user", "content": "p"}])}
    return {"data_source": "d", "solution_str": response, "ground_truth": truth, "extra_info": info}


class Models:
    """Stands for reward models: counts what is loaded and in what batches it scores."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, Mapping[str, Any]]] = []
        self.batches: list[list[tuple[list[str], str]]] = []

    def __call__(self, path: str, settings: Mapping[str, Any]) -> ScoreMany:
        self.loaded.append((path, settings))

        def score_many(asked: Sequence[tuple[Sequence[Mapping[str, Any]], str]]) -> list[float]:
            self.batches.append([([str(m["content"]) for m in messages], response) for messages, response in asked])
            return [10.0 * len(response) for _, response in asked]

        return score_many


JUDGE = Part("judge", "some/judge", 0.5, {"dtype": "float32"})


def test_a_model_scores_all_responses_in_one_batch() -> None:
    models = Models()
    rewards = Rewards((JUDGE, Part("length", length, -1.0)), models)
    found = rewards.compute_scores([row("a"), row("bbb")])
    assert found == [{"score": 4.0, "judge": 10.0, "length": 1.0}, {"score": 12.0, "judge": 30.0, "length": 3.0}]
    assert models.batches == [[(["s", "p"], "a"), (["s", "p"], "bbb")]]
    assert rewards.compute_score(**row("cc")) == {"score": 8.0, "judge": 20.0, "length": 2.0}
    assert models.loaded == [("some/judge", {"dtype": "float32"})]


def test_one_reward_of_weight_one_is_said_as_it_is() -> None:
    assert Rewards((Part("length", length),)).compute_scores([row("a"), row("bb")]) == [1.0, 2.0]
    found = Rewards((Part("told", told),)).compute_scores([row("a"), row("a", "q")])
    assert found == [{"score": 1.0, "seen": "p"}, {"score": 0.0, "seen": "p"}]
    assert Rewards((Part("length", length),)).compute_scores([]) == []


def test_a_model_is_loaded_once_however_many_threads_ask() -> None:
    models = Models()
    rewards = Rewards((JUDGE,), models)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: rewards.compute_score(**row("x" * n))["score"], range(1, 40)))
    assert found == [5.0 * n for n in range(1, 40)]
    assert len(models.loaded) == 1


def test_a_score_that_is_no_number_is_named() -> None:
    rewards = Rewards((Part("odd", lambda response: "much" if response == "bb" else 1.0),))
    with pytest.raises(RunError, match=r"the reward odd gave 'much', which is no finite number, for the response 'bb'"):
        rewards.compute_scores([row("a"), row("bb")])


def test_what_was_loaded_does_not_travel() -> None:
    rewards = Rewards((Part("length", length),), Models())
    rewards.compute_score(**row("a"))
    copied = pickle.loads(pickle.dumps(Rewards((JUDGE,), Models())))
    assert copied.parts == (JUDGE,)
    assert copied.models is Rewards((JUDGE,)).models
    assert copied._ready == {}


def test_a_reward_model_in_this_process(make_model: Callable[..., Path]) -> None:
    folder = make_model("judge", task="SequenceClassification", num_labels=1)
    settings = {"dtype": "float32"}
    rewards = Rewards((Part("judge", str(folder), 1.0, settings),))
    messages = json.loads(row("w5")["extra_info"]["messages_json"])
    expected = [RewardModel(str(folder), **settings).score(messages, text) for text in ("w5", "w6 w7")]
    assert rewards.compute_scores([row("w5"), row("w6 w7")]) == pytest.approx(expected, abs=1e-6)


def test_on_ray_the_model_of_the_node_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, Mapping[str, Any]]] = []

    class Node:
        def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
            made.append((path, settings))

        def score(self, conversations: Sequence[Any]) -> list[float]:
            assert [m["role"] for m in conversations[0]] == ["system", "user", "assistant"]
            return [float(len(conversation[-1]["content"])) for conversation in conversations]

    monkeypatch.setattr(actor, "NodeModel", Node)
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    handed_reward.hand_over(Rewards((JUDGE, Part("length", length, 1.0))), tmp_path)
    assert handed_reward.compute_score(**row("bbb")) == {"score": 4.5, "judge": 3.0, "length": 3.0}
    assert handed_reward.compute_score(**row("a"))["score"] == 1.5
    # As in this process, a policy that ends at once is scored and does not stop the run.
    assert made == [("some/judge", {"empty_response": "score", "dtype": "float32"})]


class Marks:
    """Something that runs code when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("fault", ["exchanged", "cut short", "no manifest", "bad manifest", "gone"])
def test_rewards_that_are_not_those_that_were_handed_over_are_not_loaded(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    file, manifest, mark = tmp_path / "rewards.pkl", tmp_path / "rewards.manifest.json", tmp_path / "ran"
    handed_reward.hand_over(Rewards((Part("length", length, 1.0),)), tmp_path)
    assert handed_reward.read_handed(tmp_path).compute_score(**row("bb")) == 2.0
    whole = file.read_bytes()
    if fault == "cut short":
        file.write_bytes(whole[:-1])
    elif fault == "gone":
        file.unlink()
    else:
        file.write_bytes(pickle.dumps(Marks(mark)))
    if fault == "no manifest":
        manifest.unlink()
    elif fault == "bad manifest":
        manifest.write_text('{"files": []}')
    with pytest.raises(RunError, match=r"rewards\.pkl is not loaded: it .*Start the run again"):
        handed_reward.compute_score(**row("a"))
    assert not mark.exists()
    # Another launch writes both anew.
    handed_reward.hand_over(Rewards((Part("length", length, 1.0),)), tmp_path)
    assert handed_reward.compute_score(**row("a")) == 1.0
