"""verl-shard bench generate"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_shard.common.outputs import check_outputs


def generate(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="small, qwen2-1.5b or a model of the zoo; by default qwen2-7b on a GPU, and small without."),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="How many requests; by default 64.", min=2)] = None,
    longest_prompt: Annotated[
        int | None, typer.Option(help="In tokens; by default 1024 on a GPU, and 256.", min=2)
    ] = None,
    longest_response: Annotated[
        int | None, typer.Option(help="In tokens; by default 192 on a GPU, and 128.", min=2)
    ] = None,
    runs: Annotated[int, typer.Option(help="Timed runs of each way; the fastest counts.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Other lengths and prompts are drawn for another seed.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Shorter responses; without a GPU also fewer requests.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Tokens/s of responses of mixed lengths: ours, a plain model.generate loop, transformers' continuous batching."""
    from verl_shard.bench.generate import bench_generate

    check_outputs(out=out)
    bench_generate(
        result=out, model=model, requests=requests, longest_prompt=longest_prompt, longest_response=longest_response,
        runs=runs, seed=seed, quick=quick, as_json=json,
    )  # fmt: skip
