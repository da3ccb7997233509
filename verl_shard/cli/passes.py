"""The flags of a pass, most of which `map` and `estimate` share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from verl_shard.cli.options import default, one_of
from verl_shard.common import choices

BatchSize = Annotated[int | None, typer.Option(help=f"Sequences in a micro-batch.{default(choices.BATCH_SIZE)}")]
SeqLen = Annotated[
    int | None,
    typer.Option(
        help=f"Tokens of a sequence, at most the model's positions; for generation, of the prompt.{default(choices.SEQ_LEN)}"
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        help=one_of(
            choices.Precision,
            {
                "bf16-mixed": "fp32 weights under bf16 autocast",
                "bf16": "half of that memory, and small updates are lost in rounding",
            },
        )
        + f".{default('bf16-mixed for training, else bf16')}"
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        help=one_of(
            choices.Optimizer,
            {"adamw-fused": "saves the gradients' size during the step", "sgd": "saves two of three"},
        )
        + f".{default('adamw')}"
    ),
]
Checkpointing = Annotated[
    bool,
    typer.Option(
        "--gradient-checkpointing",
        help="Keep only the input of each block for the backward: most activation memory, for a third more compute.",
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        help=one_of(
            choices.Attention,
            {
                "sdpa_packed": "our engine's for packed rows, which needs no mask",
                "eager": "holds every attention score",
            },
        )
        + f".{default('sdpa')}"
    ),
]
Packed = Annotated[
    bool,
    typer.Option(
        "--packed",
        help="The sequences in one row, as verl packs them: no padding, and with flash_attention_2 no mask.",
    ),
]
InFlight = Annotated[
    int | None,
    typer.Option(
        help=f"Micro-batches between forward and backward at a time: GPUs overlap, for their activations.{default(1)}"
    ),
]
Accumulating = Annotated[
    bool,
    typer.Option(
        "--accumulating", help="A step of several micro-batches: their gradients are there while the next one runs."
    ),
]
Task = Annotated[str | None, typer.Option(help=f"{one_of(choices.Task)}; by default what the model says.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model's folder brings.")]


def given(**fields: Any) -> dict[str, Any]:
    """The flags that were given."""
    return {name: value for name, value in fields.items() if value is not None and value is not False}
