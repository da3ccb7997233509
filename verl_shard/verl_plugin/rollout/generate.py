"""What the `hf` rollout asks of verl_shard.runtime.generation: which tokens end a response, and the seed of each request."""

from __future__ import annotations

from collections import Counter
from typing import Any

from verl_shard.common.seeds import derive_seed
from verl_shard.runtime.generation import generate
from verl_shard.runtime.generation_pieces import Generation
from verl_shard.runtime.generation_sampling import Response, Sampling

__all__ = ["RequestSeeds", "Response", "Sampling", "generate", "generation_of", "stop_tokens"]


def stop_tokens(tokenizer: Any, generation_config: Any) -> tuple[list[int], int]:
    """(ids that end a response, the id that pads), from a model's generation_config.json, else from its tokenizer."""
    eos = getattr(generation_config, "eos_token_id", None)
    eos = tokenizer.eos_token_id if eos is None else eos
    ends = list(eos) if isinstance(eos, list | tuple) else [eos]
    return ends, tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]


_GENERATION = "verl_shard_generation"


def generation_of(engine: Any) -> Generation:
    """The Generation of an engine, made when it is first asked for, and anew where the engine has another module."""
    made: Generation | None = vars(engine).get(_GENERATION)
    if made is None or made.model is not engine.module:
        made = Generation(engine.module, precision=engine.precision, allocator=engine.engine_config.allocator == "auto")
        setattr(engine, _GENERATION, made)
    return made


class RequestSeeds:
    """The seed of each request: of the run's seed, the steps that the weights have behind them, the prompt, and how often
    it was asked for since. The n responses to one prompt differ by that, and not by arrival among others.
    """

    def __init__(self, seed: int, steps_done: int | None) -> None:
        self._seed, self._steps_done = seed, steps_done
        self._asked: Counter[tuple[int, ...]] = Counter()

    def after(self, steps_done: int) -> None:
        """From now on requests are answered with the weights after so many steps."""
        self._steps_done = steps_done
        self._asked.clear()

    def next(self, prompt: tuple[int, ...]) -> int:
        """Of one more request."""
        made = derive_seed(self._seed, self._steps_done, self._asked[prompt], *prompt)
        self._asked[prompt] += 1
        return made
