"""verl-shard bench"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_shard.cli import bench_tables
from verl_shard.cli.bench_generate import generate
from verl_shard.common.outputs import check_outputs


def start(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps to time; by default a whole quick start's.", min=3)
    ] = None,
    algorithm: Annotated[str, typer.Option(help="ppo or grpo.")] = "ppo",
) -> None:
    """How long verl takes from launch to its first training step, and for a step of the quick start."""
    from verl_shard.bench.start import bench_start

    check_outputs(out=out)
    given = {"algorithm": algorithm} | ({} if steps is None else {"steps": steps})
    bench_start(given, out)


def maps(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    other_transformers: Annotated[
        str | None, typer.Option(help='A second transformers whose "auto" to ask, such as 5.24.0; it is downloaded.')
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Six models only, and fewer turns.")] = False,
) -> None:
    """How even device maps are and how long they take, ours beside accelerate's and transformers' own."""
    from verl_shard.bench.maps import bench_maps, check_version
    from verl_shard.common.errors import Faults

    faults = Faults()
    with faults.gathering():
        check_outputs(out=out)
    with faults.gathering():
        check_version(other_transformers)
    faults.check()
    bench_maps(quick=quick, other_transformers=other_transformers, result=out)


def memory(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    seed: Annotated[int, typer.Option(help="Other shapes are drawn for another seed.")] = 0,
    rows: Annotated[int, typer.Option(help="How many passes to run.", min=1)] = 40,
    kind: Annotated[
        list[str] | None, typer.Option(help="dense, moe (mixtures of experts) or packed; by default each in turn.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="A file that --out wrote: estimates its rows again, and needs no GPU. Draws and runs none."),
    ] = None,
    slow: Annotated[
        bool, typer.Option("--slow", help="Ask torch's MemTracker too, which takes minutes for a large model.")
    ] = False,
) -> None:
    """How right memory estimates are, ours and others': real passes on this machine's first GPU, drawn from the seed."""
    from verl_shard.bench.memory import bench_memory, compare_memory

    check_outputs(out=out)
    if compare is not None:
        compare_memory(compare, result=out, slow=slow)
    else:
        bench_memory(seed=seed, n=rows, result=out, slow=slow, **({"kinds": kind} if kind else {}))


def rates(
    out: Annotated[Path | None, typer.Option(help="Where to write the rates, for times and plans to use.")] = None,
) -> None:
    """What this machine's first GPU and its host reach: products, memory, attention, launches, copies."""
    from verl_shard.bench.rates import bench_rates

    check_outputs(out=out)
    bench_rates(result=out)


def times(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    rates: Annotated[
        Path | None, typer.Option(help="A file of `bench rates`; by default the card's data sheet.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Models of the zoo, instead of three.")] = None,
    fit: Annotated[Path | None, typer.Option(help="Where to write rates that are fitted to what was measured.")] = None,
) -> None:
    """How right predicted times are: passes and whole steps of three models on this machine's first GPU."""
    from verl_shard.bench.times import MODELS, bench_times

    check_outputs(out=out, fit=fit)
    bench_times(models=model or MODELS, rates=rates, result=out, fit=fit)


def stock(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    large: Annotated[bool, typer.Option("--large", help="A 7B model too; it needs 110 GiB.")] = False,
    only: Annotated[int | None, typer.Option(help="The number of one configuration, from 0.", min=0)] = None,
    compare: Annotated[
        Path | None, typer.Option(help="A file that --out wrote: predicts its rows again, and needs no GPU. Runs none.")
    ] = None,
) -> None:
    """How right the phases of stock verl are: its own FSDP engine on this machine's first GPU, without Ray."""
    from verl_shard.bench.stock import bench_stock, compare_stock
    from verl_shard.common.errors import Faults, config_error

    faults = Faults()
    with faults.gathering():
        check_outputs(out=out)
    with faults.gathering():
        if compare is not None and (large or only is not None):
            given = "--large" if large else f"--only {only}"
            why = "the configurations are those of the file that --compare names, and none is run"
            raise config_error("compare", "bench stock", given, why, f"Leave out {given.split()[0]}, or --compare")
    faults.check()
    if compare is None:
        bench_stock(result=out, large=large, only=only)
    else:
        compare_stock(compare, result=out)


def offload(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    model: Annotated[str, typer.Option(help="A model of the zoo, whose shape the scoring models have.")] = "qwen2-7b",
    calls: Annotated[int, typer.Option(help="Timed calls of each way and shape.", min=1)] = 7,
    phases: Annotated[
        bool,
        typer.Option("--phases", help="The reference and the reward phase of a PPO step instead, and the GB freed."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """A reward model out of this machine's first GPU, every way: seconds a call, memory, set-up, and the copy's limit."""
    check_outputs(out=out)
    if phases:
        from verl_shard.bench.offload_phases import bench_offload_phases

        bench_offload_phases(result=out, model=model, calls=calls, as_json=json)
    else:
        from verl_shard.bench.offload import bench_offload

        bench_offload(result=out, model=model, calls=calls, as_json=json)


def pipeline(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    model: Annotated[str, typer.Option(help="A model of the zoo, whose shape the model has.")] = "qwen2-7b",
    runs: Annotated[int, typer.Option(help="Timed steps of each kind.", min=1)] = 4,
    gpus: Annotated[int | None, typer.Option(help="How many GPUs; by default all there are.", min=1)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """A model over this machine's GPUs in micro-batches: our dispatch, accelerate's, and one GPU; seconds and memory.

    On one GPU: our dispatch beside the plain model, and an update by verl's worker over our engine beside a loop by hand.
    """
    from verl_shard.bench.pipeline import bench_pipeline

    check_outputs(out=out)
    bench_pipeline(result=out, model=model, runs=runs, gpus=gpus, as_json=json)


def attention(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Models of the zoo; by default qwen2-0.5b and qwen2-7b.")
    ] = None,
    layers: Annotated[int, typer.Option(help="How many layers of each.", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="Other lengths are drawn for another seed.")] = 0,
) -> None:
    """sdpa and flash_attention_2 with padding and packed: time, memory, and how far from fp32, on the first GPU."""
    from verl_shard.bench.attention import MODELS, bench_attention

    check_outputs(out=out)
    bench_attention(result=out, models=model or MODELS, layers=layers, seed=seed)


def add_to(app: typer.Typer) -> None:
    """Adds the verb and its measurements."""
    bench = typer.Typer(no_args_is_help=True, help="Measure, on this machine.")
    bench.command("start")(start)
    bench.command("maps")(maps)
    bench.command("memory")(memory)
    bench.command("stock")(stock)
    bench.command("rates")(rates)
    bench.command("times")(times)
    bench.command("offload")(offload)
    bench.command("pipeline")(pipeline)
    bench.command("attention")(attention)
    bench.command("generate")(generate)
    bench_tables.add_to(bench)
    bench.callback()(lambda: None)
    app.add_typer(bench, name="bench")
