"""What a GPU runs where the CPU, on which tensors without memory live, would run something else.

Three differences change memory, and each is put right here: fused attention, dropout's mask, and which operations
CUDA's autocast takes to fp32. The values do not matter, as nothing is computed; shapes, dtypes and what is saved for
the backward do.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import functional

_ROUND = 128
"""flash-attn works on lengths and head sizes rounded up to these (csrc/flash_attn/flash_api.cpp)."""


class _FusedAttention(torch.autograd.Function):
    """The memory of torch's flash kernel: saves q, k, v, the output and one fp32 log-sum-exp a row and head.

    The backward holds, while it runs, an fp32 accumulator of dq, one fp32 number a row and head, and with fewer heads
    in k and v than in q their gradients at the number of q's (ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
    With a mask torch takes its memory-efficient kernel, which saves the mask too.
    q: (batch, heads, length, head size); k, v: (batch, kv heads, length of keys, head size).
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        batch, heads, length, _ = q.shape
        out = _laid_out_as(q, v.shape[-1])
        lse = q.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse, *([] if mask is None else [mask]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        batch, heads, length, size = q.shape
        rounded = -(-length // _ROUND) * _ROUND
        dq, dk, dv = (_laid_out_as(t, t.shape[-1]) for t in (q, k, v))
        held = [
            q.new_empty(batch, heads, rounded, dtype=torch.float32),
            q.new_empty(batch, rounded, heads, -(-size // 32) * 32, dtype=torch.float32),
        ]
        if k.shape[1] != heads:
            held += [t.new_empty(batch, t.shape[2], heads, t.shape[3]) for t in (k, v)]
        del held
        return dq, dk, dv, None


class _Unpadded(torch.autograd.Function):
    """Tokens that are no padding, copied together, as many as there may be: what transformers' flash attention works on under
    a mask (modeling_flash_attention_utils.py, _upad_input). (batch, heads, length, size); so are gradients, where zeros stand
    for the padding."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _tokens_first(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _tokens_first(grads[0])


def _tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    batch, heads, length, size = tensor.shape
    return tensor.new_empty(batch, length, heads, size).transpose(1, 2)


def _laid_out_as(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """An empty (batch, heads, length, size) in the layout of `tensor`: tokens before heads in memory, or heads first.

    All kernels do so. A model whose rotary embedding leaves q heads first, as Phi-3's does, pays for another copy of
    the output, which its projection wants with tokens first; seen on an H200, where cuDNN's kernel runs.
    """
    batch, heads, length, _ = tensor.shape
    if tensor.stride(1) < tensor.stride(2) or tensor.transpose(1, 2).is_contiguous():
        return tensor.new_empty(batch, length, heads, size).transpose(1, 2)
    return tensor.new_empty(batch, heads, length, size)


def attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Of the two products of a causal-or-not attention, counted whole as torch's FlopCounter does."""
    batch, heads, length, size = q.shape
    return 2 * batch * heads * length * k.shape[2] * (size + v.shape[-1])


class _GroupedProduct(torch.autograd.Function):
    """The memory of torch's grouped_mm, which mixtures of experts run on: saves both operands, and makes one result.

    tokens: (tokens, columns), those of an expert together; weight: (experts, columns, rows). On tensors without memory
    torch's own takes bfloat16 only.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        return tokens.new_empty(tokens.shape[0], weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tokens, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            torch.empty_like(tokens) if wanted[0] else None,
            torch.empty_like(weight) if wanted[1] else None,  # laid out as the weight, transposed or not
        )


def _grouped_mm(on_product: Callable[[int], None]) -> Callable[..., torch.Tensor]:
    def grouped_mm(tokens: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        on_product(2 * tokens.shape[0] * weight.shape[-2] * weight.shape[-1])
        return _GroupedProduct.apply(tokens, weight)  # type: ignore[no-any-return, no-untyped-call]

    return grouped_mm


def _attention(on_attention: Callable[[int], None], unpads: bool) -> Callable[..., torch.Tensor]:
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (t.to(dtype) for t in (query, key, value))
        on_attention(attention_flops(query, key, value))
        if attn_mask is not None:
            attn_mask = _bias(attn_mask, query.dtype)
        if unpads:  # and back, which is a copy too
            query, key, value = (_Unpadded.apply(t) for t in (query, key, value))  # type: ignore[no-untyped-call]
            out = _FusedAttention.apply(query, key, value, None)  # type: ignore[no-untyped-call]
            return _Unpadded.apply(out)  # type: ignore[no-any-return, no-untyped-call]
        return _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-any-return, no-untyped-call]

    return scaled_dot_product_attention


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as the memory-efficient kernel takes it: numbers of the query's dtype, in rows of a multiple of 16 of them
    (aten/src/ATen/native/transformers/attention.cpp, convert_boolean_attn_mask and pad_bias)."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype))
    rest = -mask.shape[-1] % 16
    return functional.pad(mask, (0, rest)) if rest else mask


_cpu_dropout = functional.dropout


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """CUDA keeps one byte an element for the mask; the CPU one of the input's dtype."""
    if not training or p == 0.0 or inplace:
        return _cpu_dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _rand(func: Callable[..., Any]) -> Callable[..., Any]:
    """A single random number is drawn to decide whether to drop a layer; 1 drops none, and has a value to compare."""

    @functools.wraps(func)
    def rand(*size: Any, **kwargs: Any) -> Any:
        return torch.tensor(1.0) if size in ((), ([],), ((),)) else func(*size, **kwargs)

    return rand


def _in_fp32(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(_fp32(value) for value in args)
            kwargs = {name: _fp32(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    return wrapped


def _fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


# CUDA's autocast list of operations in fp32 (aten/src/ATen/autocast_mode.h, AT_FORALL_FP32).
_FP32_UNDER_AUTOCAST = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow",
    "softplus",
    "layer_norm",
    "group_norm",
    "cosine_similarity",
    "cosine_embedding_loss",
    "nll_loss",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "poisson_nll_loss",
    "cumprod",
    "cumsum",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "prod",
    "softmax",
    "log_softmax",
    "sum",
    "norm",
    "__pow__",
    "__rpow__",
]


def _nothing_padded(ignores: Callable[..., bool]) -> Callable[..., bool]:
    """Whether a mask can be left out, without looking into the padding: a tensor without memory has no values."""
    return lambda padding_mask=None, *args, **kwargs: ignores(None, *args, **kwargs)


def _sequence_of_each_token(position_ids: torch.Tensor) -> torch.Tensor:
    """transformers' find_packed_sequence_indices, without the look at whether there is but one."""
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def _always(value: object) -> Callable[..., object]:
    return lambda *_, **__: value


def _restore(value: Any) -> Callable[[Any, str], None]:
    return lambda place, name: setattr(place, name, value)


_one_at_a_time = threading.RLock()


@contextmanager
def as_on_gpu(
    on_attention: Callable[[int], None],
    on_product: Callable[[int], None],
    *,
    in_every_thread: bool = False,
    padded: bool = False,
    packed: bool = False,
    unpads: bool = False,
    unmasked: bool = False,
) -> Iterator[None]:
    """While it is on, attention, dropout and autocast have a GPU's memory, and transformers masks as on a GPU.

    transformers takes tensors without memory for tracing and then makes masks of (length x length), where on a GPU
    the kernel is only told that it is causal. Functions are replaced by name, for this thread, and put back; a
    TorchFunctionMode would be off in what gradient checkpointing computes again, and slow everything down.
    on_attention and on_product are told the FLOPs of the forward of each fused attention and grouped product.
    padded: some sequence of a batch is shorter than the others, so that no mask can be left out.
    packed: a row holds several sequences, which a mask keeps apart.
    unpads: attention copies out what is no padding, and its output back, as flash_attention_2 does under a mask.
    unmasked: the kernel is told all that a mask of (length x length) would say, a window too, as flash_attention_2 is.
    in_every_thread: for a backward in threads of its own, as torch has them for every device but the CPU.
    """
    import transformers.masking_utils as masks

    with _one_at_a_time, ExitStack() as stack:
        here = threading.get_ident()

        def replace(place: Any, name: str, value: Any) -> None:
            own, real = vars(place).get(name), getattr(place, name)

            @functools.wraps(real, updated=())
            def in_this_thread(*args: Any, **kwargs: Any) -> Any:
                mine = in_every_thread or threading.get_ident() == here
                return (value if mine else real)(*args, **kwargs)

            stack.callback(delattr if own is None else _restore(own), place, name)
            setattr(place, name, in_this_thread)

        replace(functional, "scaled_dot_product_attention", _attention(on_attention, unpads))
        replace(functional, "dropout", _dropout)
        replace(torch, "rand", _rand(torch.rand))
        for place, name in ((functional, "grouped_mm"), (torch, "_grouped_mm")):
            if hasattr(place, name):
                replace(place, name, _grouped_mm(on_product))
        for name in _FP32_UNDER_AUTOCAST:
            for home in (torch, torch.Tensor, functional):
                if hasattr(home, name):
                    replace(home, name, _in_fp32(getattr(home, name)))
        for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
            if hasattr(masks, name):
                ignores = _always(False) if padded else _nothing_padded(getattr(masks, name))
                replace(masks, name, _always(True) if unmasked else ignores)
        found = _sequence_of_each_token if packed else _always(None)
        for name, value in (("is_tracing", _always(False)), ("find_packed_sequence_indices", found)):
            if hasattr(masks, name):
                replace(masks, name, value)
        yield
