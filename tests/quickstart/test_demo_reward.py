"""The demo reward model: how it is trained, and that what is saved scores as any reward model does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from verl_shard.config.data_files import DataFiles
from verl_shard.quickstart import demo_reward
from verl_shard.quickstart.check_reward_model import check_reward_model
from verl_shard.quickstart.demo_reward import HELD_OUT_PAIRS, DemoResult, scores_and_language, train_demo
from verl_shard.training.data_of_tasks import read_rows


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Two threads that wait for each other on busy cores take many times as long as one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Losses = list[tuple[int, int, float]]


@pytest.fixture(scope="module")
def trained(
    model_dir: Path, data: DataFiles, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, DemoResult, Losses]:
    folder, losses = tmp_path_factory.mktemp("demo") / "reward_model", Losses()
    result = train_demo(model_dir, folder, data, seed=0, steps=25, progress=lambda *call: losses.append(call))
    return folder, result, losses


def test_it_learns_what_is_easy_first(trained: tuple[Path, DemoResult, Losses]) -> None:
    _, result, losses = trained
    assert [loss[:2] for loss in losses] == [(step, 25) for step in range(1, 26)]
    # A model that knows nothing has log 2; tags there or not is soon learned.
    assert losses[0][2] == pytest.approx(0.693, abs=0.15)
    assert sum(loss for *_, loss in losses[-5:]) / 5 < 0.55
    assert result.pairs == HELD_OUT_PAIRS
    assert result.steps == 25
    assert result.by_kind["no tags"] > 0.9
    assert result.by_kind["empty"] > 0.9
    assert 0.6 < result.accuracy < 1


def test_it_is_a_reward_model_as_any(trained: tuple[Path, DemoResult, Losses], data: DataFiles) -> None:
    folder, _, _ = trained
    check_reward_model(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1
    assert tokenizer.chat_template
    assert [path.name for path in folder.parent.iterdir()] == ["reward_model"]
    from verl_shard.training.reward_model import RewardModel

    judge = RewardModel(str(folder), dtype="float32")
    gaps = []
    for row in read_rows(data.val)[:30]:
        answer = row["reward_model"]["ground_truth"]
        gaps.append(judge.score(row["prompt"], f"<answer>{answer}</answer>") - judge.score(row["prompt"], answer))
    # A right answer has about one more than a wrong one; a missing tag is among the clearest faults.
    assert 0.5 < sum(gaps) / len(gaps) < 4


def test_answers_computed_together_score_as_each_alone(trained: tuple[Path, DemoResult, Losses]) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(trained[0]).eval()
    pad, chance = model.config.pad_token_id, random.Random(1)
    # Lengths and common beginnings all differ; the last token of a group is the same, as it is the template's.
    groups = []
    for common, lengths in ((5, (3, 7, 2)), (9, (1, 4, 4)), (1, (6, 2, 9))):
        start = [chance.randrange(5, 200) for _ in range(common)]
        groups.append([[*start, 300 - n, *(chance.randrange(5, 200) for _ in range(size)), 4]
                       for n, size in enumerate(lengths)])  # fmt: skip
    with torch.no_grad():
        together, language = scores_and_language(model, groups, pad)
        alone = [[model(input_ids=torch.tensor([answer])).logits.item() for answer in group] for group in groups]
        losses: list[float] = []
        for (first, *_), common in zip(groups, (5, 9, 1), strict=True):
            hidden = model.model(input_ids=torch.tensor([first])).last_hidden_state[0]
            logs = torch.log_softmax(hidden @ model.model.embed_tokens.weight.T, -1)
            losses += [-logs[at - 1, first[at]].item() for at in range(common, len(first))]
    assert language.item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert together.tolist() == [pytest.approx(scores, abs=1e-5) for scores in alone]


def _losses(model_dir: Path, out: Path, data: DataFiles, seed: int) -> list[float]:
    seen: list[float] = []

    def stop_at_three(step: int, steps: int, loss: float) -> None:
        seen.append(loss)
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_demo(model_dir, out, data, seed=seed, progress=stop_at_three)
    return seen


def test_the_seed_decides_and_an_interrupt_leaves_nothing(model_dir: Path, data: DataFiles, tmp_path: Path) -> None:
    first = _losses(model_dir, tmp_path / "model", data, 0)
    assert first == pytest.approx(_losses(model_dir, tmp_path / "model", data, 0), rel=1e-4)
    assert first != pytest.approx(_losses(model_dir, tmp_path / "model", data, 1), rel=1e-4)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_replaced(
    model_dir: Path, data: DataFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_reward, "HELD_OUT_PAIRS", 4)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    assert train_demo(model_dir, tmp_path / "model", data, seed=0, steps=1).pairs == 4
    assert not (tmp_path / "model" / "old").exists()
    check_reward_model(tmp_path / "model")
