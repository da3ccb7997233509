"""The demo reward model: the small model with a score for a head, trained on pairs of a right and a wrong answer."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_shard.common.seeds import derive_seed
from verl_shard.config.data_files import DataFiles
from verl_shard.quickstart.answers import make_answers
from verl_shard.quickstart.model import save_model
from verl_shard.training.data_of_tasks import Row, entry_of, read_rows
from verl_shard.training.data_tasks import task_of

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 100
BATCH_SIZE = 11
"""Questions in a step, each with a right answer and WRONG wrong ones."""
WRONG = 3
LEARNING_RATE = 7e-4
CENTRE = 0.01
"""Weight of the squared scores in the loss: pairs say nothing of where zero is, and a critic has to learn that level."""
LANGUAGE = 0.3
"""Weight of the cross-entropy of the right answers, read as text: what is right is learned sooner by saying it than from
scores alone, which are one number an answer."""
HELD_OUT_PAIRS = 500


@dataclass(frozen=True)
class DemoResult:
    """What the training came to. accuracy: the share of held-out pairs whose right answer has the higher score; by_kind: the
    same for each kind of wrong answer; pairs: how many there were."""

    accuracy: float
    by_kind: Mapping[str, float]
    pairs: int
    seconds: float
    steps: int


@dataclass(frozen=True)
class _Group:
    """Answers to one question as the model reads them, in tokens: the right one first. kinds: of the wrong ones."""

    answers: list[list[int]]
    kinds: list[str]


def train_demo(
    base: Path,
    out_dir: Path,
    data: DataFiles,
    *,
    seed: int,
    progress: Callable[[int, int, float], None] | None = None,
    steps: int = STEPS,
) -> DemoResult:
    """Trains the model in `base`, a folder of the quick start's own, to score answers, and writes it to `out_dir` with its
    tokenizer: a sequence classifier with one label as any other. The folder is whole or not there; one there is replaced.

    The loss of a pair is -log sigmoid(right - wrong), and beside it right answers are learned as text. At the end scores are
    scaled, so that a right answer has on average one more than a wrong one, as with the exact reward. Bounded by steps, the
    same for a seed; `progress` as for `warm_up`.
    """
    import torch
    from transformers import AutoTokenizer

    assert steps > 0, "a training of no steps"
    start = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = _with_score(base, seed)
    rows, chance = read_rows(data.train), random.Random(derive_seed(seed, "reward-model", "pairs"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    gaps: list[float] = []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        groups = [_group(tokenizer, row, chance, WRONG) for row in chance.sample(rows, min(BATCH_SIZE, len(rows)))]
        scores, language = scores_and_language(model, [group.answers for group in groups], tokenizer.pad_token_id)
        gap = scores[:, :1] - scores[:, 1:]
        ranking = -torch.nn.functional.logsigmoid(gap).mean()
        optimizer.zero_grad()
        (ranking + CENTRE * scores.square().mean() + LANGUAGE * language).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        gaps.append(gap.mean().item())
        if progress is not None:
            progress(step + 1, steps, ranking.item())
    last = gaps[-max(steps // 10, 1) :]
    if (mean := sum(last) / len(last)) > 0:
        model.score.weight.data /= mean
    accuracy, by_kind = _accuracy(model, tokenizer, read_rows(data.val), seed)
    save_model(model, tokenizer, out_dir)
    return DemoResult(accuracy, by_kind, HELD_OUT_PAIRS, time.monotonic() - start, steps)


def scores_and_language(model: Any, groups: Sequence[Sequence[Sequence[int]]], pad: int) -> tuple[Tensor, Tensor]:
    """The scores [groups, answers] of token sequences, as many in each group, and the mean cross-entropy of the tokens of
    each group's first in which it differs from the others. Those of a group begin alike.

    What a group's sequences have in common is computed once, which halves the work: they lie behind one another, and none
    sees the others.
    """
    import torch

    shared = [_common(group) for group in groups]
    length = max(
        common + sum(len(answer) - common for answer in group) for common, group in zip(shared, groups, strict=True)
    )
    tokens = torch.full((len(groups), length), pad)
    positions, owner = torch.zeros_like(tokens), torch.full_like(tokens, -1)
    ends = torch.empty(len(groups), len(groups[0]), dtype=torch.long)
    for row, (common, group) in enumerate(zip(shared, groups, strict=True)):
        at = common
        tokens[row, :at], positions[row, :at], owner[row, :at] = torch.tensor(group[0][:at]), torch.arange(at), 0
        for number, answer in enumerate(group):
            end = at + len(answer) - common
            tokens[row, at:end], owner[row, at:end] = torch.tensor(answer[common:]), number + 1
            positions[row, at:end] = torch.arange(common, len(answer))
            ends[row, number], at = end - 1, end
    asks, seen = owner[:, :, None], owner[:, None, :]
    # Padding sees itself: attention to nothing at all is not a number.
    mask = ((seen == 0) | (seen == asks)) & torch.ones(length, length, dtype=torch.bool).tril()
    hidden = model.model(input_ids=tokens, attention_mask=mask[:, None], position_ids=positions).last_hidden_state
    scores: Tensor = model.score(hidden[torch.arange(len(groups))[:, None], ends])[..., 0]
    # The first lies right behind what is common; its first token is said by the last of that. The head is the embedding.
    said = owner[:, 1:] == 1
    logits = hidden[:, :-1][said] @ model.model.embed_tokens.weight.T
    return scores, torch.nn.functional.cross_entropy(logits, tokens[:, 1:][said])


def _common(group: Sequence[Sequence[int]]) -> int:
    """How many tokens all of the group begin with; none ends there, as all end alike and are not the same."""
    return next(at for at, tokens in enumerate(zip(*group, strict=False)) if len(set(tokens)) > 1)


def _with_score(base: Path, seed: int) -> Any:
    """The language model in `base` as a sequence classifier, its head new."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    language = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    language.config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "reward-model", "head"))
        model = AutoModelForSequenceClassification.from_config(language.config)
    model.model.load_state_dict(language.model.state_dict())
    return model


def _group(tokenizer: Any, row: Row, chance: random.Random, n: int) -> _Group:
    made = make_answers(task_of(row["data_source"]), entry_of(row), chance, n)
    texts = tokenizer.apply_chat_template(
        [
            [*row["prompt"], {"role": "assistant", "content": text}]
            for text in (made.right, *(text for _, text in made.wrong))
        ],
        tokenize=False,
    )
    return _Group(tokenizer(texts, add_special_tokens=False)["input_ids"], [kind for kind, _ in made.wrong])


def _accuracy(model: Any, tokenizer: Any, rows: Sequence[Row], seed: int) -> tuple[float, dict[str, float]]:
    """The share of pairs ranked right, over all and by kind, on questions that were not trained on."""
    import torch

    chance = random.Random(derive_seed(seed, "reward-model", "held-out"))
    groups = [_group(tokenizer, rows[index % len(rows)], chance, 1) for index in range(HELD_OUT_PAIRS)]
    right, seen = Counter[str](), Counter[str]()
    model.eval()
    for first in range(0, len(groups), 100):
        batch = groups[first : first + 100]
        with torch.no_grad():
            scores, _ = scores_and_language(model, [group.answers for group in batch], tokenizer.pad_token_id)
        for group, higher in zip(batch, (scores[:, 0] > scores[:, 1]).tolist(), strict=True):
            seen[group.kinds[0]] += 1
            right[group.kinds[0]] += higher
    return right.total() / seen.total(), {kind: right[kind] / seen[kind] for kind in sorted(seen)}
