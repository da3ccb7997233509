"""Tokens a second of our generation, of a plain loop over transformers' `generate`, and of its continuous batching."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_shard.bench.maps import zoo
from verl_shard.bench.record import tell
from verl_shard.common.errors import RunError, config_error
from verl_shard.common.tables import err, table

SCHEMA = "verl_shard/bench-generate/1"
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4000, "max_position_embeddings": 4096,
    },
    "qwen2-1.5b": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Beside the models of the zoo."""
SHORTEST_PROMPT, SHORTEST_RESPONSE = 1 / 32, 1 / 16
"""Of the longest."""
_PATIENCE_S = 60
"""For all answers of transformers' continuous batching, after which its row stays empty."""
ON_GPU, QUICK_ON_GPU, ON_CPU, QUICK_ON_CPU = (64, 1024, 192), (64, 1024, 48), (64, 256, 128), (16, 64, 32)
"""Requests, and tokens of the longest prompt and response. A batch of `model.generate` takes as many steps as its longest
response, about 0.1 s each for 64 rows of a 7B model on an H200, and batches of 8 take six times as many."""
_SAME_IN_FP32 = 0.95
"""Two candidates that are as likely within rounding may change one response; a fault of ours would change most."""


@dataclass(frozen=True)
class Load:
    """Requests: prompts, and how many tokens the response to each has."""

    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[int, ...]

    @property
    def new_tokens(self) -> int:
        return sum(self.responses)


@dataclass(frozen=True)
class Answer:
    """Token ids of each response, and the bytes of keys and values at their fullest, where they can be known."""

    token_ids: list[list[int]]
    cache_bytes: int | None


@dataclass(frozen=True)
class GenerateRow:
    """One way. seconds: of the wall's clock; cpu_seconds: of this process on all its cores. peak_bytes: on the GPU, beyond
    the model. same: the share of tokens before the first that the plain loop did not choose. None: it could not run."""

    way: str
    seconds: float | None
    cpu_seconds: float | None
    tokens_per_second: float | None
    cache_bytes: int | None
    peak_bytes: int | None
    same: float | None


Way = Callable[[Any, Load, Any], Answer]
"""Takes a model, the load and the model's device."""


def draw(n: int, longest_prompt: int, longest_response: int, vocab_size: int, seed: int) -> Load:
    """n requests; the logarithms of both lengths are even between a thirty-second (a sixteenth) of the longest and that.

    Lengths of reasoning are like that: most short, some very long. At least one of each is as long as it may be.
    """
    generator = random.Random(seed)

    def lengths(longest: int, share: float) -> list[int]:
        low, high = math.log(max(1.0, longest * share)), math.log(longest)
        made = [round(math.exp(generator.uniform(low, high))) for _ in range(n)]
        made[generator.randrange(n)] = longest
        return made

    prompts, responses = lengths(longest_prompt, SHORTEST_PROMPT), lengths(longest_response, SHORTEST_RESPONSE)
    return Load(tuple(tuple(generator.choices(range(5, vocab_size), k=k)) for k in prompts), tuple(responses))


def bench_generate(
    *, result: Path | None, model: str | None = None, requests: int | None = None, longest_prompt: int | None = None,
    longest_response: int | None = None, runs: int = 1, seed: int = 0, quick: bool = False, as_json: bool = False,
) -> list[GenerateRow]:  # fmt: skip
    """Measures a causal model with random weights, on the first GPU in bf16, else on the host in fp32: greedy, no response
    ends by itself, each row is ended after the tokens that were drawn for it. Prints a table, or JSON. JSON goes to `result`
    too, after each way: what was measured is there when the run is cut off.

    requests, longest_prompt, longest_response: in tokens; by default ON_GPU or ON_CPU, with `quick` the smaller ones.

    Raises ConfigError for an unknown model, and RunError when tokens in fp32 are not those of the plain loop.
    """
    known = [*SHAPES, *(entry["name"] for entry in zoo() if entry["auto"] == "AutoModelForCausalLM")]
    import torch

    cuda = torch.cuda.is_available()
    model = model or ("qwen2-7b" if cuda else "small")
    if model not in known:
        raise config_error("model", "--model", model, "not in the zoo", f"Use one of {', '.join(known)}")
    made, device = _model(model, cuda)
    sizes = (QUICK_ON_GPU if quick else ON_GPU) if cuda else (QUICK_ON_CPU if quick else ON_CPU)
    n, prompt, response = (a or b for a, b in zip((requests, longest_prompt, longest_response), sizes, strict=True))
    load = draw(n, prompt, response, made.config.vocab_size, seed)
    what = {
        "threads": torch.get_num_threads(), "model": model, "device": str(device),
        "dtype": str(made.dtype).removeprefix("torch."), "seed": seed,
        "prompt_tokens": [len(p) for p in load.prompts], "response_tokens": load.responses,
    }  # fmt: skip

    def content(rows: Sequence[GenerateRow]) -> dict[str, Any]:
        return {**what, "speedups": speedups(rows), "rows": [asdict(row) for row in rows]}

    def keep(rows: Sequence[GenerateRow]) -> None:
        tell(SCHEMA, content(rows), [], result=result)

    rows = measure(made, load, ways(n, cuda=cuda), device, runs=runs, keep=keep)
    tell(SCHEMA, content(rows), [shown(model, load, rows)], result=result, as_json=as_json)
    mine = next(row for row in rows if row.way == "ours")
    if not cuda and mine.same is not None and mine.same < _SAME_IN_FP32:
        raise RunError(f"only {mine.same:.1%} of our tokens are those of the plain loop, in fp32")
    return rows


def _model(name: str, cuda: bool) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_shard.bench.stock_cells import config_of

    config = AutoConfig.for_model(**SHAPES[name]) if name in SHAPES else config_of(name)
    device = torch.device("cuda:0" if cuda else "cpu")
    torch.manual_seed(0)
    with device:
        made = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if cuda else torch.float32, attn_implementation="sdpa"
        )
    return made.eval(), device


def ways(requests: int, *, cuda: bool = False) -> dict[str, Way]:
    """What is measured, in the order in which it runs: what is asked most first, and what might leave the GPU in
    disorder last. The last changes the model's attention, and puts it back."""
    return {
        f"model.generate, one batch of {requests}": lambda *given: plain(*given, batch=requests),
        "ours": ours,
        "model.generate, batches of 8": lambda *given: plain(*given, batch=8),
        **({"ours, enforce_eager": without_graphs} if cuda else {}),
        "transformers' continuous batching": continuous,
    }


def plain(model: Any, load: Load, device: Any, *, batch: int) -> Answer:
    """As users write it: requests in batches as they come, padded on the left, each until its longest response ends.

    A row's length is kept as an end-of-sequence token keeps it: the row is done, and computed until all are.
    """
    import torch
    from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

    from verl_shard.runtime.generation_cache import dynamic_bytes

    class Lengths(StoppingCriteria):  # type: ignore[misc]
        def __init__(self, width: int, wanted: Sequence[int]) -> None:
            self.ends = width + torch.tensor(wanted, device=device)

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return input_ids.shape[1] >= self.ends

    made, most = [], 0
    for start in range(0, len(load.prompts), batch):
        prompts, wanted = load.prompts[start : start + batch], load.responses[start : start + batch]
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        cache = DynamicCache(config=model.config)
        tokens = model.generate(
            input_ids=ids.to(device), attention_mask=mask.to(device), do_sample=False, past_key_values=cache,
            max_new_tokens=max(wanted), eos_token_id=None, pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Lengths(width, wanted)]),
        )[:, width:].tolist()  # fmt: skip
        most = max(most, dynamic_bytes(cache))
        made += [row[:n] for row, n in zip(tokens, wanted, strict=True)]
    return Answer(made, most)


def without_graphs(model: Any, load: Load, device: Any) -> Answer:
    """Ours with a launch for each kernel of a step, as with rollout.enforce_eager."""
    return ours(model, load, device, enforce_eager=True)


def ours(model: Any, load: Load, device: Any, *, enforce_eager: bool = False) -> Answer:
    """verl_shard's generation as the `hf` rollout uses it, each request with its own longest response.

    On a GPU steps have a fixed shape between two relays of the cache, and a CUDA graph, captured anew after each.
    """
    import torch

    from verl_shard.runtime.any_shape import of_any_shape
    from verl_shard.runtime.generation_graph import capture_on
    from verl_shard.runtime.generation_rows import RowDecoder
    from verl_shard.runtime.generation_sampling import Sampling

    n = len(load.prompts)
    greedy = Sampling(max(load.responses), temperature=0.0)
    capture = None if enforce_eager else capture_on(device)
    with torch.no_grad(), of_any_shape():
        decoder = RowDecoder(model, load.prompts, range(n), greedy, load.responses, (), device, n, capture)
        responses = decoder.run()
    return Answer([response.token_ids for response in responses], decoder.stats.cache_bytes)


def continuous(model: Any, load: Load, device: Any) -> Answer:
    """transformers' own, with as many blocks as the load fills."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    del device
    size = 256
    blocks = sum(-(-(len(p) + n) // size) + 1 for p, n in zip(load.prompts, load.responses, strict=True))
    settings = ContinuousBatchingConfig(block_size=size, num_blocks=blocks, max_batch_tokens=512)
    config = GenerationConfig(do_sample=False, max_new_tokens=max(load.responses), eos_token_id=-1, pad_token_id=0)
    before = model.config._attn_implementation
    found: dict[int, list[int]] = {}
    ends = time.monotonic() + _PATIENCE_S
    try:
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=settings, block=True, timeout=5
        ) as manager:
            for at, (prompt, n) in enumerate(zip(load.prompts, load.responses, strict=True)):
                manager.add_request(list(prompt), request_id=str(at), max_new_tokens=n)
            while len(found) < len(load.prompts):
                made = manager.get_result(timeout=1)
                if made is not None and made.is_finished():
                    found[int(made.request_id)] = list(made.generated_tokens)
                if made is None and (not manager.is_running() or time.monotonic() > ends):
                    raise RunError("transformers' continuous batching gave no answer")
    finally:
        model.set_attn_implementation(before)
    return Answer([found[at] for at in range(len(load.prompts))], None)


def measure(
    model: Any,
    load: Load,
    offered: dict[str, Way],
    device: Any,
    *,
    runs: int,
    keep: Callable[[Sequence[GenerateRow]], None],
) -> list[GenerateRow]:
    """Each way in turn: a few short requests to warm up, then the fastest of its runs. The first is the plain loop.

    keep: told all rows that there are, after each.
    """
    warm = Load(load.prompts[:4], (3,) * len(load.prompts[:4]))
    rows: list[GenerateRow] = []
    expected: list[list[int]] | None = None
    for name, way in offered.items():
        try:
            way(model, warm, device)
            took = [_timed(way, model, load, device) for _ in range(runs)]
        except Exception as error:  # others' code, and out of memory, leave a row empty and are said
            if name == "ours":
                raise
            err.print(f"{name}: {type(error).__name__}: {error}")
            rows.append(GenerateRow(name, None, None, None, None, None, None))
            keep(rows)
            continue
        seconds, cpu, answer, peak = min(took, key=lambda run: run[0])
        expected = expected or answer.token_ids
        rows.append(
            GenerateRow(
                name, seconds, cpu, load.new_tokens / seconds, answer.cache_bytes, peak,
                same_share(answer.token_ids, expected),
            )
        )  # fmt: skip
        err.print(f"{name}: {seconds:.2f} s, {load.new_tokens / seconds:.0f} tokens/s")
        keep(rows)
    return rows


def _timed(way: Way, model: Any, load: Load, device: Any) -> tuple[float, float, Answer, int | None]:
    import torch

    gc.collect()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device) if cuda else 0
    began, cpu = time.perf_counter(), time.process_time()
    answer = way(model, load, device)
    if cuda:
        torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held if cuda else None
    return time.perf_counter() - began, time.process_time() - cpu, answer, peak


def same_share(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Of all tokens, those before the first in their response that differs."""
    same = 0
    for row, wanted in zip(found, expected, strict=True):
        pairs = zip(row, wanted, strict=False)
        same += next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(row), len(wanted)))
    return same / sum(map(len, expected))


def speedups(rows: Sequence[GenerateRow]) -> dict[str, float]:
    """How many times the tokens a second of each other way ours has; none before ours has run."""
    mine = next((row for row in rows if row.way == "ours" and row.seconds is not None), None)
    if mine is None or mine.seconds is None:
        return {}
    return {row.way: row.seconds / mine.seconds for row in rows if row.seconds is not None and row is not mine}


def shown(model: str, load: Load, rows: Sequence[GenerateRow]) -> Any:
    """The table."""
    times, prompts, n = speedups(rows), [len(prompt) for prompt in load.prompts], len(load.prompts)
    cells = [
        (
            row.way,
            *("-" if x is None else f"{x:,.{digits}f}" for x, digits in (
                (row.seconds, 2), (row.cpu_seconds, 2), (row.tokens_per_second, 0),
            )),
            f"{times[row.way]:.2f} x" if row.way in times else "",
            *("-" if x is None else f"{x / 1e6:,.0f}" for x in (row.cache_bytes, row.peak_bytes)),
            "-" if row.same is None else f"{row.same:.1%}",
        )
        for row in rows
    ]  # fmt: skip
    title = (
        f"{model}, {n} requests: prompts of {min(prompts)} to {max(prompts)} tokens (mean {sum(prompts) / n:.0f}), "
        f"responses of {min(load.responses)} to {max(load.responses)} (mean {load.new_tokens / n:.0f})"
    )
    columns = ("", "seconds", "CPU s", "tokens/s", "ours is", "cache, MB", "GPU peak, MB", "same tokens")
    return table(title, columns, cells)
