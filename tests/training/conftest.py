"""A tiny model with a tokenizer and a chat template, and PPOTrainer on it. On the CPU, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from verl.plugin.platform import set_platform

from verl_shard import PPOTrainer
from verl_shard.verl_plugin.platform_cpu import PlatformCPU

set_platform(PlatformCPU())

WORDS = 60
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w1 {% endif %}"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, no run of another test; what a trainer sets is put back."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "ACCELERATE_MIXED_PRECISION",
        "ACCELERATE_USE_CPU",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("VERL_SHARD_RUN_DIR", "VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR", "VERL_PLATFORM"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def _no_group() -> Iterator[None]:
    """The process group that a trainer makes is gone afterwards."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def make_model(small_config: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """make_model("name", task="causal-lm", seed=0): a folder with a random model of 60 words and its tokenizer."""

    def make(
        name: str = "model", *, seed: int = 0, task: str = "CausalLM", template: bool = True, **fields: Any
    ) -> Path:
        folder = tmp_path / name
        torch.manual_seed(seed)
        config = small_config("llama", vocab_size=WORDS, num_hidden_layers=2, **fields)
        getattr(transformers, f"AutoModelFor{task}").from_config(config).save_pretrained(folder)
        special = {0: "<pad>", 2: "<eos>", 3: "<unk>"}
        vocab = {special.get(n, f"w{n}"): n for n in range(WORDS)}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
        fast.chat_template = TEMPLATE if template else None
        fast.save_pretrained(folder)
        return folder

    return make


PROMPTS = [f"w{5 + i} w{9 + i % 7} w{20 + i % 3}" for i in range(12)]


def count_w4(response: str) -> float:
    """A reward that depends on the response."""
    return float(response.split().count("w4")) + 0.01 * len(set(response.split()))


@pytest.fixture
def trainer(make_model: Callable[..., Path], tmp_path: Path, _no_group: None) -> Callable[..., PPOTrainer]:
    """trainer(ppo={...}, **more): a PPOTrainer on the tiny model, with a reward function, prompts and small batches."""

    def make(*, ppo: Any = (), generation: Any = (), **more: Any) -> PPOTrainer:
        settings: dict[str, Any] = {"steps": 2, "batch_size": 4, "lr": 1e-2, "seed": 1, **dict(ppo)}
        arguments: dict[str, Any] = {
            "reward_model": count_w4, "train_data": PROMPTS, "output_dir": tmp_path / "run", "progress": False, **more,
        }  # fmt: skip
        model = arguments.pop("actor_model", None) or make_model()
        return PPOTrainer(
            model, ppo_config=settings, generation_config={"max_new_tokens": 6, **dict(generation)}, **arguments
        )

    return make
