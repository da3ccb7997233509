"""A folder in which what the pages name is there: tiny models under the names of real ones, the examples, a run's data."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.blocks import ROOT

MODELS = ("path/to/model", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2-0.5B")
REWARD_MODELS = ("my/reward-model", "my_reward_model")
WORDS = 60
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The documentation as `make docs` builds it, and what was said. A warning ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder, ended.stderr


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models and files that pages name, made once."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("shelf")
    special = {0: "<pad>", 2: "<eos>", 3: "<unk>"}
    vocab = {special.get(n, f"w{n}"): n for n in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    for task, names in (("CausalLM", MODELS), ("SequenceClassification", REWARD_MODELS)):
        torch.manual_seed(0)
        model = getattr(transformers, f"AutoModelFor{task}").from_config(_config())
        for name in names:
            model.save_pretrained(folder / name)
            fast.save_pretrained(folder / name)
    large = folder / "Qwen/Qwen2-7B-Instruct"  # its configuration is all that is read of it
    _qwen2_7b().save_pretrained(large)
    fast.save_pretrained(large)
    shutil.copy(ROOT / "tests/diagnosis/logs/gpu_oom_update.log", folder / "run.log")
    (folder / "runs/first/launches").mkdir(parents=True)
    shutil.copy(folder / "run.log", folder / "runs/first/launches/1.log")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "docs").symlink_to(ROOT / "docs")
    return folder


def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=1,
    )  # fmt: skip


def _qwen2_7b() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, max_position_embeddings=32768, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip


@pytest.fixture
def place(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder beside those files, without a GPU and without a launcher."""
    import torch
    from verl.plugin.platform import set_platform

    from verl_shard.verl_plugin.platform_cpu import PlatformCPU

    set_platform(PlatformCPU())
    for entry in shelf.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("VERL_SHARD_RUN_DIR", "VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR", "VERL_PLATFORM"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
