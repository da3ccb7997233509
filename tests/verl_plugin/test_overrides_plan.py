"""Plans as overrides: composed with verl's own Hydra tree, validated by verl, and turned into its dataclasses."""

from __future__ import annotations

import pickle
import shlex
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import omegaconf.base
import pytest
import transformers
import verl
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from shapes import small_qwen2
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, RolloutConfig

from verl_shard.common.errors import ConfigError
from verl_shard.common.notices import ShardNotice
from verl_shard.config.inventory import Inventory
from verl_shard.config.workload import Workload
from verl_shard.planning.build import build_plan
from verl_shard.planning.plan import Plan, PlannedRole
from verl_shard.verl_plugin import search_path
from verl_shard.verl_plugin.config import DeviceMapActorConfig, DeviceMapCriticConfig
from verl_shard.verl_plugin.overrides_plan import PAIRS, to_verl_overrides, verl_command
from verl_shard.verl_plugin.reward.settings import find_faults as reward_faults
from verl_shard.verl_plugin.trainer_config import find_faults

A, M, RO, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout", "ref"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder with a tokenizer, which verl reads where there is a critic."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("a model")
    small_qwen2(architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(64)}, unk_token="t3"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t2").save_pretrained(folder)
    return str(folder)


APART = ("profiler", "checkpoint", "multi_turn", "trace", "qat", "turbo_config")
"""Sections that no plan sets, in every role; the test with Hydra itself has them."""


@pytest.fixture(scope="module")
def trees() -> Iterator[Callable[[str], Any]]:
    """verl's configuration by engine, pickled, before any other override and without APART."""
    search_path.register()
    made = {}
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        for engine in ("dp", "device_map"):
            config = compose("ppo_trainer", overrides=[f"model_engine={engine}"])
            OmegaConf.set_struct(config, False)
            parts = [*config.actor_rollout_ref.values(), config.critic, config.reward.reward_model.rollout]
            for part in [p for p in parts if OmegaConf.is_config(p)]:
                for name in APART:
                    for held in (part, *(part[own] for own in ("fsdp_config", "fsdp") if own in part)):
                        held.pop(name, None)
            OmegaConf.set_struct(config, True)
            made[engine] = pickle.dumps(config)
    with pytest.MonkeyPatch.context() as patch:
        # An interpolation is parsed whenever it is read, which would be most of the time here.
        patch.setattr(omegaconf.base, "parse", cache(omegaconf.base.parse))
        yield lambda engine: pickle.loads(made[engine])


@cache
def parsed(text: str) -> Any:
    return OverridesParser.create().parse_override(text)


def composed(trees: Callable[[str], Any], overrides: list[str]) -> Any:
    """What Hydra makes of the overrides: its own function on its own tree, which is not read again for every plan."""
    ours = "model_engine=device_map" in overrides
    config = trees("device_map" if ours else "dp")
    rest = [parsed(text) for text in overrides if not text.startswith("model_engine=")]
    ConfigLoaderImpl._apply_overrides_to_config(rest, config)
    return config


def planned(model: str, workload: Workload, n_gpus: int, n_nodes: int, backend: str, roles: dict[str, Any]) -> Plan:
    """A plan with these settings; what a plan knows of memory and time says nothing to verl."""
    on_ours = backend == "device_map"
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.layers.3", "model.norm"]
    made = {}
    for role, own in roles.items():
        held = on_ours and role != "rollout"
        head = {"critic": "score", "reward": "score"}.get(role, "lm_head")
        made[role] = PlannedRole(
            model=model, n_params=1000, devices=tuple(range(n_gpus)), precision=own["precision"], settings=own, chosen=(),
            device_map={name: i % n_gpus for i, name in enumerate([*names, head])} if held else None,
        )  # fmt: skip
    inventory = Inventory.declared(n_gpus, card="a100-80g", n_nodes=n_nodes)
    return Plan(
        backend=backend, inventory=inventory, workload=workload, roles=made, phases=(), limits={}, fits=True, step_seconds=1.0,
    )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """(rollout, arguments of `planned`) for plans that verl can run."""
    backend = draw(st.sampled_from(list(PAIRS)))
    rollout = draw(st.sampled_from(PAIRS[backend]))
    stock = backend != "device_map"
    nodes = draw(st.sampled_from([1, 2])) if stock else 1
    gpus = nodes * draw(st.sampled_from([1, 2, 4, 8]))
    ranks = gpus if stock else 1
    n = draw(st.sampled_from([1, 2, 5]))
    mini = ranks * draw(st.sampled_from([1, 3, 8]))
    batch = mini * draw(st.integers(1, 4))
    per_rank = mini * n // ranks
    algorithm = draw(st.sampled_from(["ppo", "gae", "grpo", "rloo", "reinforce_plus_plus"]))
    workload = Workload(
        algorithm=algorithm, train_batch_size=batch, n=n, prompt_length=draw(st.integers(8, 4096)),
        response_length=draw(st.integers(8, 4096)), ppo_mini_batch_size=draw(st.sampled_from([mini, None])),
        ppo_epochs=draw(st.integers(1, 3)), kl=draw(st.sampled_from(["none", "loss", "reward"])),
        remove_padding=draw(st.booleans()),
    )  # fmt: skip
    size = st.sampled_from([d for d in range(1, per_rank + 1) if per_rank % d == 0])
    flash = draw(st.sampled_from(["flash_attention_2", "sdpa"]))
    logits = draw(st.sampled_from(["full", "fused", "chunked" if stock else "responses"]))
    # Of vLLM verl asks which adapters it takes, and it is not installed here.
    lora = draw(st.sampled_from([0, 16])) if rollout != "vllm" else 0

    def trained(attention: str) -> dict[str, Any]:
        made = {
            "precision": draw(st.sampled_from(["bf16-mixed", "bf16", "fp32"])),
            "optimizer": draw(st.sampled_from(["adamw", "adamw-fused", "sgd"])), "attn_implementation": attention,
            "gradient_checkpointing": draw(st.booleans()), "micro_batch_size": draw(size),
        }  # fmt: skip
        if not stock:
            made["in_flight"] = draw(st.sampled_from([1, 2]))
        if stock:
            policy = backend == "fsdp2" and draw(st.booleans())
            made |= {
                "offload_policy": policy, "param_offload": not policy and draw(st.booleans()),
                "optimizer_offload": not policy and draw(st.booleans()),
            }  # fmt: skip
        return made

    engine = (
        {"tensor_parallel_size": 1, "gpu_memory_utilization": draw(st.sampled_from([0.3, 0.5, 0.9]))} if stock else {}
    )
    served = {"precision": "bf16", **engine}
    if not stock:
        served["micro_batch_size"] = 7
    roles = {"actor": {**trained(flash), "logits": logits, "lora_rank": lora}, "rollout": dict(served)}
    if stock:
        roles["rollout"]["tensor_parallel_size"] = draw(st.sampled_from([d for d in (1, 2, 4) if gpus % d == 0]))
    if workload.has_critic:
        roles["critic"] = trained("flash_attention_2" if stock else flash)
    if workload.kl != "none":
        roles["ref"] = {
            "precision": draw(st.sampled_from(["bf16", "fp32"])), "attn_implementation": flash, "micro_batch_size": draw(size),
            "logits": logits, "offload": "none" if stock else draw(st.sampled_from(["none", "stream"])),
        }  # fmt: skip
    if draw(st.booleans()):
        roles["reward"] = dict(served)
    return rollout, {"workload": workload, "n_gpus": gpus, "n_nodes": nodes, "backend": backend, "roles": roles}


SEEN: dict[tuple[str, ...], Any] = {}


def dataclasses_of(config: Any, overrides: list[str]) -> tuple[Any, Any, Any]:
    """(ref, rollout, reward's rollout) as verl's workers make them; equal sections are converted once."""

    def once(place: str, depends: tuple[str, ...], change: Callable[[Any], None] = lambda section: None) -> Any:
        key = (place, *(text for text in overrides if any(part in text for part in depends)))
        if key not in SEEN:
            section = OmegaConf.create(OmegaConf.to_container(OmegaConf.select(config, place), resolve=True))
            change(section)
            SEEN[key] = omega_conf_to_dataclass(section)
        return SEEN[key]

    def as_the_worker(section: Any) -> None:  # engine_workers.py, before it reads the ref's section
        for old, new in (
            ("log_prob_micro_batch_size", "ppo_micro_batch_size"), ("log_prob_use_dynamic_bsz", "use_dynamic_bsz"),
            ("log_prob_micro_batch_size_per_gpu", "ppo_micro_batch_size_per_gpu"),
            ("log_prob_max_token_len_per_gpu", "ppo_max_token_len_per_gpu"),
        ):  # fmt: skip
            section[new] = section.pop(old, None)

    lacks_ref = not (config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)
    ref = None if lacks_ref else once(REF, (REF, f"{A}.", f"{RO}.n=", "model_engine"), as_the_worker)
    rollout = once(RO, (RO, f"{A}.ppo", "data."))
    served = once("reward.reward_model.rollout", ("reward.",)) if config.reward.reward_model.enable else None
    return ref, rollout, served


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    database=None,
)
@given(drawn=plans())
def test_every_plan_is_taken_by_verl(drawn: Any, trees: Callable[[str], Any], model: str) -> None:
    rollout, fields = drawn
    plan = planned(model, **fields)
    overrides = to_verl_overrides(plan, rollout=rollout)
    config = composed(trees, overrides)
    w, roles, ours = plan.workload, plan.roles, plan.backend == "device_map"

    if ours:
        assert list(find_faults(config)) == []
        for role, section in (("actor", config.actor_rollout_ref.actor), ("critic", config.critic)):
            if role in roles:
                asked, engine = roles[role].settings, section.device_map
                assert engine.in_flight == (asked["in_flight"] if asked["in_flight"] > 1 else "auto")
                assert engine.logits == ("full" if asked.get("logits") == "full" else "responses")
    if rollout == "hf" and "reward" in roles:
        assert list(reward_faults(config)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # verl reads the critic's tokenizer from its folder; once is enough, in the test below.
        config.critic.model = None
        validate_config(config, use_reference_policy=w.kl != "none", use_critic=w.has_critic)
        ref, engine, served = dataclasses_of(config, overrides)

    # Down to the asserts of the workers.
    ranks = 1 if ours else len(plan.inventory)
    actor = config.actor_rollout_ref.actor
    mini = actor.ppo_mini_batch_size * w.n
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == ranks
    assert mini % ranks == 0
    assert w.sequences % mini == 0
    assert mini // ranks % actor.ppo_micro_batch_size_per_gpu == 0
    assert w.sequences // ranks % engine.log_prob_micro_batch_size_per_gpu == 0
    assert ranks % engine.tensor_model_parallel_size == 0
    assert actor.use_dynamic_bsz == engine.log_prob_use_dynamic_bsz
    assert (engine.name, engine.n) == (rollout, w.n)
    if "ref" in roles and not roles["actor"].settings["lora_rank"]:
        assert w.sequences // ranks % ref.ppo_micro_batch_size_per_gpu == 0
    assert (served is not None) == ("reward" in roles)


def test_hydra_itself_and_verls_whole_check_take_a_plan(model: str, tmp_path: Path) -> None:
    """Nothing left out: the command line as verl's main program composes it, and the critic's model folder."""
    search_path.register()
    for backend in PAIRS:
        plan = build_plan(
            {"actor": model, "reward": model}, gpus=2, gpu="a100-80g", backend=backend,
            workload={"train_batch_size": 8, "ppo_mini_batch_size": 4, "prompt_length": 16, "response_length": 16, "n": 2},
        )  # fmt: skip
        plan.save(tmp_path / "plan.yaml")
        with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
            config = compose("ppo_trainer", overrides=to_verl_overrides(plan, plan_file=tmp_path / "plan.yaml"))
        OmegaConf.resolve(config)
        validate_config(config, use_reference_policy=True, use_critic=True)
        critic, actor = omega_conf_to_dataclass(config.critic), omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        if backend == "device_map":
            assert (type(actor), type(critic)) == (DeviceMapActorConfig, DeviceMapCriticConfig)
            assert actor.engine.plan == critic.engine.plan == str(tmp_path / "plan.yaml")
        else:
            assert (type(actor), type(critic)) == (FSDPActorConfig, FSDPCriticConfig)
            assert (actor.engine.strategy, critic.engine.strategy) == (backend, backend)
            assert isinstance(omega_conf_to_dataclass(config.actor_rollout_ref.rollout), RolloutConfig)


SMALL = Workload(
    algorithm="ppo", train_batch_size=16, n=2, ppo_mini_batch_size=8, prompt_length=100, response_length=28, kl="loss"
)
TRAINED = {"precision": "bf16-mixed", "attn_implementation": "flash_attention_2", "micro_batch_size": 2}
SERVED = {"precision": "bf16", "tensor_parallel_size": 2, "gpu_memory_utilization": 0.4, "strategy": "sglang"}


def _stock(backend: str = "fsdp2", workload: Workload = SMALL, n_gpus: int = 4, **roles: Any) -> Plan:
    given: dict[str, Any] = {"actor": {}, "critic": {}, "ref": {}, "rollout": {}, **roles}
    first = {"rollout": SERVED, "reward": SERVED, "ref": {**TRAINED, "precision": "bf16"}}
    made = {role: {**first.get(role, TRAINED), **own} for role, own in given.items()}
    return planned("org/model", workload, n_gpus, 1, backend, made)


def test_what_a_plan_says_is_what_verl_is_told() -> None:
    plan = _stock(
        actor={
            "precision": "fp32", "param_offload": True, "logits": "fused", "optimizer": "adamw-fused",
            "gradient_checkpointing": True,
        },
        critic={"offload_policy": True, "micro_batch_size": 4, "optimizer": "sgd", "precision": "bf16"},
        ref={"micro_batch_size": 8, "logits": "fused"}, reward={"tensor_parallel_size": 4},
    )  # fmt: skip
    made = to_verl_overrides(plan)
    for line in (
        "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=false", f"{A}.use_kl_loss=true",
        "data.train_batch_size=16", "data.max_prompt_length=100", "data.max_response_length=28", f"{RO}.n=2",
        f"{A}.ppo_mini_batch_size=8", f"{A}.ppo_micro_batch_size_per_gpu=2", f"{RO}.log_prob_micro_batch_size_per_gpu=2",
        f"{REF}.log_prob_micro_batch_size_per_gpu=8", "trainer.nnodes=1", "trainer.n_gpus_per_node=4",
        f"{A}.strategy=fsdp2", "critic.strategy=fsdp2", f"{M}.path=org/model", f"{M}.use_fused_kernels=true",
        f"{A}.fsdp_config.model_dtype=fp32", f"{A}.fsdp_config.param_offload=true", f"{A}.fsdp_config.optimizer_offload=false",
        f"+{A}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
        f"+{A}.optim.override_optimizer_config.fused=true", "critic.optim.optimizer=SGD",
        "critic.fsdp.model_dtype=bf16", "critic.fsdp.offload_policy=true", f"{REF}.fsdp_config.model_dtype=bf16",
        # 4 sequences of 128 tokens: verl batches its critic by tokens alone.
        "+critic.ppo_infer_max_token_len_per_gpu=512", f"{RO}.name=sglang", f"{RO}.tensor_model_parallel_size=2",
        f"{RO}.gpu_memory_utilization=0.4", f"{RO}.max_model_len=128", "reward.reward_model.enable=true",
        "reward.reward_model.model_path=org/model", "reward.reward_model.rollout.tensor_model_parallel_size=4",
        f"{M}.enable_gradient_checkpointing=true", "critic.model.enable_gradient_checkpointing=false",
        f"+{M}.override_config.attn_implementation=flash_attention_2",
    ):  # fmt: skip
        assert line in made
    assert len({text.split("=")[0].lstrip("+") for text in made}) == len(made), "a key twice"


def test_adapters_need_the_base_from_the_checkpoint_and_have_no_ref_of_their_own() -> None:
    made = to_verl_overrides(_stock(actor={"lora_rank": 32}), rollout="vllm")
    assert f"{M}.lora_rank=32" in made
    assert f"{RO}.load_format=safetensors" in made
    assert [text for text in made if text.startswith(REF)] == [f"{REF}.log_prob_micro_batch_size_per_gpu=2"]


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"actor": {"in_flight": 2}}, ["actor.in_flight = 2"]),
        ({"ref": {"offload": "stream"}}, ["ref.offload = stream"]),
        ({"critic": {"attn_implementation": "sdpa"}}, ["critic.attn_implementation = sdpa"]),
        ({"actor": {"attn_implementation": "sdpa"}}, ["ref.attn_implementation = flash_attention_2"]),
        ({"backend": "fsdp", "actor": {"offload_policy": True}}, ["actor.offload_policy = True"]),
        ({"reward": {"device_type": "cpu"}}, ["reward.device_type = cpu"]),
        ({"reward": {"precision": "bf16-mixed"}}, ["reward.precision = bf16-mixed"]),
        ({"actor": {"logits": "fused"}, "ref": {"logits": "full"}}, ["ref.logits = full"]),
        ({"actor": {"in_flight": 3}, "critic": {"in_flight": 2}}, ["actor.in_flight = 3", "critic.in_flight = 2"]),
        ({"n_gpus": 3}, ["ppo_mini_batch_size = 8: 8 prompts x 2 = 16 sequences, % 3 GPUs = 1, not 0"]),
        ({"actor": {"micro_batch_size": 3}}, ["actor.micro_batch_size = 3: 4 sequences of a mini-batch on each GPU, % 3 = 1"]),
        ({"ref": {"micro_batch_size": 3}}, ["ref.micro_batch_size = 3: 8 sequences of a step on each GPU, % 3 = 2"]),
    ],
)  # fmt: skip
def test_what_stock_verl_cannot_have_is_refused_by_name(fields: dict[str, Any], refused: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        to_verl_overrides(_stock(**fields))
    said = str(caught.value).splitlines()
    assert [line.startswith(start) for line, start in zip(said, refused, strict=True)] == [True] * len(refused)
    assert all(finding.fix for finding in caught.value.findings)


def test_a_mixture_that_the_planner_chose_is_fused_for_both() -> None:
    plan = _stock(actor={"logits": "fused"}, ref={"logits": "full"})
    chosen = {**plan.roles, "ref": replace(plan.roles["ref"], chosen=("logits",))}
    assert f"{M}.use_fused_kernels=true" in to_verl_overrides(replace(plan, roles=chosen))


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"rollout": "hf"}, "rollout = hf"),
        ({"backend": "device_map", "rollout": "vllm"}, "rollout = vllm"),
        ({"backend": "fsdp3"}, "backend = fsdp3"),
        ({"rollout": "trtllm"}, "rollout = trtllm"),
    ],
)
def test_pairs_that_do_not_go_are_refused_with_those_that_do(given: dict[str, str], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to_verl_overrides(_stock(), **given)  # type: ignore[arg-type]
    (finding,) = caught.value.findings
    assert str(finding).startswith(where)
    assert "fsdp with vllm or sglang; fsdp2 with vllm or sglang; device_map with hf" in finding.fix


def test_a_plan_for_another_backend_says_so_and_leaves_out_nothing(model: str) -> None:
    workload = replace(SMALL, algorithm="grpo", kl="none")
    roles = {"actor": {**TRAINED}, "rollout": {"precision": "bf16-mixed", "strategy": "hf"}}
    plan = planned(model, workload, 4, 1, "device_map", roles)
    with pytest.warns(ShardNotice, match="the plan was made for device_map"):
        made = to_verl_overrides(replace(plan, roles=_unasked(plan)), backend="fsdp")
    assert f"{A}.strategy=fsdp" in made
    on_two = replace(plan.roles["actor"], devices=(0, 1))
    with pytest.raises(ConfigError, match=r"actor.devices = \[0, 1\]: verl lays every role over all 4 GPUs"):
        to_verl_overrides(replace(plan, roles={**_unasked(plan), "actor": on_two}), backend="fsdp")


def _unasked(plan: Plan) -> dict[str, PlannedRole]:
    return {role: replace(own, chosen=tuple(own.settings)) for role, own in plan.roles.items()}


def test_another_reference_needs_the_plans_file_on_our_engine_and_is_refused_by_stock(
    tmp_path: Path, model: str
) -> None:
    roles = {"actor": TRAINED, "ref": {**TRAINED, "precision": "bf16"}, "rollout": {"precision": "bf16"}}
    workload = replace(SMALL, algorithm="grpo")
    for backend, fix in (("device_map", "Give plan_file"), ("fsdp", "use backend=device_map")):
        plan = planned(model, workload, 4, 1, backend, roles)
        plan = replace(plan, roles={**plan.roles, "ref": replace(plan.roles["ref"], model="org/other")})
        with pytest.raises(ConfigError, match=r"ref.model = org/other") as caught:
            to_verl_overrides(plan)
        assert fix in str(caught.value)
    plan = replace(plan, backend="device_map")
    made = to_verl_overrides(plan, plan_file=tmp_path / "plan.yaml")
    assert f"{A}.device_map.plan={tmp_path / 'plan.yaml'}" in made
    assert not [text for text in made if ".device_map.device_map=" in text]


def test_a_shell_gives_verl_the_overrides_as_they_are() -> None:
    overrides = ["a.b='it is \"here\"'", "c={x:1,y:[2,3]}", "+d.e=$HOME"]
    command = verl_command(overrides, backend="device_map", python="printf '%s\\n'")
    shown = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, env={"TRAIN_FILES": "/t", "VAL_FILES": "/v"}
    )  # fmt: skip
    assert shown.stdout.splitlines() == [
        "-m", "verl.trainer.main_ppo", "data.train_files=/t", "data.val_files=/v", *overrides,
    ]  # fmt: skip
    assert command.startswith("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 ")
    unset = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={"VAL_FILES": "/v"})
    assert "TRAIN_FILES: name a parquet file" in unset.stderr
    assert shlex.split(verl_command([], backend="fsdp", data=())) == ["python3", "-m", "verl.trainer.main_ppo"]
