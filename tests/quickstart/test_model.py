from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_shard.config.data_files import DataFiles
from verl_shard.quickstart.checks import check_model
from verl_shard.quickstart.model import make_model
from verl_shard.quickstart.tokenizer import train_tokenizer
from verl_shard.quickstart.warmup import MAX_RESPONSE_LENGTH
from verl_shard.training.data_of_tasks import entry_of, read_rows
from verl_shard.training.data_tasks import task_of, worked_answer

SMALL = train_tokenizer(["user\nState it: 1 + 2 =", "12; <answer>3</answer>"] * 10)


def test_the_folder_loads_as_any_model_does(model_dir: Path) -> None:
    check_model(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert 2e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 10e6
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.generation_config.pad_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert sorted(path.name for path in model_dir.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_seed_decides_the_weights(model_dir: Path, data: DataFiles, tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    again = make_model(tmp_path / "model", data, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (model_dir / name).read_bytes()
    other = make_model(tmp_path / "model", data, seed=4)
    assert (other / "model.safetensors").read_bytes() != (model_dir / "model.safetensors").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_prompts_and_answers_survive_the_tokenizer_and_are_short(model_dir: Path, data: DataFiles) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for row in read_rows(data.train) + read_rows(data.val):
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert tokenizer.decode(ids) == text
        for bare in (False, True):
            answer = worked_answer(task_of(row["data_source"]), entry_of(row), bare=bare)
            ids = tokenizer.encode(answer)
            assert tokenizer.decode(ids) == answer
            assert len(ids) + 1 <= MAX_RESPONSE_LENGTH


def test_the_chat_template_is_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]
    asked = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1 =<|im_end|>\n"
    assert SMALL.apply_chat_template(messages, tokenize=False) == asked
    opened = SMALL.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert opened == asked + "<|im_start|>assistant\n"
    assert SMALL.encode(asked).count(SMALL.eos_token_id) == 2


def test_digits_stay_apart_and_frequent_words_do_not() -> None:
    assert SMALL.tokenize("12") == ["1", "2"]
    assert len(SMALL.tokenize("user\nState it")) == 1
    assert len(SMALL.tokenize("rare")) == 4


@given(text=st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert SMALL.decode(SMALL.encode(text)) == text
