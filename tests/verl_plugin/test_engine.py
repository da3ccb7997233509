"""The engine in this process, against plain transformers and plain PyTorch. fp32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from runtime.fake_copies import FakeCopies
from tensordict import TensorDict
from tokenizers import Tokenizer, models
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry

from verl_shard.common.errors import ConfigError
from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE, ShardNotice
from verl_shard.planning.plan_file import write_plan
from verl_shard.runtime.offload import offload_of
from verl_shard.runtime.stream_model import stream_model
from verl_shard.verl_plugin import engine as module
from verl_shard.verl_plugin import engine_batches
from verl_shard.verl_plugin.config import DeviceMapEngineConfig
from verl_shard.verl_plugin.engine import ENGINES, DeviceMapEngine, resolve_precision

SEQUENCES = [[5, 9, 3, 44, 17, 8], [7, 7, 21], [90, 4, 55, 31, 12, 6, 80, 11], [64, 2]]


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one test are not found by the next."""
    monkeypatch.setattr(module, "ENGINES", ENGINES)
    ENGINES.clear()


@pytest.fixture(params=["qwen2", "llama"])
def folder(request: pytest.FixtureRequest, small_config: Callable[..., Any], tmp_path: Path) -> Path:
    """A random causal language model and a tokenizer, saved as people save one."""
    path = tmp_path / "model"
    torch.manual_seed(0)
    config = small_config(request.param, tie_word_embeddings=request.param == "qwen2")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(128)}, unk_token="t3"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t2").save_pretrained(path)
    return path


def _engine(
    folder: Path,
    kind: str = "language_model",
    *,
    lr: float = 1e-2,
    checkpoint: list[str] | None = None,
    model: Any = (),
    **engine: Any,
) -> Any:
    options = {
        "enable_gradient_checkpointing": False,
        "override_config": {"attn_implementation": "sdpa"},
        **dict(model),
    }
    model_config = HFModelConfig(path=str(folder), model_type=kind, **options)
    contents = ["model", "optimizer", "extra"] if checkpoint is None else checkpoint
    made = EngineRegistry.new(
        model_type=kind,
        backend="device_map",
        model_config=model_config,
        engine_config=DeviceMapEngineConfig(**engine),
        optimizer_config=FSDPOptimizerConfig(
            lr=lr, total_training_steps=10, lr_warmup_steps=0, weight_decay=0.1, clip_grad=1.0
        ),
        checkpoint_config=CheckpointConfig(save_contents=contents, load_contents=contents),
    )
    made.initialize()
    return made


def _batch(micro: int = 2, *, packed: bool = False, temperature: float = 1.0, **more: Any) -> TensorDict:
    def nested(rows: list[Any]) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    tensors = {
        "input_ids": nested(SEQUENCES),
        "position_ids": nested([list(range(len(row))) for row in SEQUENCES]),
        "loss_mask": nested([[1] * len(row) for row in SEQUENCES]),
    }
    data = tu.get_tensordict(tensors)
    tu.assign_non_tensor(
        data, use_dynamic_bsz=False, micro_batch_size_per_gpu=micro, use_remove_padding=packed, temperature=temperature,
        pad_token_id=0, use_fused_kernels=False, **more,
    )  # fmt: skip
    return data


def _plain_log_probs(model: Any, temperature: float = 1.0) -> list[torch.Tensor]:
    """For each sequence the log-probability of its second to last token: a forward of each alone."""
    result = []
    for row in SEQUENCES:
        logits = model(torch.tensor([row])).logits[0, :-1].float() / temperature
        result.append(torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0])
    return result


def _loss(
    model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A quarter of the sum over sequences of the mean negative log-probability."""
    del dp_group
    rows = model_output["log_probs"].unbind()
    assert len(rows) == len(data)
    return -sum(row[:-1].mean() for row in rows) / len(SEQUENCES), {"rows": len(rows)}


def _plain_loss(model: Any) -> torch.Tensor:
    loss = -sum(row.mean() for row in _plain_log_probs(model)) / len(SEQUENCES)
    assert isinstance(loss, torch.Tensor)
    return loss


def _close(ours: Any, theirs: Any, **tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, **(tolerance or {"atol": 2e-5, "rtol": 1e-4}))


def _infer(engine: Any, **batch: Any) -> list[torch.Tensor]:
    with engine.eval_mode():
        output = engine.infer_batch(_batch(**batch))
    return [row[:-1] for row in output["model_output"]["log_probs"].unbind()]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_log_probs_are_those_of_a_plain_forward(packed: bool, micro: int, folder: Path) -> None:
    engine = _engine(folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = _plain_log_probs(plain, 0.7)
    for ours, theirs in zip(_infer(engine, micro=micro, packed=packed, temperature=0.7), expected, strict=True):
        _close(ours, theirs)


def test_one_engine_is_known_by_its_role(folder: Path) -> None:
    engine = _engine(folder)
    assert {"actor": engine} == ENGINES
    assert isinstance(engine, DeviceMapEngine)
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}
    assert engine.module.hf_device_map == {"": "cpu"}
    assert all(parameter.requires_grad for parameter in engine.module.parameters())


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_steps_are_those_of_plain_pytorch(packed: bool, checkpointing: bool, folder: Path) -> None:
    engine = _engine(folder, model={"enable_gradient_checkpointing": checkpointing})
    assert engine.module.is_gradient_checkpointing is checkpointing
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = _plain_loss(plain)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        with engine.train_mode():
            output = engine.train_batch(_batch(packed=packed), _loss)
        assert sum(output["loss"]) == pytest.approx(loss.item(), rel=1e-4)
        assert float(output["metrics"]["grad_norm"]) == pytest.approx(norm.item(), rel=1e-3)
        assert output["metrics"]["rows"] == [2, 2]
    for name, value in engine.module.state_dict().items():
        # Adam divides by the gradient's size: where that is next to nothing, so is what fp32 says of its sign.
        assert (value - plain.state_dict()[name]).abs().mean() < 1e-5, name
        assert not torch.equal(value, before[name]), name


def _gradients(engine: Any, batch: TensorDict) -> dict[str, torch.Tensor]:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, _loss)
        # verl drops them at the end of the mode.
        return {name: parameter.grad.clone() for name, parameter in engine.module.named_parameters()}


def test_gradients_do_not_depend_on_checkpointing_and_micro_batches(folder: Path) -> None:
    gradients = []
    for checkpointing, micro, packed in ((False, 4, False), (True, 4, False), (True, 1, False), (True, 2, True)):
        engine = _engine(folder, model={"enable_gradient_checkpointing": checkpointing})
        gradients.append(_gradients(engine, _batch(micro, packed=packed)))
    for other in gradients[1:]:
        _close(other, gradients[0])


def test_gradients_are_those_of_autograd(folder: Path) -> None:
    ours = _gradients(_engine(folder), _batch())
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    _plain_loss(plain).backward()
    _close(ours, {name: parameter.grad for name, parameter in plain.named_parameters()})


def test_lora_trains_adapters_only(folder: Path) -> None:
    engine = _engine(folder, model={"lora_rank": 4, "lora_alpha": 8})
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        # Adapters begin with nothing.
        for ours, theirs in zip(_infer(engine), _plain_log_probs(plain), strict=True):
            _close(ours, theirs)
    for _ in range(2):
        with engine.train_mode():
            engine.train_batch(_batch(), _loss)
    changed = {name for name, value in engine.module.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    # verl's LoRA is on every linear layer but the head: 7 in each of 3 blocks, two matrices each.
    assert len(changed) == 42
    with engine.disable_adapter(), torch.no_grad():
        for ours, theirs in zip(_infer(engine), _plain_log_probs(plain), strict=True):
            _close(ours, theirs)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_value_engine_has_one_value_for_each_token(packed: bool, folder: Path) -> None:
    engine = _engine(folder, "value_model", role="critic")
    with engine.eval_mode():
        values = engine.infer_batch(_batch(packed=packed))["model_output"]["values"].unbind()
    assert [len(row) for row in values] == [len(row) for row in SEQUENCES]
    body = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    head = engine.module.score
    assert (head.weight.shape, ENGINES) == ((1, 32), {"critic": engine})
    with torch.no_grad():
        for ours, row in zip(values, SEQUENCES, strict=True):
            hidden = body(torch.tensor([row])).last_hidden_state[0]
            theirs = hidden @ head.weight[0] + (head.bias[0] if head.bias is not None else 0.0)
            _close(ours, theirs)


def _value_loss(
    model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    del data, dp_group
    return sum(((row - 1) ** 2).mean() for row in model_output["values"].unbind()) / len(SEQUENCES), {}  # type: ignore[return-value]


def test_the_value_engine_learns(folder: Path) -> None:
    engine = _engine(folder, "value_model", role="critic")
    losses = []
    for _ in range(15):
        with engine.train_mode():
            losses.append(sum(engine.train_batch(_batch(), _value_loss)["loss"]))
    assert losses[-1] < 0.2 * losses[0]


def test_new_weights_come_from_the_seed_and_nothing_else(folder: Path) -> None:
    def head(seed: int) -> torch.Tensor:
        weight: torch.Tensor = _engine(folder, "value_model", role="critic", seed=seed).module.score.weight
        return weight.detach()

    torch.manual_seed(1)
    first = head(3)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(head(3), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(head(4), first)
    assert float(first.std()) > 0


def test_a_checkpoint_brings_everything_back(folder: Path, tmp_path: Path) -> None:
    def steps(engine: Any, count: int) -> None:
        for _ in range(count):
            with engine.train_mode():
                engine.train_batch(_batch(), _loss)
            engine.lr_scheduler_step()

    straight = _engine(folder)
    steps(straight, 2)
    straight.save_checkpoint(str(tmp_path / "saved"), global_step=2)
    saved = {name: value.clone() for name, value in straight.module.state_dict().items()}
    drawn = torch.rand(3)
    steps(straight, 2)

    resumed = _engine(folder)
    torch.manual_seed(99)
    resumed.load_checkpoint(str(tmp_path / "saved"), del_local_after_load=False)
    assert torch.equal(torch.rand(3), drawn)
    for name, value in resumed.module.state_dict().items():
        assert torch.equal(value, saved[name]), name
    steps(resumed, 2)
    for name, value in resumed.module.state_dict().items():
        assert torch.equal(value, straight.module.state_dict()[name]), name


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    engine = _engine(folder)
    engine.save_checkpoint(str(tmp_path / "saved"), global_step=1)
    (file,) = (tmp_path / "saved").glob("model_world_size_1_rank_0.pt")
    state = torch.load(file, weights_only=False)
    state.pop(next(iter(state)))
    torch.save(state, file)
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.load_checkpoint(str(tmp_path / "saved"), del_local_after_load=False)


def test_the_weights_are_given_out_as_they_are(folder: Path) -> None:
    engine = _engine(folder)
    pairs, peft_config = engine.get_per_tensor_param()
    given = dict(pairs)
    assert peft_config is None
    assert given.keys() == engine.module.state_dict().keys()
    parameters = dict(engine.module.named_parameters())
    for name, value in given.items():
        assert not value.requires_grad
        if name in parameters:
            assert value.data_ptr() == parameters[name].data_ptr()


def test_moving_it_does_nothing(folder: Path) -> None:
    engine = _engine(folder)
    engine.to("meta")
    assert {parameter.device.type for parameter in engine.module.parameters()} == {"cpu"}


def test_the_plan_says_where_and_how(folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    write_plan(plan, {"ref": {"device_map": {"": "cpu"}, "precision": "bf16"}, "critic": {"device_map": "balanced"}})
    ref = _engine(folder, role="ref", forward_only=True, plan=str(plan), device_map="balanced")
    assert {parameter.dtype for parameter in ref.module.parameters()} == {torch.bfloat16}
    assert (ref.optimizer, ref._autocast_dtype) == (None, torch.bfloat16)
    with pytest.raises(ConfigError, match="= actor: it plans ref, critic"):
        _engine(folder, role="actor", plan=str(plan))


def test_a_run_that_is_not_as_planned_is_refused_with_what_to_set(folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    settings = {"gradient_checkpointing": True, "optimizer": "adamw-fused", "lora_rank": 8, "logits": "full"}
    write_plan(plan, {"actor": {"device_map": "balanced", "settings": settings}})
    with pytest.raises(ConfigError) as caught:
        _engine(folder, role="actor", plan=str(plan))
    found = {finding.where: finding.fix for finding in caught.value.findings}
    assert set(found) == {"actor.gradient_checkpointing", "actor.optimizer", "actor.lora_rank"}
    assert "actor_rollout_ref.model.enable_gradient_checkpointing=true" in found["actor.gradient_checkpointing"]
    assert "override_optimizer_config.fused=true" in found["actor.optimizer"]
    write_plan(plan, {"ref": {"device_map": "balanced", "settings": {"offload": "stream"}}})
    with pytest.raises(ConfigError, match=r"ref\.offload = cpu_offload: the plan has stream"):
        _engine(folder, role="ref", forward_only=True, plan=str(plan), offload="cpu_offload")


@pytest.mark.parametrize("how", ["plan", "setting"])
def test_a_ref_that_streams_its_weights_scores_the_same(how: str, folder: Path, tmp_path: Path) -> None:
    """On the CPU, with copies that arrive as late as they may; and without a GPU it is said that nothing is offloaded."""
    write_plan(tmp_path / "plan.yaml", {"ref": {"device_map": "balanced", "settings": {"offload": "stream"}}})
    asked = {"plan": {"plan": str(tmp_path / "plan.yaml")}, "setting": {"offload": "stream"}}[how]
    with pytest.warns(ShardNotice, match="offload = stream: it computes on the CPU"):
        engine = _engine(folder, role="ref", forward_only=True, **asked)
    expected = _infer(engine)
    told = offload_of(engine.module)
    assert told is not None
    assert told.streamed is None
    copies = FakeCopies()
    streamed = stream_model(engine.module, {"": copies.device}, copies=lambda _: copies)
    for mine, theirs in zip(_infer(engine), expected, strict=True):
        assert torch.equal(mine, theirs)
    layers = engine.module.model.layers
    assert streamed.pinned_bytes >= sum(p.nbytes for p in layers.parameters())
    assert len([entry for entry in copies.log if entry[0] == "copy"]) == 2 * len(layers)  # two micro-batches


@pytest.mark.parametrize(("role", "offload"), [("actor", "stream"), ("critic", "auto"), ("ref", "disk")])
def test_ways_to_offload_that_are_refused(role: str, offload: str) -> None:
    with pytest.raises(ConfigError, match=rf"{role}\.device_map\.offload = {offload}"):
        DeviceMapEngineConfig(role=role, offload=offload)


def test_a_plan_that_offloads_a_trainable_role_is_refused(folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    offloaded = {"model.embed_tokens": 0, "model.layers": "cpu", "model.norm": 0, "lm_head": 0}
    write_plan(plan, {"actor": {"device_map": offloaded}})
    with pytest.raises(ConfigError, match=r"^actor\.device_map\.device_map = model\.layers -> cpu"):
        _engine(folder, role="actor", plan=str(plan))
    assert ENGINES == {}


@pytest.mark.parametrize(
    ("precision", "weights", "computes"),
    [
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("fp32", torch.float32, torch.float32),
    ],
)
def test_precisions(precision: str, weights: torch.dtype, computes: torch.dtype, folder: Path) -> None:
    engine = _engine(folder, precision=precision)
    assert {parameter.dtype for parameter in engine.module.parameters()} == {weights}
    with engine.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (torch.float32 if precision == "fp32" else computes)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for ours, theirs in zip(_infer(engine), _plain_log_probs(plain), strict=True):
            _close(ours.float(), theirs, atol=2e-5 if precision == "fp32" else 0.05, rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "forward_only", "device", "meant"),
    [
        (None, False, "cuda", "bf16-mixed"), (None, True, "cuda", "bf16"),
        (None, False, "cpu", "fp32"), (None, True, "cpu", "fp32"),
        ("bf16", False, "cuda", "bf16"), ("fp32", True, "cuda", "fp32"), ("bf16-mixed", True, "cpu", "bf16-mixed"),
    ],
)  # fmt: skip
def test_the_precision_that_is_meant(given: str | None, forward_only: bool, device: str, meant: str) -> None:
    assert resolve_precision(given, forward_only=forward_only, device=device) == meant


def test_the_first_process_writes_for_all_and_all_read_the_same(folder: Path, tmp_path: Path) -> None:
    engine = _engine(folder)
    with engine.train_mode():
        engine.train_batch(_batch(), _loss)
    trained = {name: value.clone() for name, value in engine.module.state_dict().items()}
    manager = engine.checkpoint_manager
    manager.rank, manager.world_size = 1, 2
    engine.save_checkpoint(str(tmp_path / "second"))
    assert list((tmp_path / "second").rglob("*.pt")) == []
    manager.rank = 0
    engine.save_checkpoint(str(tmp_path / "first"))
    assert {path.name for path in (tmp_path / "first").glob("*.pt")} == {
        f"{kind}_world_size_1_rank_0.pt" for kind in ("model", "optim", "extra_state")
    }
    with engine.train_mode():
        engine.train_batch(_batch(), _loss)
    manager.rank = 1
    engine.load_checkpoint(str(tmp_path / "first"), del_local_after_load=False)
    assert all(torch.equal(trained[name], value) for name, value in engine.module.state_dict().items())
    assert (manager.rank, manager.world_size) == (1, 2), "it is as it was"


def test_a_plan_may_name_another_reference(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(9)
    other = tmp_path / "other"
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(other)
    entry = {"device_map": {"": "cpu"}, "precision": "fp32", "model": str(other), "attn_implementation": "eager"}
    write_plan(tmp_path / "plan.yaml", {"ref": entry})
    engine = _engine(folder, role="ref", forward_only=True, plan=str(tmp_path / "plan.yaml"))
    assert engine.module.config._attn_implementation == "eager"
    for ours, theirs in zip(_infer(engine), _plain_log_probs(model.eval()), strict=True):
        _close(ours, theirs)


def test_each_pass_is_in_the_memory_record(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    actor, critic = _engine(folder), _engine(folder, "value_model", role="critic")
    actor.step = 7
    _infer(actor)
    with critic.train_mode():
        critic.train_batch(_batch(), _value_loss)
    lines = list(read_json_lines(tmp_path / "memory.jsonl"))
    assert [(line["role"], line["phase"], line["step"]) for line in lines] == [
        ("actor", "forward", 7), ("critic", "train", 7),
    ]  # fmt: skip


@pytest.mark.parametrize("apart", [False, True])
def test_labels_travel_to_the_logits(apart: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between devices only. "cpu:0" is another device than "cpu" to torch, where everything works all the same."""
    engine = _engine(folder)
    expected = _infer(engine)
    where = torch.device("cpu", 0) if apart else torch.device("cpu")
    monkeypatch.setattr(engine_batches.hooks, "output_device", lambda output: where)
    moved: list[bool] = []
    original = engine_batches.sent

    def sent(data: Any, device: torch.device) -> Any:
        assert device == where
        made = original(data, device)
        moved.append(made is not data)
        return made

    monkeypatch.setattr(engine_batches, "sent", sent)
    found = _infer(engine, micro=4)
    assert moved == [apart]
    _close(found, expected)


def test_rollout_and_training_share_one_module(folder: Path) -> None:
    from verl_shard.verl_plugin.rollout.adapter import generate_in_worker
    from verl_shard.verl_plugin.rollout.generate import Sampling

    greedy = Sampling(6, temperature=0.0)
    with pytest.raises(ConfigError, match="no device_map actor"):
        generate_in_worker(None, [[5]], [0], greedy, 0, [2])
    engine = _engine(folder, lr=0.05)
    for _ in range(3):
        with engine.train_mode():
            engine.train_batch(_batch(), _loss)
    prompts = [[5, 9, 3], [7]]
    responses = generate_in_worker(None, prompts, [0, 1], greedy, 0, [2])
    trained = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    trained.load_state_dict(engine.module.state_dict())
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([prompt])
        expected = trained.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)[0]
        assert response.token_ids == expected[len(prompt) :].tolist()
