"""verl-shard map"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from verl_shard.cli import passes

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
            help="inference counts weights, buffers and KV cache; training the peak of a step, which is larger on the "
            "head's GPU, for a second of tracing."
        ),
    ] = "inference",
    batch_size: passes.BatchSize = None,
    seq_len: passes.SeqLen = None,
    precision: passes.Precision = None,
    optimizer: passes.Optimizer = None,
    gradient_checkpointing: passes.Checkpointing = False,
    attn_implementation: passes.Attention = None,
    in_flight: passes.InFlight = None,
    accumulating: passes.Accumulating = False,
    task: passes.Task = None,
    dtype: Annotated[str | None, typer.Option(help="What weights are counted as, for inference. [bfloat16]")] = None,
    trust_remote_code: passes.TrustRemoteCode = False,
    json: Annotated[bool, typer.Option("--json", help="Print the map as JSON instead of a table.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Also draw the map, into this PNG.")] = None,
    save: Annotated[Path | None, typer.Option(help="Also write the map as JSON, for DeviceMap.load.")] = None,
) -> None:
    """Prints a device map."""
    from json import dumps

    from verl_shard.common.tables import out
    from verl_shard.mapping.build import build_device_map
    from verl_shard.mapping.devices import choose_devices

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
    made = build_device_map(
        model,
        gpus,
        purpose=purpose,
        devices=listed,
        max_memory=_limits(gpu_memory, choose_devices(gpus, listed)),
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


def _limits(text: str | None, devices: tuple[Any, ...]) -> dict[Any, str] | None:
    if text is None:
        return None
    sizes = [size.strip() for size in text.split(",")]
    if len(sizes) == 1:
        sizes *= len(devices)
    if len(sizes) != len(devices):
        from verl_shard.common.errors import config_error

        why = f"{len(sizes)} sizes for {len(devices)} GPUs"
        raise config_error("gpu-memory", "--gpu-memory", text, why, "Give one size for all, or one for each")
    return dict(zip(devices, sizes, strict=True))


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("map", help=HELP)(device_map)
