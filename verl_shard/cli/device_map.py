"""verl-shard map"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from verl_shard.cli import passes
from verl_shard.cli.options import default, in_flags, one_of
from verl_shard.common import choices
from verl_shard.common.outputs import check_outputs

HELP = """Which part of a model goes on which GPU, so that the fullest GPU holds as little as possible.

Reads a folder's or hub id's config.json and no weights, and needs no GPU. The map is build_device_map's.
"""


def device_map(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id of the model.")],
    gpus: Annotated[int | None, typer.Option(help="How many GPUs; by default those of this machine.")] = None,
    devices: Annotated[
        str | None, typer.Option(help='GPUs to use in this order, such as "2,5"; "process" for this process\'s share.')
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help='What a GPU may hold: "80GiB" for all, or one for each: "80GiB,80GiB,24GiB".')
    ] = None,
    purpose: Annotated[
        str,
        typer.Option(
            help=one_of(
                choices.Purpose,
                {
                    "inference": "counts weights and buffers, and with --seq-len the KV cache",
                    "training": "the peak of a step, which is larger on the head's GPU, for a second of tracing",
                },
            )
            + "."
        ),
    ] = "inference",
    batch_size: passes.BatchSize = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a sequence, at most the model's positions."
            + default(f"{choices.SEQ_LEN} for training; no KV cache for inference")
        ),
    ] = None,
    precision: passes.Precision = None,
    optimizer: passes.Optimizer = None,
    gradient_checkpointing: passes.Checkpointing = False,
    attn_implementation: passes.Attention = None,
    in_flight: passes.InFlight = None,
    accumulating: passes.Accumulating = False,
    task: passes.Task = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"What weights are counted as, for inference.{default('bfloat16')}")
    ] = None,
    trust_remote_code: passes.TrustRemoteCode = False,
    json: Annotated[bool, typer.Option("--json", help="Print the map as JSON instead of a table.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Also draw the map, into this PNG.")] = None,
    save: Annotated[Path | None, typer.Option(help="Also write the map as JSON, for DeviceMap.load.")] = None,
) -> None:
    """Prints a device map."""
    from json import dumps

    from verl_shard.common.errors import Faults
    from verl_shard.common.tables import out
    from verl_shard.mapping.build import build_device_map
    from verl_shard.mapping.costs import check_dtype, read_pass
    from verl_shard.mapping.devices import choose_devices
    from verl_shard.models.meta import parse_task

    fields = passes.given(
        batch_size=batch_size,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        gradient_checkpointing=gradient_checkpointing,
        attn_implementation=attn_implementation,
        in_flight=in_flight,
        accumulating=accumulating,
    )
    listed: Any = devices
    if devices is not None and devices != "process":
        listed = [name.strip() for name in devices.split(",")]
    faults, chosen, limits = Faults(), None, None
    with faults.gathering():
        check_outputs(picture=picture, save=save)
    with faults.gathering(), in_flags(device_map, n_gpus="--gpus"):
        chosen = choose_devices(gpus, listed)
    with faults.gathering():
        limits = _limits(gpu_memory, chosen)
    with faults.gathering(), in_flags(device_map):
        check_dtype(purpose, dtype, read_pass(purpose, fields))
    with faults.gathering(), in_flags(device_map):
        parse_task(task)
    faults.check()
    with in_flags(device_map, n_gpus="--gpus", max_memory="--gpu-memory"):
        made = build_device_map(
            model,
            gpus,
            purpose=purpose,
            devices=listed,
            max_memory=limits,
            task=task,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            **fields,
        )
    if picture is not None:
        made.draw(picture)
    if save is not None:
        made.save(save)
    if json:
        typer.echo(dumps(made.to_dict(), indent=2))  # rich would break its lines
        return
    out.print(made.report(out.width), end="", markup=False)
    if picture is not None:
        out.print(f"Picture: {picture}", markup=False)


def _limits(text: str | None, devices: tuple[Any, ...] | None) -> dict[Any, str] | None:
    """What each GPU may hold. devices: None where they are not known, for a fault that is said already.

    Raises ConfigError with every size that no GPU has, as verl-shard plan does: 80 would be 80 bytes.
    """
    from verl_shard.common.errors import Faults, config_error
    from verl_shard.config.cards import card_of_memory

    if text is None:
        return None
    faults, sizes = Faults(), [size.strip() for size in text.split(",")]
    for size in dict.fromkeys(sizes):
        with faults.gathering():
            card_of_memory(size)
    if devices is not None and len(sizes) == 1:
        sizes *= len(devices)
    with faults.gathering():
        if devices is not None and len(sizes) != len(devices):
            why = f"{len(sizes)} sizes for {len(devices)} GPUs"
            raise config_error("gpu-memory", "--gpu-memory", text, why, "Give one size for all, or one for each")
    faults.check()
    return None if devices is None else dict(zip(devices, sizes, strict=True))


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("map", help=HELP)(device_map)
