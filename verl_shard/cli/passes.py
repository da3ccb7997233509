"""The flags of a pass that `map` and `estimate` share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

BatchSize = Annotated[int | None, typer.Option(help="Sequences in a micro-batch.")]
SeqLen = Annotated[int | None, typer.Option(help="Tokens of a sequence; for generation, of the prompt.")]
Precision = Annotated[
    str | None,
    typer.Option(
        help="bf16-mixed (fp32 weights under bf16 autocast), bf16 (half of that memory, and small updates are lost in "
        "rounding) or fp32."
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(help="adamw, adamw-fused (saves the gradients' size during the step) or sgd (saves two of three)."),
]
Checkpointing = Annotated[
    bool,
    typer.Option(
        "--gradient-checkpointing",
        help="Keep only the input of each block for the backward: most activation memory, for a third more compute.",
    ),
]
Attention = Annotated[
    str | None, typer.Option(help="sdpa, flash_attention_2, or eager, which holds every attention score.")
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
    typer.Option(help="Micro-batches between forward and backward at a time: GPUs overlap, for their activations."),
]
Accumulating = Annotated[
    bool,
    typer.Option(
        "--accumulating", help="A step of several micro-batches: their gradients are there while the next one runs."
    ),
]
Task = Annotated[
    str | None, typer.Option(help="causal-lm, reward, process-reward or value; by default what the model says.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model's folder brings.")]


def given(**fields: Any) -> dict[str, Any]:
    """The flags that were given."""
    return {name: value for name, value in fields.items() if value is not None and value is not False}
