"""Log-probabilities of labels, against verl's own row-by-row function and torch's log_softmax."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from verl_shard.memory import losses
from verl_shard.verl_plugin import hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 5)])
@pytest.mark.parametrize("chunk", [1, 40, 2**24])
def test_values_and_gradients_are_verls(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...], chunk: int
) -> None:
    from verl.utils import torch_functional

    monkeypatch.setattr(losses, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(*shape, 11, generator=generator)).to(dtype)
    labels = torch.randint(0, 11, shape, generator=generator)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = hooks.log_probs_of_labels(ours, labels)
    # verl's function loops over the first dimension; torch's own is the truth for both.
    want = torch_functional.logprobs_from_logits_naive(theirs, labels)
    assert got.shape == shape
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    assert torch.allclose(got.float(), want.float(), atol=tolerance)
    got.float().sum().backward()
    want.float().sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.allclose(ours.grad.float(), theirs.grad.float(), atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 40, 2**24])
def test_entropies_and_their_gradients_are_verls(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int
) -> None:
    from verl.utils import torch_functional

    monkeypatch.setattr(losses, "CHUNK", chunk)
    logits = (5 * torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0))).to(dtype)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got, want = losses.entropy_of_logits(ours), torch_functional.entropy_from_logits(theirs)
    assert torch.equal(got, want)
    got.float().sum().backward()
    want.float().sum().backward()
    assert ours.grad is not None
    assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_engines_of_the_process_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.utils import torch_functional

    monkeypatch.setattr(torch_functional, "logprobs_from_logits_v2", None)
    monkeypatch.setattr(torch_functional, "entropy_from_logits", torch_functional.entropy_from_logits)
    compiled = SimpleNamespace(compute_entropy_from_logits=len)
    engine = SimpleNamespace(compute_entropy_from_logits=torch_functional.entropy_from_logits)
    hooks.losses_in_chunks(compiled)
    hooks.losses_in_chunks(engine)
    assert compiled.compute_entropy_from_logits is len
    assert torch_functional.logprobs_from_logits_v2 is losses.log_probs_of_labels
    assert torch_functional.entropy_from_logits is losses.entropy_of_logits
