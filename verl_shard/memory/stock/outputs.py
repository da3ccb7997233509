"""Stand-ins with the memory of what verl does with logits: log-probabilities, entropy, the fused head.

verl/workers/engine/fsdp/transformer_impl.py (prepare_model_outputs), verl/utils/torch_functional.py,
verl/utils/experimental/torch_functional.py. T: tokens, V: vocabulary. Nothing is computed; shapes, dtypes, what is
saved for the backward and what is held while an operation runs are those of the real ones on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from typing import Any

import torch

ENTROPY_CHUNK = 2048
"""Rows at once in entropy_from_logits_with_chunking (entropy_from_logits_chunk_size)."""
FUSED_CHUNK = 512
"""Tokens at once in FusedLinearForPPO."""


class FlashLogProbs(torch.autograd.Function):
    """flash-attn's cross-entropy: saves the logits and a log-sum-exp a row; the gradient goes into the logits in place."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, in_place: bool) -> torch.Tensor:
        lse = logits.new_empty(logits.shape[0], dtype=torch.float32)
        ctx.save_for_backward(logits, lse)
        ctx.in_place = in_place
        return torch.empty_like(lse)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, _ = ctx.saved_tensors
        return (logits.detach() if ctx.in_place else torch.empty_like(logits)), None


class RowLogProbs(torch.autograd.Function):
    """logprobs_from_logits_v2, which verl takes where flash-attn is missing: row by row, each row's log_softmax saved.

    Under autocast a row is in fp32. The backward turns each into a row of the logits' dtype, and stacks them.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows, width = logits.shape
        ctx.rows = [torch.empty(rows, width, dtype=dtype)] if logits.requires_grad else []
        ctx.of = logits.dtype
        row = [torch.empty(width, dtype=dtype) for _ in range(2)]
        del row
        return torch.empty(rows, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        shape = ctx.rows[0].shape
        ctx.rows.clear()
        unstacked = torch.empty(shape, dtype=ctx.of)
        stacked = torch.empty(shape, dtype=ctx.of)
        del unstacked
        return stacked, None


class LogSumExpRows(torch.autograd.Function):
    """logsumexp(logits) without the row loop's log_softmax: for fp32 logits v2 saves only the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty(logits.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        gathered = torch.empty_like(logits)
        unstacked = torch.empty_like(logits)
        stacked = torch.empty_like(logits)
        del unstacked
        total = torch.empty_like(logits)
        del gathered, stacked
        return total


class _LogSumExp(torch.autograd.Function):
    """torch.logsumexp in fp32: log(sum(exp(x - max))) with one temporary; the backward makes two at once."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        result = (logits - logits.amax(-1, keepdim=True)).exp_().sum(-1)
        ctx.save_for_backward(logits, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, result = ctx.saved_tensors
        return grads[0].unsqueeze(-1) * (logits - result.unsqueeze(-1)).exp()


def entropy_eager(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """entropy_from_logits. logits: (..., V); dtype: fp32 under autocast, else that of the logits."""
    probabilities = torch.softmax(logits.to(dtype), -1)
    return _LogSumExp.apply(logits.to(dtype)) - torch.sum(probabilities * logits, -1)  # type: ignore[no-any-return, no-untyped-call]


def entropy_chunked(logits: torch.Tensor) -> torch.Tensor:
    """entropy_from_logits_with_chunking. logits: (T, V)."""
    entropy = torch.zeros(logits.shape[0])
    for start in range(0, logits.shape[0], ENTROPY_CHUNK):
        entropy[start : start + ENTROPY_CHUNK] = entropy_eager(
            logits[start : start + ENTROPY_CHUNK].float(), torch.float32
        )
    return entropy


class EntropyCompiled(torch.autograd.Function):
    """entropy_from_logits under torch.compile: one pass over the logits, which alone are saved."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        result = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(logits, torch.empty_like(result))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0])


class _Narrowed(torch.autograd.Function):
    """torch.nested.narrow: a view, whose backward fills zeros around. logits: (batch, length, V)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.shape = logits.shape
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].new_empty(ctx.shape)


class _Together(torch.autograd.Function):
    """cat of unbind: a copy, (T, V). The backward of unbind keeps what was taken apart, and makes a nested tensor."""

    @staticmethod
    def forward(ctx: Any, nested: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(nested)
        return nested.new_empty(nested.shape[0] * nested.shape[1], nested.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0])


def unpadded(logits: torch.Tensor) -> torch.Tensor:
    """Without remove_padding the rows of logits that are no padding are copied out; all of them may be."""
    return _Together.apply(_Narrowed.apply(logits))  # type: ignore[no-any-return, no-untyped-call]


class FusedHead(torch.autograd.Function):
    """FusedLinearForPPO: head, log-probability and entropy in chunks of 512 tokens. One chunk stands for all.

    Its backward is outside of autocast, where weights in fp32 make its products of 32 bits, as verl's does.
    hidden: (1, T, size); weight: (V, size). Returns log-probabilities in fp32 and entropy in hidden's dtype, (T,) each.
    repeated: makes a context for what is done to one chunk, from the number of chunks that there are.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, repeated: Repeated = lambda _: nullcontext()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat = hidden.flatten(0, -2)
        out = torch.empty(flat.shape[0]), flat.new_empty(flat.shape[0])
        ctx.repeated = repeated
        with repeated(_chunks(flat)):
            logits = (flat[:FUSED_CHUNK] @ weight.t()) / 1.0
            logits = logits.to(torch.float32)
            probabilities = logits.softmax(-1)
            entropy = _LogSumExp.apply(logits) - torch.sum(probabilities * logits, -1)  # type: ignore[no-untyped-call]
            log_probs = logits.log_softmax(-1)
        ctx.save_for_backward(hidden, weight)
        del logits, probabilities, entropy, log_probs
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        flat = hidden.flatten(0, -2)
        d_hidden = torch.zeros_like(flat) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        with ctx.repeated(_chunks(flat)):
            logits = (flat[:FUSED_CHUNK] @ weight.t()) / 1.0
            logits = logits.to(torch.float32)
            probabilities = logits.softmax(-1)
            one_hot = torch.zeros_like(logits)
            d_logits = 0 + logits.new_empty(logits.shape[0]).unsqueeze(-1) * (one_hot - probabilities)
            d_logits = d_logits.to(hidden.dtype) / 1.0
            d_chunk, more = d_logits @ weight, d_logits.t() @ flat[:FUSED_CHUNK]
            if d_hidden is not None:
                d_hidden[:FUSED_CHUNK] += d_chunk
            if d_weight is not None:
                d_weight += more
        del logits, probabilities, one_hot, d_logits, d_chunk, more
        return (None if d_hidden is None else d_hidden.view(hidden.shape)), d_weight, None


Repeated = Callable[[Fraction], AbstractContextManager[None]]


def _chunks(flat: torch.Tensor) -> Fraction:
    return Fraction(len(flat), min(len(flat), FUSED_CHUNK))
