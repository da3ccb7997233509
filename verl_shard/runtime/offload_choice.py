"""Where a model's weights had best be while it scores: a pure function of the bytes there are, that says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_shard.common.errors import DoesNotFitError, Faults, Finding
from verl_shard.common.units import format_bytes, parse_bytes

WAYS = ("stream", "cpu_offload", "cpu_offload_with_hook", "none", "auto")


def check_stream_options(offload: str, embeddings_on_host: Any, pin_limit: int | str | None) -> int | None:
    """`pin_limit` in bytes. Raises ConfigError for what cannot be meant, and for options that this `offload` does not have."""
    faults = Faults()
    limit = None
    with faults.gathering():
        limit = None if pin_limit is None else parse_bytes(pin_limit, "pin_limit")

    def wrong(code: str, name: str, given: object, why: str, fix: str) -> None:
        faults.findings.append(Finding("error", code, name, str(given), why, fix))

    if not isinstance(embeddings_on_host, bool):
        wrong("not-a-bool", "embeddings_on_host", embeddings_on_host, "not True or False", "Give one of both")
    elif embeddings_on_host and offload == "auto":
        why = "auto leaves the embedding on the host where that is needed, and there only"
        wrong("no-effect", "embeddings_on_host", True, why, 'Leave it out, or write offload="stream"')
    elif embeddings_on_host and offload in WAYS and offload != "stream":
        why = f'offload="{offload}" streams nothing'
        wrong("no-effect", "embeddings_on_host", True, why, 'Leave it out, or write offload="stream"')
    if pin_limit is not None and offload in WAYS and offload not in ("stream", "auto"):
        why = f'offload="{offload}" pins nothing'
        wrong("no-effect", "pin_limit", pin_limit, why, 'Leave it out, or write offload="stream"')
    faults.check()
    return limit


@dataclass(frozen=True)
class Share:
    """What of a model one GPU would hold; bytes."""

    device: str
    weights: int
    """All of it, when it is resident there."""
    blocks: int
    """Of that, what can be streamed."""
    largest_block: int
    embedding: int
    """Of the rest, the input embedding if it can stay on the host: it is here, and no head computes with it."""
    largest_module: int
    """The most that one module without children holds: what accelerate's cpu_offload has there at a time."""
    head_room: int
    """What weights may take."""

    def __post_init__(self) -> None:
        assert 0 <= self.blocks + self.embedding <= self.weights, "parts of the weights"
        assert self.largest_block <= self.blocks, "one of the blocks"

    def streamed(self, ahead: int, embeddings_on_host: bool) -> int:
        """Bytes on the GPU while it streams: what is outside of blocks, and `ahead` buffers as large as the largest."""
        return self.weights - self.blocks - embeddings_on_host * self.embedding + ahead * self.largest_block


@dataclass(frozen=True)
class Choice:
    """A way and the reason for it."""

    offload: str
    embeddings_on_host: bool
    why: str


def choose_offload(shares: Sequence[Share], *, ahead: int, host_room: int | None) -> Choice:
    """The fastest way that leaves each GPU its head-room; the reason has the bytes.

    host_room: bytes of weights that the host can hold, None when it is not known. No shares: there is no GPU.
    cpu_offload_with_hook is never chosen: while it scores it needs as much of the GPU as resident weights do.
    Raises DoesNotFitError when no way fits.
    """
    if not shares:
        return Choice("none", False, "there is no GPU to offload from")
    over = [share for share in shares if share.weights > share.head_room]
    if not over:
        return Choice("none", False, f"it fits: {_each(shares, [share.weights for share in shares])}")
    lacks = f"resident it would take {_each(over, [share.weights for share in over])}"

    leaving = sum(share.blocks for share in shares)
    if host_room is not None and leaving > host_room:
        raise DoesNotFitError(
            f"{lacks}, and the host has room for {format_bytes(host_room)} of the {format_bytes(leaving)} of its blocks. "
            "Give it a larger GPU or a host with more memory"
        )
    for on_host in (False, True):
        if on_host and not any(share.embedding for share in shares):
            continue
        if on_host and host_room is not None and leaving + sum(share.embedding for share in shares) > host_room:
            continue
        needed = [share.streamed(ahead, on_host) for share in shares]
        if all(size <= share.head_room for share, size in zip(shares, needed, strict=True)):
            where = "blocks and embedding" if on_host else "blocks"
            return Choice("stream", on_host, f"{lacks}; with its {where} on the host, {_each(shares, needed)}")
    alone = [share.largest_module for share in shares]
    everything = sum(share.weights for share in shares)
    if len(shares) == 1 and alone[0] <= shares[0].head_room and (host_room is None or everything <= host_room):
        why = f"{lacks}; streamed, {_each(shares, [shares[0].streamed(ahead, True)])}; module by module, "
        return Choice("cpu_offload", False, why + _each(shares, alone))
    streamed = _each(shares, [share.streamed(ahead, True) for share in shares])
    raise DoesNotFitError(f"{lacks}; streamed, {streamed}. Give it a larger GPU, or more of this one")


def _each(shares: Sequence[Share], sizes: Sequence[int]) -> str:
    pairs = zip(shares, sizes, strict=True)
    return ", ".join(
        f"{format_bytes(size)} of {format_bytes(share.head_room)} on {share.device}" for share, size in pairs
    )
