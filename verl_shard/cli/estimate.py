"""verl-shard estimate"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_shard.cli import passes
from verl_shard.cli.options import default, in_flags, one_of
from verl_shard.common import choices

HELP = """The memory of a training step, a forward pass or generation, before any of it is run.

Traced over tensors without memory and replayed through torch's caching allocator: no GPU, no weights, about a second.
"""


def estimate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id of the model.")],
    phase: Annotated[
        str, typer.Option(help=f"{one_of(choices.Phase, {'train': 'a step', 'forward': 'scoring'})}.")
    ] = "train",
    batch_size: passes.BatchSize = None,
    seq_len: passes.SeqLen = None,
    new_tokens: Annotated[
        int | None, typer.Option(help=f"For generation: tokens after the prompt.{default(0)}")
    ] = None,
    precision: passes.Precision = None,
    optimizer: passes.Optimizer = None,
    gradient_checkpointing: passes.Checkpointing = False,
    attn_implementation: passes.Attention = None,
    lora_rank: Annotated[
        int | None,
        typer.Option(help="Train adapters of this rank: saves the gradients and optimizer states of the weights."),
    ] = None,
    logits_to_keep: Annotated[
        int | None,
        typer.Option(
            help=f"Logits of so many last positions only: saves tokens x vocabulary.{default('those of all tokens')}"
        ),
    ] = None,
    loss: Annotated[str | None, typer.Option(help=f"{one_of(choices.Loss)}; by default by the task.")] = None,
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

    from verl_shard.common.errors import Faults, config_error
    from verl_shard.common.tables import out
    from verl_shard.mapping.device_map import DeviceMap
    from verl_shard.memory.estimate import estimate_memory
    from verl_shard.memory.passes import pass_spec
    from verl_shard.models.meta import parse_task

    fields = passes.given(
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
    )
    faults, mapped = Faults(), None
    with faults.gathering():
        mapped = None if device_map is None else DeviceMap.load(device_map)
    with faults.gathering(), in_flags(estimate):
        pass_spec(fields, phase=phase)
    with faults.gathering():
        if lora_rank == 0:
            why = "adapters of rank 0 are none, and it changes nothing"
            raise config_error("no-effect", "--lora-rank", lora_rank, why, "Leave it out, or give 1 or more")
    with faults.gathering(), in_flags(estimate):
        parse_task(task)
    faults.check()
    with in_flags(estimate):
        made = estimate_memory(
            model, phase=phase, device_map=mapped, task=task, trust_remote_code=trust_remote_code, **fields
        )
    if json:
        typer.echo(dumps(made.to_dict(), indent=2))
    else:
        out.print(made.report(out.width), end="", markup=False)


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("estimate", help=HELP)(estimate)
