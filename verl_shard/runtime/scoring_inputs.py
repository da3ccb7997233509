"""Conversations as a scoring model reads them: its own template and tokens, its limits, and where each step ends."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, RunError, config_error
from verl_shard.common.notices import notice

Message = Mapping[str, Any]
Conversation = Sequence[Message]
"""Messages in order; the last is the response to score."""

AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "last": lambda scores: scores[-1],
    "mean": statistics.fmean,
    "product": math.prod,
}
"""How the scores of a response's steps become one."""

_SHOWN = 200
_TRIAL = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


@dataclass(frozen=True)
class Limits:
    """What a model takes. name: for messages; positions: tokens at most, None for any number; vocabulary: rows of its
    embedding."""

    name: str
    positions: int | None
    vocabulary: int


@dataclass(frozen=True)
class Steps:
    """How a response is cut into steps for a process model.

    separator: what stands between two steps of a response. mark: what ends each step in the text that the model reads,
    at whose last token the step's score is.
    """

    separator: str
    mark: str


@dataclass(frozen=True)
class Encoded:
    """One conversation. ids: its tokens; ends: for a process model the position of each step's score."""

    ids: tuple[int, ...]
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Read:
    """A conversation as text; `ends` are places in `content`, the response as the model reads it."""

    named: str
    text: str
    content: str
    ends: list[int]


@dataclass(frozen=True)
class Encoder:
    """Makes tokens of conversations, or says in one message why there can be none.

    too_long: "stop" raises for more tokens than the model has positions, "truncate" leaves out the first ones (but not a
    first token that is the tokenizer's bos or cls). empty_response: "stop" raises for a response of blanks alone, "score"
    scores it as it is, which a notice says once.
    """

    tokenizer: Any
    limits: Limits
    steps: Steps | None = None
    too_long: str = "stop"
    empty_response: str = "stop"

    def __post_init__(self) -> None:
        for name, choices in (("too_long", ("stop", "truncate")), ("empty_response", ("stop", "score"))):
            given = getattr(self, name)
            if given not in choices:
                fix = f"Use one of {', '.join(choices)}"
                raise config_error("unknown-choice", name, given, "no such choice", fix)
        if self.steps is not None:
            if not self.steps.separator or not self.steps.mark:
                why = "steps cannot be told apart by nothing"
                raise config_error("no-separator", "separator", repr(self.steps.separator), why, "Give a text")
            if not self.tokenizer.is_fast:
                why = "the scores of steps are found by the places of tokens in the text, which only a fast tokenizer tells"
                fix = "Give tokenizer= with one that is fast"
                raise config_error("slow-tokenizer", "tokenizer", self.tokenizer.name_or_path, why, fix)

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        """The tokens of each conversation, in order. Raises RunError that names the first one that cannot be scored."""
        read: list[_Read] = []
        wrong: RunError | None = None
        for index, conversation in enumerate(conversations):
            try:
                read.append(self._read(conversation, index))
            except RunError as error:  # the first is named: it may be an earlier one that is too long
                wrong = error
                break
        tokens = self._tokens([one.text for one in read])
        encoded = []
        for one, (ids, offsets) in zip(read, tokens, strict=True):
            at = self._positions(one.text, one.content, one.ends, offsets) if self.steps is not None else ()
            encoded.append(self._fitted(ids, at, one.named))
        if wrong is not None:
            raise wrong
        return encoded

    def encode_texts(self, texts: Sequence[str]) -> list[Encoded]:
        """As `encode`, of whole texts in which a chat template has been applied already."""
        if self.steps is not None:
            raise RunError(f"{self.limits.name} scores steps, which need the response and not a finished text")
        tokens = self._tokens(texts)
        return [self._fitted(ids, (), f"text {index}") for index, (ids, _) in enumerate(tokens)]

    def _read(self, conversation: Conversation, index: int) -> _Read:
        response = str(conversation[-1]["content"])
        named = f"response {index} ({shown(response)})"
        content, ends = self._marked(response)
        if not content.strip():
            self._say_empty(named)
        messages = [*conversation[:-1], {**conversation[-1], "content": content}]
        return _Read(named, self._text(messages), content, ends)

    def _marked(self, response: str) -> tuple[str, list[int]]:
        """The response as the model reads it, and where in it each step's mark ends."""
        if self.steps is None:
            return response, []
        content, ends = "", []
        for step in response.split(self.steps.separator):
            if step.strip():
                content += step + self.steps.mark
                ends.append(len(content))
        return content, ends

    def _say_empty(self, named: str) -> None:
        if self.empty_response == "stop" or self.steps is not None:
            fix = 'Give empty_response="score" to score the conversation without one' if self.steps is None else (
                "A process model has no step to score there; give such responses a score of their own in a reward function"
            )  # fmt: skip
            raise RunError(f"{named} is empty: {self.limits.name} has nothing to score. {fix}")
        why = "a response is empty: the policy ended at once"
        notice("empty-response", self.limits.name, "", why, "the score of the conversation without a response")

    def _text(self, messages: Conversation) -> str:
        """The conversation in the model's own template; without one, the messages' contents, a line each."""
        if not self.tokenizer.chat_template:
            return "\n".join(str(message["content"]) for message in messages)
        return render(self.tokenizer, messages, self.limits.name)

    def _tokens(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """(ids, the place of each in the text) of each text, all at once: a tokenizer has a thread for each core then.

        A template writes special tokens itself.
        """
        if not texts:
            return []
        places = self.steps is not None
        made = self.tokenizer(
            list(texts),
            add_special_tokens=not self.tokenizer.chat_template,
            return_offsets_mapping=places,
            verbose=False,
        )
        offsets = made["offset_mapping"] if places else [[] for _ in texts]
        return list(zip(made["input_ids"], offsets, strict=True))

    def _positions(
        self, text: str, content: str, ends: Sequence[int], offsets: Sequence[tuple[int, int]]
    ) -> tuple[int, ...]:
        """The last token of each step's mark; where template or tokenizer drop blanks, and the mark with them, of the step."""
        begin, length = text.rfind(content), len(content)
        if begin < 0:
            bare = content.strip()
            begin, length = text.rfind(bare), len(bare)
            lead = len(content) - len(content.lstrip())
            ends = [end - lead for end in ends]
            if begin < 0:
                raise RunError(
                    f"the chat template of {self.limits.name} changes the response {shown(content)}, so that its steps cannot "
                    "be found in the text. Give chat_template= with one that writes it as it is"
                )
        at = []
        for end in ends:
            before = begin + min(end, length)
            at.append(max(token for token, (first, after) in enumerate(offsets) if first < before and first < after))
        return tuple(at)

    def _fitted(self, ids: Sequence[int], ends: tuple[int, ...], named: str) -> Encoded:
        """The tokens, checked against the model's limits."""
        limits, ids = self.limits, list(ids)
        if not ids:
            raise RunError(f"{named} has no token: {limits.name} has nothing to score")
        if max(ids) >= limits.vocabulary:
            raise RunError(
                f"{named}: the tokenizer {self.tokenizer.name_or_path} makes token {max(ids)} "
                f"({self.tokenizer.convert_ids_to_tokens(max(ids))!r}), and the embedding of {limits.name} has "
                f"{limits.vocabulary} rows, 0 to {limits.vocabulary - 1}: they do not belong together. "
                "Give tokenizer= with the one that the model was trained with"
            )
        if limits.positions is None or len(ids) <= limits.positions:
            return Encoded(tuple(ids), ends)
        over = len(ids) - limits.positions
        if self.too_long == "stop":
            raise RunError(
                f"{named}: {len(ids)} tokens to score, and {limits.name} has {limits.positions} positions: {over} too many. "
                f'Give too_long="truncate" to leave out the first {over}, or generate shorter responses'
            )
        why = f"conversations have more tokens than its {limits.positions} positions"
        notice("reward-input-truncated", limits.name, "", why, f"the last {limits.positions} tokens")
        keep = 1 if ids[0] in (self.tokenizer.bos_token_id, self.tokenizer.cls_token_id) else 0
        left = tuple(end - over for end in ends if end - over >= keep)
        if ends and not left:
            raise RunError(
                f"{named}: all its steps are among the first {over} tokens, which {limits.name} does not take"
            )
        return Encoded((*ids[:keep], *ids[over + keep :]), left)


def load_tokenizer(path: str, model: str, chat_template: str | None) -> Any:
    """The tokenizer at `path`, with another template if one is given: a template's text, or the file that holds it.

    Raises ConfigError for a folder without one and for a template that is none. model: whose it is, for messages.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        why = f"it has no tokenizer that loads ({' '.join(str(error).split())[:200]})"
        raise config_error("no-tokenizer", "tokenizer", path, why, f"Give tokenizer= with that of {model}") from error
    if chat_template is not None:
        is_file = "{" not in chat_template
        if is_file and not Path(chat_template).is_file():
            fix = "Give a Jinja text or the file that holds one"
            raise config_error("no-chat-template", "chat_template", chat_template, "no such file", fix)
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8") if is_file else chat_template
        try:
            render(tokenizer, _TRIAL, model)
        except RunError as error:
            fix = "Give a template that writes a user's message and the assistant's"
            raise config_error("bad-chat-template", "chat_template", chat_template[:80], str(error), fix) from error
    return tokenizer


def render(tokenizer: Any, messages: Conversation, name: str) -> str:
    """The conversation in the tokenizer's template. Raises RunError for one that the template refuses."""
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False)
    except TemplateError as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise RunError(f"the chat template of {name} refuses a conversation of {roles}: {error}") from error
    return text


def shown(text: str) -> str:
    """A response for a message: its beginning."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def without_task_head(error: ConfigError, path: str) -> ConfigError:
    """What load_sharded says of a checkpoint without its head, said of a score; other errors as they are."""
    found = next((finding for finding in error.findings if finding.code == "no-head"), None)
    if found is None:
        return error
    why = f"{found.why}: transformers would make a random one, and its scores would mean nothing"
    fix = "Give the folder of a trained reward model (a ForSequenceClassification or ForTokenClassification checkpoint)"
    return config_error("no-score-head", "reward_model", path, why, fix)
