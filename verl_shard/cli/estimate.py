"""verl-shard estimate"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_shard.cli import passes

HELP = """The memory of a training step, a forward pass or generation, before any of it is run.

Traced over tensors without memory and replayed through torch's caching allocator: no GPU, no weights, about a second.
"""


def estimate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id of the model.")],
    phase: Annotated[str, typer.Option(help="train (a step), forward (scoring) or generate.")] = "train",
    batch_size: passes.BatchSize = None,
    seq_len: passes.SeqLen = None,
    new_tokens: Annotated[int | None, typer.Option(help="For generation: tokens after the prompt.")] = None,
    precision: passes.Precision = None,
    optimizer: passes.Optimizer = None,
    gradient_checkpointing: passes.Checkpointing = False,
    attn_implementation: passes.Attention = None,
    lora_rank: Annotated[
        int | None,
        typer.Option(help="Train adapters of this rank: saves the gradients and optimizer states of the weights."),
    ] = None,
    logits_to_keep: Annotated[
        int | None, typer.Option(help="Logits of so many last positions only: saves tokens x vocabulary.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="causal-lm, ppo, verl-ppo or value; by default by the task.")] = None,
    packed: passes.Packed = False,
    in_flight: passes.InFlight = None,
    accumulating: passes.Accumulating = False,
    task: passes.Task = None,
    device_map: Annotated[
        Path | None, typer.Option(help='A map that "verl-shard map --save" wrote; the estimate is then for each GPU.')
    ] = None,
    trust_remote_code: passes.TrustRemoteCode = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Prints a memory estimate."""
    from json import dumps

    from verl_shard.common.tables import out
    from verl_shard.memory.estimate import estimate_memory

    mapped = None
    if device_map is not None:
        from verl_shard.mapping.device_map import DeviceMap

        mapped = DeviceMap.load(device_map)
    made = estimate_memory(
        model,
        phase=phase,
        device_map=mapped,
        task=task,
        trust_remote_code=trust_remote_code,
        **passes.given(
            batch_size=batch_size,
            seq_len=seq_len,
            new_tokens=new_tokens,
            precision=precision,
            optimizer=optimizer,
            gradient_checkpointing=gradient_checkpointing,
            attn_implementation=attn_implementation,
            lora_rank=lora_rank,
            logits_to_keep=logits_to_keep,
            loss=loss,
            packed=packed,
            in_flight=in_flight,
            accumulating=accumulating,
        ),
    )
    if json:
        typer.echo(dumps(made.to_dict(), indent=2))
    else:
        out.print(made.report(out.width), end="", markup=False)


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("estimate", help=HELP)(estimate)
