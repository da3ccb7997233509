"""Logits of responses only: PPO's gradients, log-probabilities and entropies are those of all logits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl_plugin.test_engine_batches import _engine, _group, _laid_out, _loss, folder  # noqa: F401

from verl_shard.common.errors import ConfigError
from verl_shard.models.meta import makes_logits_to_keep
from verl_shard.verl_plugin import engine_logits
from verl_shard.verl_plugin.config import DeviceMapEngineConfig

PAIRS = ((3, 3), (1, 2), (4, 4), (1, 1), (2, 0), (5, 2), (1, 7), (3, 1))
LOSS = partial(
    ppo_loss, config=ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.1)
)


def _batch(pairs: Any = PAIRS, **settings: Any) -> TensorDict:
    torch.manual_seed(5)

    def nested(sizes: Any, make: Any) -> torch.Tensor:
        return torch.nested.nested_tensor([make(size) for size in sizes], layout=torch.jagged)

    prompts, responses = zip(*pairs, strict=True)
    whole = [sum(pair) for pair in pairs]
    ids = nested(whole, lambda n: torch.randint(3, 128, (n,)))
    tensors = {
        "input_ids": ids, "position_ids": nested(whole, torch.arange),
        "prompts": nested(prompts, torch.zeros), "responses": nested(responses, torch.zeros),
        "loss_mask": nested(whole, torch.ones), "response_mask": nested(responses, torch.ones),
        "old_log_probs": nested(responses, lambda n: torch.rand(n) - 5), "advantages": nested(responses, torch.randn),
    }  # fmt: skip
    data = tu.get_tensordict(tensors)
    options = {
        "use_dynamic_bsz": False, "use_remove_padding": False, "temperature": 0.9, "pad_token_id": 0,
        "use_fused_kernels": False, "calculate_entropy": True, "micro_batch_size_per_gpu": 2,
        "global_batch_size": len(pairs),
    }  # fmt: skip
    tu.assign_non_tensor(data, **{**options, **settings})
    return data


def _update(engine: Any, batch: TensorDict, loss: Any = LOSS) -> tuple[dict[str, torch.Tensor], Any]:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        made = engine.forward_backward_batch(batch, loss)
        return {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}, made


def _made(engine: Any) -> list[int]:
    """Fills as forwards go: the logits of each, in tokens."""
    seen: list[int] = []
    engine.module.get_output_embeddings().register_forward_hook(
        lambda m, i, out: seen.append(out.shape[0] * out.shape[1])
    )
    return seen


@pytest.mark.parametrize("two_devices", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_what_ppo_reads_is_the_same(packed: bool, two_devices: bool, folder: Path) -> None:  # noqa: F811
    all_of, engine = _engine(folder, logits="full"), _engine(folder)
    links = _laid_out(engine) if two_devices else None
    counts = _made(all_of), _made(engine)
    expected, plain = _update(all_of, _batch(use_remove_padding=packed))
    if links is None:
        found, ours = _update(engine, _batch(use_remove_padding=packed))
    else:
        with links:
            found, ours = _update(engine, _batch(use_remove_padding=packed))
    assert found.keys() == expected.keys()
    assert max((found[name] - expected[name]).abs().max().item() for name in found) < 1e-6
    assert ours["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    assert ours["metrics"].keys() == plain["metrics"].keys()
    # Two sequences each, in their order. Packed: the responses' tokens. Padded: a rectangle from the first prompt's last
    # token to the last token but one, rows x columns, of (3, 3) and (1, 2): 2 x 5 of 2 x 6.
    if packed:
        assert counts == ([9, 10, 9, 12], [5, 5, 2, 8])
    else:
        assert counts == ([12, 16, 14, 16], [10, 14, 4, 14])

    batch = _batch(use_remove_padding=packed)
    with all_of.eval_mode():
        expected_output = all_of.infer_batch(batch)["model_output"]
    with engine.eval_mode():
        if links is None:
            output = engine.infer_batch(batch)["model_output"]
        else:
            with links:
                output = engine.infer_batch(_batch(use_remove_padding=packed))["model_output"]
    assert output.keys() == expected_output.keys() == {"log_probs", "entropy"}
    for name, values in output.items():
        for row, other, (prompt, response) in zip(values.unbind(), expected_output[name].unbind(), PAIRS, strict=True):
            assert len(row) == len(other) == prompt + response
            torch.testing.assert_close(row[prompt - 1 : -1], other[prompt - 1 : -1], atol=1e-5, rtol=1e-5)
            assert not row[: prompt - 1].any()
            assert not row[-1:].any()


def test_no_device_is_waited_for(folder: Path) -> None:  # noqa: F811
    engine, batch = _engine(folder), _batch()
    links = _laid_out(engine)
    with links, engine.eval_mode():
        engine.infer_batch(batch)
    assert links.waits == []


def test_who_reads_more_gets_all(folder: Path) -> None:  # noqa: F811
    engine = _engine(folder)
    seen = _made(engine)
    _update(engine, _batch(), _loss)  # a loss of the project's own: of all tokens
    assert seen == [12, 16, 14, 16]
    seen.clear()
    with engine.eval_mode():
        engine.infer_batch(_batch(distillation_use_topk=False))
    assert seen == [10, 14, 4, 14]
    seen.clear()
    without = _batch().exclude("prompts", "responses")
    with engine.eval_mode():
        engine.infer_batch(without)
    assert seen == [12, 16, 14, 16]
    assert not engine_logits.only_responses(_batch(distillation_only=True), None)
    assert not engine_logits.only_responses(_batch(distillation_use_topk=True), LOSS)


def test_a_model_that_does_not_mind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """It takes logits_to_keep and makes all."""
    expected, _ = _update(_engine(folder), _batch())
    engine = _engine(folder)
    own = engine.module.forward

    def forward(logits_to_keep: Any = 0, **inputs: Any) -> Any:
        return own(**inputs)

    monkeypatch.setattr(engine.module, "forward", forward)
    seen = _made(engine)
    found, _ = _update(engine, _batch())
    assert seen == [12, 16, 14, 16]
    assert max((found[name] - expected[name]).abs().max().item() for name in found) < 1e-6


def test_models_that_cannot(folder: Path) -> None:  # noqa: F811
    assert makes_logits_to_keep(_engine(folder).module)
    assert not makes_logits_to_keep(_engine(folder, "value_model").module)
    encoder = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=32,
        is_decoder=False,
    )
    assert not makes_logits_to_keep(transformers.BertForMaskedLM(encoder))

    class Others(transformers.LlamaForCausalLM):
        """Whatever it means by the argument."""

    small = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32
    )
    assert not makes_logits_to_keep(Others(small))


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5), st.booleans())
def test_places(pairs: list[tuple[int, int]], packed: bool) -> None:
    """By a walk over tokens: each response's token is read from the one before it."""
    found = engine_logits.kept(pairs, packed=packed)
    if not any(response for _, response in pairs):
        assert found is None
        return
    assert found is not None
    tokens = [(row, column) for row, pair in enumerate(pairs) for column in range(sum(pair))]
    wanted = [n for n, (row, column) in enumerate(tokens) if pairs[row][0] - 1 <= column < sum(pairs[row]) - 1]
    assert found.places.tolist() == wanted
    assert found.ends.diff().tolist() == [response for _, response in pairs]
    assert found.n_tokens == len(tokens)
    if packed:
        assert isinstance(found.columns, torch.Tensor)
        assert (found.columns.tolist(), found.n_columns, found.rows) == (wanted, len(wanted), None)
        assert len(wanted) <= engine_logits.largest_share(pairs, packed=True) * len(tokens) + 1e-9
        return
    columns = range(max(map(sum, pairs)))[found.columns]
    assert len(columns) == found.n_columns <= engine_logits.largest_share(pairs, packed=False) * max(map(sum, pairs))
    made = [(row, column) for row in range(len(pairs)) for column in columns]
    read = made if found.rows is None else [made[int(n)] for n in found.rows]
    assert read == [tokens[n] for n in wanted]


def test_no_token_before_a_response() -> None:
    assert engine_logits.kept([(2, 3), (0, 2)], packed=True) is None


def test_choices() -> None:
    with pytest.raises(ConfigError, match=r"logits = fused: no such choice\. Use one of responses, full; fused is"):
        DeviceMapEngineConfig(logits="fused")
