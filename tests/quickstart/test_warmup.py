import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_shard.config.data_files import DataFiles
from verl_shard.quickstart.checks import check_model
from verl_shard.quickstart.warmup import greedy_reward, warm_up
from verl_shard.training.data_of_tasks import read_rows
from verl_shard.training.data_tasks import TASKS


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads that wait for each other on busy cores take many times as long as one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def untrained(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "model"))


def test_the_loss_falls_and_the_weights_are_written_back(untrained: Path, data: DataFiles) -> None:
    calls: list[tuple[int, int, float]] = []
    names = sorted(path.name for path in untrained.iterdir())
    result = warm_up(untrained, data, seed=0, steps=20, progress=lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(step, 20) for step in range(1, 21)]
    assert result.steps == 20
    assert result.loss < 0.75 * calls[0][2]
    assert 0 <= result.val_reward <= 1
    assert sorted(path.name for path in untrained.iterdir()) == names
    check_model(untrained)
    model = AutoModelForCausalLM.from_pretrained(untrained)
    tokenizer = AutoTokenizer.from_pretrained(untrained)
    assert greedy_reward(model, tokenizer, read_rows(data.val)) == pytest.approx(result.val_reward)


def test_an_interrupt_leaves_the_untrained_model(untrained: Path, data: DataFiles) -> None:
    before = {path.name: path.read_bytes() for path in untrained.iterdir()}

    def interrupt(step: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_up(untrained, data, seed=0, steps=5, progress=interrupt)
    assert {path.name: path.read_bytes() for path in untrained.iterdir()} == before


def test_the_same_seed_gives_the_same_losses(untrained: Path, data: DataFiles) -> None:
    def losses(seed: int) -> list[float]:
        seen: list[float] = []

        def stop_at_three(step: int, steps: int, loss: float) -> None:
            seen.append(loss)
            if step == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            warm_up(untrained, data, seed=seed, progress=stop_at_three)
        return seen

    assert losses(0) == pytest.approx(losses(0), rel=1e-4)
    assert losses(0) != pytest.approx(losses(1), rel=1e-4)


def test_some_worked_answers_are_bare_and_some_are_not() -> None:
    assert all(0 < task.bare_share < 1 for task in TASKS)
