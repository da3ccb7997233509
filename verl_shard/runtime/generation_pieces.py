"""Generation where memory is short: fewer responses at once. The same tokens come out, for each request has its own seed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from verl_shard.common.notices import record_event
from verl_shard.memory.passes import PassSpec
from verl_shard.runtime.allocator import ResourceAllocator
from verl_shard.runtime.generation import generate
from verl_shard.runtime.generation_prefill import MOST_TOKENS
from verl_shard.runtime.generation_rows import Progress
from verl_shard.runtime.generation_sampling import Response, Sampling
from verl_shard.runtime.ladder import Ladder, Pieces, is_out_of_memory
from verl_shard.runtime.oom_report import estimated, on_gpus, report_out_of_memory
from verl_shard.runtime.pass_memory import PassMemory

PHASE = "generate"


class Generation:
    """`generate` on one model over a run. Remedies that are taken stay so for later calls.

    precision: "bf16-mixed", "bf16" or "fp32", in which it computes. allocator: whether head-room is looked at before each
    call, and not only what is left of it once it ran out. trainable: its weights are also trained.
    """

    def __init__(
        self, model: Any, *, precision: str | None = None, allocator: bool = True, trainable: bool = True
    ) -> None:
        self.model, self._precision, self._trainable = model, precision, trainable
        self.ladder = Ladder(PHASE)
        self.allocator = ResourceAllocator(self.ladder, self._needed) if allocator else None
        self._memory: PassMemory | None = None
        self._placed: dict[str, Any] = {}
        self._shape = (0, 0, 0)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        *,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        max_new_tokens: Sequence[int] | None = None,
        max_rows: int | None = None,
        enforce_eager: bool = False,
    ) -> list[Response]:
        """As `generate`. After memory ran out, responses that were whole are kept and the others begun anew, fewer at once.

        Raises DoesNotFitError that names the request which does not fit alone, its length and what it is estimated to take.
        """
        if not prompts:
            return []
        most = [sampling.max_new_tokens] * len(prompts) if max_new_tokens is None else list(max_new_tokens)
        asked = Pieces(1, max_rows or len(prompts), wording="{} responses at once")
        whole: dict[int, Response] = {}
        under_way: list[int] = []
        self._shape = len(prompts), max(map(len, prompts)), max(most)
        if self.allocator is not None:
            self.allocator.before(asked)

        def attempt(pieces: Pieces) -> None:
            left = [i for i in range(len(prompts)) if i not in whole]
            progress = Progress()
            try:
                with nullcontext() if self.allocator is None else self.allocator.watching(pieces):
                    generate(
                        self.model, [prompts[i] for i in left], [seeds[i] for i in left], sampling,
                        pad_token_id=pad_token_id, eos_token_ids=eos_token_ids, device=device,
                        max_new_tokens=[most[i] for i in left], max_rows=pieces.size, enforce_eager=enforce_eager,
                        progress=progress,
                    )  # fmt: skip
            except Exception as error:
                under_way[:] = [left[i] for i in progress.at]
                if is_out_of_memory(error):
                    record_event("out-of-memory", **report_out_of_memory(error, self.model, PHASE).to_dict())
                raise
            finally:
                whole.update({left[i]: response for i, response in progress.done.items()})

        def too_large(said: str) -> str:
            which = ", ".join(f"{i} ({len(prompts[i])} tokens and {most[i]} new ones)" for i in under_way) or "unknown"
            return (
                f"{PHASE}: {said}. Request {which} alone does not fit. {self._estimate(prompts, most, under_way)} "
                "Shorten prompts or responses (data.max_prompt_length, data.max_response_length), or take a remedy that "
                "verl-shard plan names."
            )

        self.ladder.work(attempt, asked, too_large=too_large, below=lambda: len(prompts) - len(whole), draws=False)
        return [whole[i] for i in range(len(prompts))]

    def _estimate(self, prompts: Sequence[Sequence[int]], most: Sequence[int], which: Sequence[int]) -> str:
        at = which[0] if which else 0
        return estimated(
            self.model.config, len(prompts[at]), phase="generate", task="causal-lm", new_tokens=most[at],
            precision=self._precision, trainable=self._trainable, device_map=on_gpus(self.model),
        )  # fmt: skip

    def _needed(self, pieces: Pieces) -> dict[Any, int] | None:
        """Bytes by device: the cache of so many responses, and a prefill."""
        placed = dict(getattr(self.model, "hf_device_map", {}))
        if self._memory is None or self._placed != placed:
            self._placed = placed
            wanted = PassSpec(
                phase="generate",
                precision=self._precision,  # type: ignore[arg-type]
                trainable=self._trainable,
                padded=True,
            )
            self._memory = PassMemory(self.model.config, "causal-lm", wanted, placed)
        n, longest, new = self._shape
        return self._memory.of_generation(min(pieces.size, n), longest, new, max(1, MOST_TOKENS // longest))
