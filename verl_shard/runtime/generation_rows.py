"""A decoding loop whose rows leave when their response ends, and whose free rows are taken by requests that wait."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache

from verl_shard.common.notices import notice
from verl_shard.models.decoding import (
    CAPTURED,
    FEWEST_STEPS,
    GRAPH_STEPS,
    SDPA,
    attention_of_decoder,
    takes_ready_masks,
)
from verl_shard.runtime.generation_attention import grouped_decoding
from verl_shard.runtime.generation_cache import RowsCache, dynamic_bytes, rows_can_come_and_go
from verl_shard.runtime.generation_graph import Capture, FixedStep, note_failure, why_not_fixed
from verl_shard.runtime.generation_prefill import FORWARD_TOKENS, MOST_TOKENS, divided, prefill_groups
from verl_shard.runtime.generation_sampling import Response, Sampling, choose, penalize, uniforms_of, warpers
from verl_shard.runtime.ladder import is_out_of_memory, one_line
from verl_shard.runtime.offload import is_offloaded

SPARE_COLUMNS = GRAPH_STEPS
"""What the cache has room for beyond what it holds; when it is full it is copied."""
REFILL_SHARE = 8
"""Waiting requests get free rows once an eighth of all rows is free: each time is one more forward."""
_OFFLOADED_FORWARD = 1 << 40
"""In tokens: of an offloaded model each forward brings all the weights, so that one prefill is better than several."""
_ASKED_OF_GENERATE = (
    "generate",
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_sample",
    "_prefill",
)


@dataclass
class Stats:
    """What a run took. cache_bytes: of keys and values at their fullest. row_steps: tokens computed while decoding."""

    cache_bytes: int = 0
    prefill_tokens: int = 0
    prefills: int = 0
    steps: int = 0
    row_steps: int = 0


def base_of(model: Any) -> Any:
    """The transformers model behind adapters."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def why_not_rows(model: Any) -> str | None:
    """Why rows of this model's batch cannot come and go, or None when they can."""
    if any(
        c.is_prompt_learning for c in getattr(model, "peft_config", {}).values() if hasattr(c, "is_prompt_learning")
    ):
        return "its adapter puts tokens before the prompt"
    base = base_of(model)
    config = base.config
    if config.is_encoder_decoder:
        return "it has an encoder"
    kind = type(base)
    # Phi-3 asks for another prefill when long rope factors begin to hold; without those it does what all do.
    plain_phi = (
        kind.__name__ == "Phi3ForCausalLM"
        and (getattr(config, "rope_parameters", None) or {}).get("rope_type") != "longrope"
    )
    for name in _ASKED_OF_GENERATE:
        if getattr(kind, name, None) is not getattr(GenerationMixin, name) and not plain_phi:
            return f"it has a {name} of its own"
    if not kind._supports_default_dynamic_cache() or not rows_can_come_and_go(DynamicCache(config=config)):
        return "its cache is not keys and values by token"
    return None


@dataclass
class Progress:
    """How far a run is, for when it does not end: responses that are whole, by request, and the requests under way."""

    done: dict[int, Response] = field(default_factory=dict)
    at: list[int] = field(default_factory=list)


@dataclass
class _Row:
    request: int
    start: int
    """The column of its first token."""


@dataclass
class RowDecoder:
    """Generates for requests on one model. All are lists by request.

    stops: the tokens that end a response. most: the longest response of each. max_rows: at most so many at once. capture:
    what makes a graph of a step, where steps of a fixed shape are wanted. progress: told how far it is.
    """

    model: Any
    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    sampling: Sampling
    most: Sequence[int]
    stops: Sequence[int]
    device: torch.device
    max_rows: int
    capture: Capture | None = None
    stats: Stats = field(default_factory=Stats)
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        base = base_of(self.model)
        takes: Mapping[str, Any] = inspect.signature(base.forward).parameters
        self._fixed: dict[str, Any] = {"use_cache": True, "return_dict": True}
        self._fixed |= {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._positions = "position_ids" in takes
        self._config, self._base = base.config, base
        self._cache = RowsCache(DynamicCache(config=base.config))
        self._ready_masks = takes_ready_masks(base) and attention_of_decoder(base) in SDPA
        if self.capture is not None and (why := why_not_fixed(base, self._cache, self._positions)) is not None:
            self._free_from_now_on(why)
        self._graph: FixedStep | None = None
        self._rows: list[_Row] = []
        self._columns = self._room = 0
        self._uniforms = None if self.sampling.temperature == 0 else uniforms_of(self.seeds, max(self.most))
        self._warpers = warpers(self.sampling)
        self._seen: torch.Tensor | None = None
        self._stop_set = frozenset(self.stops)
        self._ids: list[list[int]] = [[] for _ in self.prompts]
        self._log_probs: list[list[float]] = [[] for _ in self.prompts]

    def _free_from_now_on(self, why: str) -> None:
        used = "a launch for each kernel of a step, several times slower"
        notice("no-cuda-graph", "rollout.enforce_eager", "false, for " + type(self._base).__name__, why, used)
        self.capture = None

    def run(self) -> list[Response]:
        """All responses, in the order of the requests."""
        # The longest first: each later one finds columns enough to end where the others do.
        waiting = sorted(range(len(self.prompts)), key=lambda i: (-len(self.prompts[i]), *self.prompts[i]))
        try:
            self._run(waiting)
        finally:
            self._let_go_of_graph()  # It holds the cache, and this decoder, which holds it.
        self.stats.cache_bytes = self._cache.peak_bytes
        return [self.progress.done[i] for i in range(len(self.prompts))]

    def _run(self, waiting: list[int]) -> None:
        tokens = torch.empty(0, dtype=torch.long, device=self.device)
        while waiting or self._rows:
            free = self.max_rows - len(self._rows)
            enough = min(len(waiting), max(1, self.max_rows // REFILL_SHARE))
            if waiting and (not self._rows or free >= enough):
                admitted, waiting = waiting[:free], waiting[free:]
                self.progress.at = [*(row.request for row in self._rows), *admitted]
                tokens = torch.cat([tokens, self._admit(admitted)])
            else:
                tokens = self._step(tokens)
            tokens = self._retire(tokens)

    def _admit(self, requests: list[int]) -> torch.Tensor:
        """Prefills requests into free rows; returns their first tokens."""
        self._relay(requests)
        # Equal prompts, which stand next to each other, are computed once.
        places: dict[tuple[int, ...], list[int]] = {}
        for request in requests:
            places.setdefault(tuple(self.prompts[request]), []).append(request)
        prompts = list(places)
        forward_tokens, most = (_OFFLOADED_FORWARD,) * 2 if is_offloaded(self._base) else (FORWARD_TOKENS, MOST_TOKENS)
        groups = prefill_groups([len(prompt) for prompt in prompts], forward_tokens=forward_tokens)
        parts = [part for group in groups for part in divided(group, len(prompts[group.start]), most)]
        return torch.cat([self._prefill([(prompts[i], places[prompts[i]]) for i in part]) for part in parts])

    def _relay(self, more: Sequence[int] = ()) -> None:
        """Lays the cache out anew: no column before the first token of a row, and room for more rows and columns."""
        before = self._columns
        columns = before - min((row.start for row in self._rows), default=before)
        columns = max([columns, *(len(self.prompts[i]) for i in more)])
        for row in self._rows:
            row.start += columns - before
        # The first token of a response comes from the prefill, and the last is not computed with.
        steps = [self.most[i] - 1 for i in more]
        steps += [self.most[row.request] - len(self._ids[row.request]) for row in self._rows]
        self._room = min(SPARE_COLUMNS, max(steps))
        self._let_go_of_graph()  # It holds the old rows.
        self._cache.relay(len(self._rows) + len(more), columns, self._room)
        self._columns = columns
        self._follow()

    def _prefill(self, group: list[tuple[tuple[int, ...], list[int]]]) -> torch.Tensor:
        """One forward over prompts of similar lengths; the requests of each become rows. Returns their first tokens."""
        width = len(group[0][0])
        ids = torch.zeros(len(group), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for at, (prompt, _) in enumerate(group):
            ids[at, width - len(prompt) :] = torch.tensor(prompt)
            mask[at, width - len(prompt) :] = 1
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)
        given: dict[str, Any] = {"input_ids": ids.to(self.device)}
        given |= {"attention_mask": None if bool(mask.all()) else mask.to(self.device)}
        given |= {"position_ids": positions.to(self.device)} if self._positions else {}
        cache = DynamicCache(config=self._config)
        logits = self.model(**given, past_key_values=cache, **self._fixed).logits[:, -1]
        self.stats.prefills += 1
        self.stats.prefill_tokens += ids.numel()
        self._cache.peak_bytes = max(self._cache.peak_bytes, self._cache.nbytes + dynamic_bytes(cache))
        index = torch.tensor([at for at, (_, requests) in enumerate(group) for _ in requests])
        self._cache.add(cache, None if len(index) == len(group) else index)
        if len(index) != len(group):
            logits = logits[index.to(logits.device)]
        new = [_Row(i, self._columns - len(prompt)) for prompt, requests in group for i in requests]
        self._rows += new
        self._follow(logits.shape[-1])
        return self._choose(logits.float(), len(self._rows) - len(new))

    def _step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One token more for each row."""
        if self._room == 0:
            self._relay()
        if self.capture is None or (self._graph is None and self._room < FEWEST_STEPS):
            logits = self._free_step(tokens)
        else:
            logits = self._fixed_step(tokens)
        self._columns, self._room = self._columns + 1, self._room - 1
        self.stats.steps += 1
        self.stats.row_steps += len(self._rows)
        return self._choose(logits.float(), 0)

    def _let_go_of_graph(self) -> None:
        if self._graph is not None:
            self._graph.release()
            self._graph = None

    def _fixed_step(self, tokens: torch.Tensor) -> torch.Tensor:
        """By a graph, which is made where there is none. What it began is written over if it cannot be."""
        assert self.capture is not None
        if self._graph is not None:
            return self._graph.run(tokens, self._start, self._columns)
        try:
            self._graph = FixedStep(self._forward_fixed, self._cache, self.device, self.capture)
            return self._graph.run(tokens, self._start, self._columns)
        except RuntimeError as error:
            self._let_go_of_graph()
            if is_out_of_memory(error):
                raise
            why = f"a step of it could not be captured ({one_line(error)})"
            note_failure(self._base, why)
            self._free_from_now_on(why)
            return self._free_step(tokens)

    def _free_step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Over the rows and columns that there are."""
        mask = None
        if any(row.start for row in self._rows):
            mask = torch.arange(self._columns + 1, device=self.device) >= self._start[:, None]
            mask = mask[:, None, None] if self._ready_masks else mask.long()
        return self._forward(tokens[:, None], mask, (self._columns - self._start)[:, None])

    def _forward_fixed(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._forward(ids, mask, positions, CAPTURED)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, among: Sequence[str] = SDPA
    ) -> torch.Tensor:
        """Logits (rows, vocabulary) of one token for each row. among: attention in whose place one_token_attention is."""
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        given |= {"position_ids": positions} if self._positions else {}
        with ExitStack() as stack:
            stack.enter_context(grouped_decoding(self._base, among))
            stack.enter_context(getattr(self._base, "_optimize_model_for_decode", nullcontext)())
            logits: torch.Tensor = self.model(**given, past_key_values=self._cache, **self._fixed).logits[:, -1]
        return logits

    def _choose(self, scores: torch.Tensor, first: int) -> torch.Tensor:
        """The next tokens of the rows from `first` on, kept with their log-probabilities. scores: (rows, vocabulary)."""
        rows, sampling = self._rows[first:], self.sampling
        made = [len(self._ids[row.request]) for row in rows]
        if self._seen is not None:
            seen = self._seen[self._request[first:]].to(scores.device)
            scores = penalize(scores, seen, sampling.repetition_penalty)
        early = [at for at, n in enumerate(made) if n < sampling.min_new_tokens]
        if early and self._stop_set:
            at = torch.tensor(early, device=scores.device)[:, None]
            scores[at, torch.tensor(sorted(self._stop_set), device=scores.device)] = float("-inf")
        for warper in self._warpers:
            scores = warper(None, scores)
        uniform = None
        if self._uniforms is not None:
            uniform = self._uniforms[[row.request for row in rows], made]
        tokens, log_probs = choose(scores, uniform)
        # One wait for the device, which doubles hold token ids through.
        both = torch.stack([tokens.double(), log_probs.double()]).tolist()
        for row, token, log_prob in zip(rows, *both, strict=True):
            self._ids[row.request].append(int(token))
            self._log_probs[row.request].append(log_prob)
        tokens = tokens.to(self.device)
        if self._seen is not None:
            self._seen[self._request[first:], tokens] = True
        return tokens

    def _retire(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows whose response has ended leave; the last rows take their places."""
        ended = [at for at, row in enumerate(self._rows) if self._has_ended(row.request)]
        if not ended:
            return tokens
        for at in ended:
            request = self._rows[at].request
            self.progress.done[request] = Response(self._ids[request], self._log_probs[request])
        order = list(range(len(self._rows)))
        for at in reversed(ended):
            last = len(order) - 1
            if at != last:
                self._cache.move(last, at)
                order[at] = order[last]
            order.pop()
        self._rows = [self._rows[at] for at in order]
        self.progress.at = [row.request for row in self._rows]
        self._cache.keep_first(len(order))
        self._follow()
        return tokens[order]

    def _has_ended(self, request: int) -> bool:
        ids = self._ids[request]
        return len(ids) >= self.most[request] or ids[-1] in self._stop_set

    def _follow(self, vocabulary: int | None = None) -> None:
        """What is on the device of the rows, after they or the columns changed."""
        self._start = torch.tensor([row.start for row in self._rows], dtype=torch.long, device=self.device)
        self._request = torch.tensor([row.request for row in self._rows], dtype=torch.long, device=self.device)
        if self.sampling.repetition_penalty == 1.0 or vocabulary is None or self._seen is not None:
            return
        self._seen = torch.zeros(len(self.prompts), vocabulary, dtype=torch.bool, device=self.device)
        for at, prompt in enumerate(self.prompts):
            self._seen[at, torch.tensor(prompt, device=self.device)] = True
