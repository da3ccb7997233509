"""Scores against a plain transformers forward of each conversation alone, and what cannot be scored."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from judges import CONVERSATIONS, WORDS, alone, plain, save_judge, save_tokenizer

from verl_shard.common.errors import ConfigError, RunError
from verl_shard.common.notices import ShardNotice
from verl_shard.runtime import scoring_model
from verl_shard.runtime.scoring_inputs import without_task_head
from verl_shard.runtime.scoring_model import ScoringModel


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make(small_config: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """make(task="SequenceClassification", **fields): a folder with a random model of 60 words and its tokenizer."""

    def made(
        task: str = "SequenceClassification",
        *,
        name: str = "judge",
        kind: str = "llama",
        num_labels: int = 1,
        pad: int | None = 0,
        **fields: Any,
    ) -> Path:
        config = small_config(kind, vocab_size=WORDS, num_labels=num_labels, **fields)
        return save_judge(tmp_path / name, config, task, pad=pad)

    return made


def scorer(folder: Path, **options: Any) -> ScoringModel:
    return ScoringModel(folder, **{"dtype": "float32", **options})


@pytest.mark.parametrize("batch_size", [1, 2, 4, 100])
@pytest.mark.parametrize("pad", [0, None, 2])
def test_a_batch_scores_as_each_response_alone(make: Callable[..., Path], batch_size: int, pad: int | None) -> None:
    folder = make(pad=pad)
    made = scorer(folder, batch_size=batch_size)
    found = made.score(CONVERSATIONS)
    assert len(set(found)) == len(CONVERSATIONS)
    assert found == pytest.approx([alone(folder, one) for one in CONVERSATIONS], abs=1e-5)
    assert found == pytest.approx([made.score([one])[0] for one in CONVERSATIONS], abs=1e-5)
    assert made.model.config.pad_token_id == pad


def test_a_model_that_looks_both_ways_does_not_see_the_padding(make: Callable[..., Path]) -> None:
    folder = make(kind="roberta", pad=1, type_vocab_size=1)
    found = scorer(folder, batch_size=100).score(CONVERSATIONS)
    assert found == pytest.approx([alone(folder, one) for one in CONVERSATIONS], abs=1e-5)


def test_a_padding_token_that_is_no_token_pads_nothing(make: Callable[..., Path]) -> None:
    folder = make()
    expected = [alone(folder, conversation) for conversation in CONVERSATIONS]
    config = folder / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"pad_token_id": 0', '"pad_token_id": 60'))
    with pytest.warns(ShardNotice, match="pad_token_id = 60: .*judge has 60 tokens, 0 to 59"):
        made = scorer(folder)
    assert made.score(CONVERSATIONS) == pytest.approx(expected, abs=1e-5)


def test_a_batch_of_every_token_goes_in_one_by_one(make: Callable[..., Path]) -> None:
    folder = make(pad=None, max_position_embeddings=128)
    every = " ".join(f"w{n}" for n in range(60) if n not in (0, 2, 3, 4)) + " <pad> <eos> <unk> |"
    rows = [[{"role": "user", "content": every}, {"role": "assistant", "content": f"w{n}"}] for n in (20, 30)]
    rows[1][1]["content"] = "w30 w31"
    made = scorer(folder)
    assert made.score(rows) == pytest.approx([made.score([one])[0] for one in rows], abs=1e-6)


def test_a_response_that_ends_with_the_padding_token_scores_as_in_transformers(make: Callable[..., Path]) -> None:
    folder = make(pad=2)
    found = scorer(folder, chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}<eos>").score(
        CONVERSATIONS
    )
    expected = [float(plain(folder, f"{c[0]['content']} {c[1]['content']} <eos>")[0]) for c in CONVERSATIONS]
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("copies", [2, 3, 8])
def test_copies_share_a_batch_and_keep_its_order(
    make: Callable[..., Path], copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make()
    made = scorer(folder, copies_on=["cpu"] * copies, batch_size=2)
    seen: list[tuple[int, int]] = []
    forward = ScoringModel._forward

    def counted(self: ScoringModel, copy: Any, rows: Any) -> Any:
        seen.append((id(copy.model), len(rows)))
        return forward(self, copy, rows)

    monkeypatch.setattr(ScoringModel, "_forward", counted)
    assert made.score(CONVERSATIONS) == pytest.approx([alone(folder, one) for one in CONVERSATIONS], abs=1e-5)
    assert len({model for model, _ in seen}) == min(copies, len(CONVERSATIONS))
    assert sum(rows for _, rows in seen) == len(CONVERSATIONS)


def test_scoring_does_without_attention_that_is_planned_for_each_shape(make: Callable[..., Path]) -> None:
    model, seen = scorer(make()), []
    model._copies[0].model.register_forward_hook(
        lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
    )
    model.score(CONVERSATIONS)
    assert set(seen) == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_a_map_is_one_copy(make: Callable[..., Path]) -> None:
    folder = make()
    made = scorer(folder, device_map={"model": "cpu", "score": "cpu"})
    assert made.model.hf_device_map == {"model": "cpu", "score": "cpu"}
    assert made.score(CONVERSATIONS[:1]) == pytest.approx([alone(folder, CONVERSATIONS[0])], abs=1e-5)


def test_the_template_and_the_tokenizer_can_be_others(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make()
    template = "{% for m in messages %}{{ m['role'] | replace('user', 'w40') | replace('assistant', 'w41') }} " + (
        "{{ m['content'] }} {% endfor %}"
    )
    expected = [float(plain(folder, f"w40 {c[0]['content']} w41 {c[1]['content']}")[0]) for c in CONVERSATIONS]
    assert scorer(folder, chat_template=template).score(CONVERSATIONS) == pytest.approx(expected, abs=1e-5)
    (tmp_path / "t.jinja").write_text(template, encoding="utf-8")
    assert scorer(folder, chat_template=str(tmp_path / "t.jinja")).score(CONVERSATIONS) == pytest.approx(
        expected, abs=1e-5
    )
    other = save_tokenizer(tmp_path / "other", template=template)
    assert scorer(folder, tokenizer=other).score(CONVERSATIONS) == pytest.approx(expected, abs=1e-5)


def test_without_a_template_contents_are_lines(make: Callable[..., Path]) -> None:
    folder = make()
    save_tokenizer(folder, template=None)
    (folder / "chat_template.jinja").unlink()
    expected = float(plain(folder, "w10 w11 w12")[0])
    assert scorer(folder).score(CONVERSATIONS[:1]) == pytest.approx([expected], abs=1e-5)


def test_text_that_is_finished_already(make: Callable[..., Path]) -> None:
    folder = make()
    found = scorer(folder).score_texts(["w5 w6", "w9"])
    assert found == pytest.approx([float(plain(folder, text)[0]) for text in ("w5 w6", "w9")], abs=1e-5)


STEPS = [
    [{"role": "user", "content": "w10"}, {"role": "assistant", "content": "w12 w13 | w14 | w15 w16 w17"}],
    [{"role": "user", "content": "w10 w11"}, {"role": "assistant", "content": "w20"}],
]
# As the template writes them, each step with its mark; and where the marks are.
READ = [("w7 w10 w7 w12 w13 | w14 | w15 w16 w17 | w8", [5, 7, 11]), ("w7 w10 w11 w7 w20 | w8", [5])]


def _step_scores(folder: Path, labels: int, label: int) -> list[list[float]]:
    found = []
    for words, at in READ:
        logits = plain(folder, words, "TokenClassification")
        assert [words.split()[place] for place in at] == ["|"] * len(at)
        good = logits[:, 0] if labels == 1 else logits.softmax(-1)[:, label]
        found.append([float(good[place]) for place in at])
    return found


@pytest.mark.parametrize(("labels", "label", "used"), [(1, None, 0), (2, None, 1), (2, 0, 0), (3, "LABEL_2", 2)])
def test_steps_are_scored_where_each_ends(make: Callable[..., Path], labels: int, label: Any, used: int) -> None:
    folder = make("TokenClassification", num_labels=labels)
    made = scorer(folder, separator=" | ", label=label, **({"aggregate": "mean"} if labels == 1 else {}))
    expected = _step_scores(folder, labels, used)
    for found, wanted in zip(made.step_scores(STEPS), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("aggregate", "combine"),
    [(None, min), ("min", min), ("last", lambda s: s[-1]), ("mean", lambda s: sum(s) / len(s)), ("product", math.prod)],
)
def test_step_scores_become_one_score(make: Callable[..., Path], aggregate: str | None, combine: Any) -> None:
    folder = make("TokenClassification", num_labels=2)
    expected = [combine(row) for row in _step_scores(folder, 2, 1)]
    found = scorer(folder, separator="|", step_mark=" | ", aggregate=aggregate).score(STEPS)
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_mark_that_template_or_tokenizer_drop_leaves_the_steps_last_token(make: Callable[..., Path]) -> None:
    folder = make("TokenClassification", num_labels=2)
    made = scorer(folder, chat_template="{% for m in messages %}{{ m['content'] | trim }} {% endfor %}")
    two = [STEPS[1][0], {"role": "assistant", "content": "w20 w21\n\n\n\nw22"}]
    logits = plain(folder, "w10 w11 w20 w21 w22", "TokenClassification").softmax(-1)[:, 1]
    assert made.step_scores([two])[0] == pytest.approx([float(logits[3]), float(logits[4])], abs=1e-5)


def test_a_template_that_changes_the_response_hides_its_steps(make: Callable[..., Path]) -> None:
    folder = make("TokenClassification", num_labels=2)
    made = scorer(folder, separator="|", chat_template="{% for m in messages %}{{ m['content'] | upper }} {% endfor %}")
    with pytest.raises(RunError, match=r"changes the response 'w20\|', so that its steps cannot be found"):
        made.score(STEPS[1:])


def test_a_long_conversation_stops_or_loses_its_beginning(make: Callable[..., Path]) -> None:
    folder = make(max_position_embeddings=9)
    response = " ".join(f"w{n}" for n in range(20, 31))
    long = [{"role": "user", "content": "w10"}, {"role": "assistant", "content": response}]
    message = (
        r"^response 1 \('w20 w21 .* w30'\): 15 tokens to score, and .*judge has 9 positions: 6 too many\. "
        'Give too_long="truncate" to leave out the first 6, or generate shorter responses'
    )
    with pytest.raises(RunError, match=message):
        scorer(folder).score([CONVERSATIONS[0], long])
    expected = float(plain(folder, " ".join(f"w{n}" for n in range(23, 31)) + " w8")[0])
    with pytest.warns(ShardNotice, match="more tokens than its 9 positions. Using the last 9 tokens instead"):
        found = scorer(folder, too_long="truncate").score([CONVERSATIONS[0], long])
    assert found == pytest.approx([alone(folder, CONVERSATIONS[0]), expected], abs=1e-5)


def test_truncation_keeps_the_first_special_token_and_the_steps_that_are_left(make: Callable[..., Path]) -> None:
    folder = make("TokenClassification", num_labels=2, max_position_embeddings=6)
    made = scorer(folder, separator="|", step_mark=" | ", too_long="truncate")
    made.tokenizer.bos_token = "w7"
    # Of "w7 w10 w7 w12 w13 | w14 | w15 w16 w17 | w8" w7 stays, and the last five.
    logits = plain(folder, "w7 w15 w16 w17 | w8", "TokenClassification").softmax(-1)[:, 1]
    with pytest.warns(ShardNotice, match="the last 6 tokens"):
        assert made.step_scores(STEPS[:1])[0] == pytest.approx([float(logits[4])], abs=1e-5)


def test_positions_of_roberta_begin_after_its_padding_index(make: Callable[..., Path]) -> None:
    folder = make(kind="roberta", max_position_embeddings=12, pad=1, type_vocab_size=1)
    words = [f"w{n}" for n in range(20, 30)]
    # Positions 2 to 11 are ten tokens.
    made = scorer(folder, chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}")
    fits = [{"role": "user", "content": " ".join(words[:9])}, {"role": "assistant", "content": "w30"}]
    assert made.score([fits]) == pytest.approx([float(plain(folder, " ".join([*words[:9], "w30"]))[0])], abs=1e-5)
    fits[0]["content"] = " ".join(words)
    with pytest.raises(RunError, match=r"11 tokens to score, and .* has 10 positions: 1 too many"):
        made.score([fits])


def test_tokens_of_another_tokenizer_are_named(make: Callable[..., Path], tmp_path: Path) -> None:
    other = save_tokenizer(tmp_path / "other", words=80)
    made = scorer(make(), tokenizer=other)
    strange = [{"role": "user", "content": "w10"}, {"role": "assistant", "content": "w11 w70"}]
    message = (
        r"response 0 \('w11 w70'\): the tokenizer .*other makes token 70 \('w70'\), and the embedding of .*judge has "
        "60 rows, 0 to 59: they do not belong together. Give tokenizer= with the one that the model was trained with"
    )
    with pytest.raises(RunError, match=message):
        made.score([strange])


@pytest.mark.parametrize("task", [None, "process-reward"])
def test_a_checkpoint_without_a_score_head_is_refused(make: Callable[..., Path], task: str | None) -> None:
    folder = make("CausalLM", name="actor")
    message = (
        rf"^reward_model = .*actor: its weights lack the {task or 'reward'} head \(score.*\): transformers would "
        "make a random one, and its scores would mean nothing. Give the folder of a trained reward model"
    )
    with pytest.raises(ConfigError, match=message):
        scorer(folder, task=task)


def test_other_faults_of_loading_are_said_as_they_are() -> None:
    from verl_shard.common.errors import config_error

    error = config_error("device-missing", "device_map", 3, "no such GPU", "Use another")
    assert without_task_head(error, "judge") is error


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_no_number_names_its_response(make: Callable[..., Path], value: float) -> None:
    made = scorer(make())
    with torch.no_grad():
        # Token 18 is in the third response only.
        made.model.get_input_embeddings().weight[18] = math.nan
        if value == math.inf:
            made.model.get_input_embeddings().weight[18] = 1.0
            made.model.score.weight.fill_(3e38)
    row = 2 if math.isnan(value) else 0
    shown = "nan" if math.isnan(value) else "-?inf|nan"
    with pytest.raises(
        RunError, match=rf"^response {row} \('w1.*'\): .*judge gives ({shown}), which is no finite score"
    ):
        made.score(CONVERSATIONS)


def test_an_empty_response_stops_or_is_scored_as_it_is(make: Callable[..., Path]) -> None:
    folder = make()
    empty = [{"role": "user", "content": "w10 w11"}, {"role": "assistant", "content": " "}]
    message = r"response 1 \(' '\) is empty: .*judge has nothing to score. Give empty_response=\"score\""
    with pytest.raises(RunError, match=message):
        scorer(folder).score([CONVERSATIONS[0], empty])
    with pytest.warns(ShardNotice, match="Using the score of the conversation without a response instead"):
        found = scorer(folder, empty_response="score").score([empty])
    assert found == pytest.approx([float(plain(folder, "w7 w10 w11 w7 w8")[0])], abs=1e-5)
    nothing = [{"role": "assistant", "content": ""}]
    bare = scorer(folder, empty_response="score", chat_template="{{ messages[0]['content'] }}")
    with pytest.raises(RunError, match=r"response 0 \(''\) has no token"):
        bare.score([nothing])


def test_a_process_model_has_no_score_for_an_empty_response(make: Callable[..., Path]) -> None:
    made = scorer(make("TokenClassification", num_labels=2), separator="|", empty_response="score")
    with pytest.raises(RunError, match=r"response 0 \('\| '\) is empty: .* A process model has no step to score there"):
        made.score([[{"role": "user", "content": "w10"}, {"role": "assistant", "content": "| "}]])


def test_a_template_that_refuses_a_conversation_says_so(make: Callable[..., Path]) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}w9"
    made = scorer(make(), chat_template=template)
    with pytest.raises(
        RunError, match=r"chat template of .*judge refuses a conversation of system, assistant: no system"
    ):
        made.score([[{"role": "system", "content": "w5"}, {"role": "assistant", "content": "w6"}]])


@pytest.mark.parametrize(
    ("task", "labels", "options", "message"),
    [
        ("Sequence", 3, {}, r"label: .* has 3 outputs, 0 \(LABEL_0\), 1 \(LABEL_1\), 2 \(LABEL_2\), and none is said"),
        ("Sequence", 2, {"label": "good"}, r"label = good: .* has 0 \(LABEL_0\), 1 \(LABEL_1\)"),
        ("Sequence", 2, {"label": 2}, "label = 2: "),
        ("Sequence", 1, {"aggregate": "min"}, "aggregate = 'min': .* scores whole responses"),
        ("Sequence", 1, {"separator": "|"}, "separator = '|': .* scores whole responses"),
        ("Token", 2, {"aggregate": "max"}, "aggregate = max: no such aggregate. Use one of min, last, mean, product"),
        ("Token", 2, {"separator": ""}, "steps cannot be told apart by nothing"),
        ("Token", 1, {"aggregate": "product"}, "gives each step one unbounded number"),
        ("Sequence", 1, {"too_long": "cut"}, "too_long = cut: no such choice. Use one of stop, truncate"),
        ("Sequence", 1, {"batch_size": 0}, "batch_size = 0: not a number of conversations"),
        ("Sequence", 1, {"task": "value"}, "task = value: it gives no score"),
        ("Sequence", 1, {"copies_on": []}, "copies_on = .*: not a list of devices"),
        ("Sequence", 1, {"copies_on": ["cpu"], "device_map": {"": "cpu"}}, "device_map says where one copy is"),
        ("Sequence", 1, {"chat_template": "no-file"}, "chat_template = no-file: no such file"),
        ("Sequence", 1, {"chat_template": "{% for"}, "chat_template = {% for: the chat template of"),
        ("Sequence", 1, {"tokenizer": "no-folder"}, "tokenizer = no-folder: it has no tokenizer that loads"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(
    make: Callable[..., Path], task: str, labels: int, options: dict[str, Any], message: str
) -> None:
    folder = make(f"{task}Classification", num_labels=labels)
    with pytest.raises(ConfigError, match=message):
        scorer(folder, **options)


def test_a_label_of_several_is_a_logit(make: Callable[..., Path]) -> None:
    folder = make(num_labels=2)
    found = scorer(folder, label="LABEL_1").score(CONVERSATIONS[:1])
    assert found == pytest.approx([float(plain(folder, "w7 w10 w11 w7 w12 w8")[1])], abs=1e-5)


def test_offloading_is_handed_on_and_inputs_go_where_the_map_says(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make()
    asked: list[tuple[Any, ...]] = []
    load: Any = vars(scoring_model)["load_sharded"]

    def noting(path: Any, device_map: Any, **options: Any) -> Any:
        ours = {name: options.pop(name) for name in ("offload", "embeddings_on_host", "pin_limit")}
        asked.append((device_map, *ours.values()))
        return load(path, device_map, **options)

    monkeypatch.setattr(scoring_model, "load_sharded", noting)
    scorer(folder, offload="stream", embeddings_on_host=True, pin_limit=0, copies_on=["cpu", "cpu"])
    scorer(folder)
    assert asked == [("cpu", "stream", True, 0)] * 2 + [("cpu", "none", False, None)]


def test_offloading_that_cannot_be_meant_is_refused(make: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r'pin_limit = 5: offload="none" pins nothing'):
        scorer(make(), pin_limit=5)


def test_offloading_on_the_cpu_says_that_it_does_nothing(make: Callable[..., Path]) -> None:
    folder = make()
    with pytest.warns(ShardNotice, match=r"offload = stream: it computes on the CPU"):
        made = scorer(folder, offload="stream")
    assert made.score(CONVERSATIONS[:1]) == pytest.approx([alone(folder, CONVERSATIONS[0])], abs=1e-5)


def test_one_scoring_call_at_a_time(make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """From before its first forward to after what it gives back at its end."""
    made = scorer(make())
    expected = made.score(CONVERSATIONS)
    busy, most = 0, 0

    @contextmanager
    def counting(*_: Any) -> Iterator[None]:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        time.sleep(0.002)
        yield
        time.sleep(0.002)
        busy -= 1

    monkeypatch.setattr(scoring_model, "several_calls", counting)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: made.score([one])[0], CONVERSATIONS * 4))
    assert most == 1
    assert found == pytest.approx(expected * 4, abs=1e-5)
