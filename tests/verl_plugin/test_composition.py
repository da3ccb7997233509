"""verl's own configuration with `model_engine=device_map`, as Hydra composes it and verl reads it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
import verl
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_shard.common.errors import ConfigError
from verl_shard.common.notices import ShardNotice
from verl_shard.planning.plan_file import write_plan
from verl_shard.verl_plugin import search_path
from verl_shard.verl_plugin.config import DeviceMapActorConfig, DeviceMapCriticConfig, DeviceMapEngineConfig
from verl_shard.verl_plugin.engine_copies import copies_asked
from verl_shard.verl_plugin.overrides import RunSettings, hydra_value, to_overrides
from verl_shard.verl_plugin.trainer_config import AGENT_LOOP_MANAGER, SAMPLER, prepare_trainer_config


@pytest.fixture(scope="module")
def composed() -> Iterator[Callable[..., Any]]:
    """composed("a=1", ...): verl's trainer configuration with these overrides."""
    search_path.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        yield lambda *overrides: compose("ppo_trainer", overrides=list(overrides))
    GlobalHydra.instance().clear()


@pytest.fixture
def model(small_config: Callable[..., Any], tmp_path: Path) -> Path:
    """A model folder whose name has characters that mean something to Hydra."""
    folder = tmp_path / "a model, 'mine' = {new}"
    small_config("qwen3", architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    vocab = {f"t{n}": n for n in range(128)}
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t3"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t2").save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> Callable[..., RunSettings]:
    def make(**fields: Any) -> RunSettings:
        plan = tmp_path / "plan.yaml"
        write_plan(plan, {role: {"device_map": {"": "cpu"}} for role in ("actor", "critic", "ref")})
        return RunSettings(
            **{
                "algorithm": "ppo", "model": model, "train_files": (tmp_path / "a b.parquet", tmp_path / "c.parquet"),
                "val_files": (tmp_path / "v.parquet",), "reward": None, "plan": plan, "checkpoints": tmp_path / "ckpt",
                "steps": 7, "seed": 5, "train_batch_size": 8, "n": 2, "mini_batch_size": 4, "micro_batch_size": 2,
                "max_prompt_length": 16, "max_response_length": 12, "actor_lr": 1e-5, "critic_lr": 3e-4, "kl_coef": 0.02,
                "test_freq": 2, "save_freq": 3, "cpu": True, **fields,
            }
        )  # fmt: skip

    return make


def test_model_engine_device_map_gives_our_classes(composed: Callable[..., Any]) -> None:
    config = composed(
        "model_engine=device_map", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.n=1",
        "critic.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.actor.device_map.precision=bf16",
        "critic.device_map.strict=true", "actor_rollout_ref.model.path=none", "critic.model.path=none",
        "actor_rollout_ref.ref.device_map.copies_on=[2,4]",
    )  # fmt: skip
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert type(actor) is DeviceMapActorConfig
    assert type(actor.engine) is DeviceMapEngineConfig
    assert (actor.engine.role, actor.engine.precision, actor.engine.forward_only, actor.engine.strict) == (
        "actor", "bf16", False, False,
    )  # fmt: skip
    # What verl's worker renames before it reads it.
    for name in [name for name in config.actor_rollout_ref.ref if name.startswith("log_prob_")]:
        OmegaConf.set_struct(config, False)
        del config.actor_rollout_ref.ref[name]
    OmegaConf.update(config, "actor_rollout_ref.ref.ppo_micro_batch_size_per_gpu", 1)
    ref = omega_conf_to_dataclass(config.actor_rollout_ref.ref)
    assert type(ref) is DeviceMapActorConfig
    assert (ref.engine.role, ref.engine.precision, ref.engine.forward_only) == ("ref", None, True)
    assert copies_asked({}, ref.engine) == (2, 4)
    assert copies_asked({}, actor.engine) is None
    OmegaConf.update(config, "critic.model", None)
    critic = omega_conf_to_dataclass(config.critic)
    assert type(critic) is DeviceMapCriticConfig
    assert (critic.engine.role, critic.engine.strict) == ("critic", True)


def test_another_engine_is_as_it_was(composed: Callable[..., Any]) -> None:
    config = composed()
    assert config.actor_rollout_ref.actor.strategy == "fsdp"
    before = OmegaConf.to_container(config)
    prepare_trainer_config(config)
    assert OmegaConf.to_container(config) == before


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cpu": False, "resume_from": "/runs/x/checkpoints/global_step_4", "gradient_checkpointing": True, "n": 4},
        {"reward": "pkg://some.module:score", "attn_implementation": "eager"},
    ],
    ids=["cpu", "resumed", "reward"],
)
def test_the_overrides_compose_and_verl_finds_no_fault(
    algorithm: str, fields: dict[str, Any], composed: Callable[..., Any], settings: Callable[..., RunSettings]
) -> None:
    wanted = settings(algorithm=algorithm, **fields)
    config = composed(*to_overrides(wanted))
    prepare_trainer_config(config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Disabled critic as algorithm.adv_estimator != gae")
        assert need_critic(config) == (algorithm == "ppo")
    assert need_reference_policy(config)
    validate_config(config, use_reference_policy=True, use_critic=algorithm == "ppo")

    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    assert config.data.train_files == list(map(str, wanted.train_files))
    assert config.actor_rollout_ref.model.path == str(wanted.model)
    assert config.actor_rollout_ref.model.override_config.attn_implementation == wanted.attn_implementation
    assert (trainer.total_training_steps, trainer.test_freq, trainer.save_freq) == (7, 2, 3)
    assert trainer.resume_mode == ("disable" if wanted.resume_from is None else "resume_path")
    assert trainer.resume_from_path == wanted.resume_from
    assert trainer.val_before_train == (wanted.resume_from is None)
    assert trainer.device == ("cpu" if wanted.cpu else "cuda")
    assert config.actor_rollout_ref.rollout.n == wanted.n
    assert (actor.optim.lr, actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu) == (1e-5, 4, 2)
    for role in (actor, config.actor_rollout_ref.ref, *([config.critic] if algorithm == "ppo" else [])):
        assert role.device_map.plan == str(wanted.plan)
        assert role.device_map.seed == 5
    if algorithm == "ppo":
        assert config.algorithm.use_kl_in_reward
        assert config.algorithm.kl_ctrl.kl_coef == 0.02
        assert config.critic.model.path == str(wanted.model)
        assert config.critic.optim.lr == 3e-4
    else:
        assert (actor.use_kl_loss, actor.kl_loss_coef, config.algorithm.use_kl_in_reward) == (True, 0.02, False)
    if wanted.reward is not None:
        assert config.reward.custom_reward_function.path == "pkg://some.module"
        assert config.reward.custom_reward_function.name == "score"
    assert trainer.v1.sampler.custom_sampler.path == SAMPLER
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class == AGENT_LOOP_MANAGER


def test_what_the_user_adds_wins(composed: Callable[..., Any], settings: Callable[..., RunSettings]) -> None:
    config = composed(*to_overrides(settings(), ["data.seed=99", "trainer.save_freq=1"]))
    assert (config.data.seed, config.trainer.save_freq) == (99, 1)


def test_the_path_of_a_reward_may_have_a_colon(settings: Callable[..., RunSettings]) -> None:
    overrides = to_overrides(settings(reward="/a:b/reward.py:score"))
    assert "reward.custom_reward_function.path=/a:b/reward.py" in overrides
    assert "reward.custom_reward_function.name=score" in overrides


TEXT = st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]) | st.sampled_from("\\'\"[]{}=,: $0")


@given(st.text(TEXT, min_size=1).filter(lambda text: "${" not in text))
@example("null")
@example("-5")
@example("1e5")
@example("\\")
@example("a\\'b\\\\")
def test_any_text_goes_through_hydras_grammar(text: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"a.b={hydra_value([Path('x'), text])}"])
    found = override.value()
    assert [str(item) for item in found] == ["x", text]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"algorithm": "dpo"}, "Use one of ppo, grpo"),
        ({"mini_batch_size": 3}, "train_batch_size 8 % mini_batch_size 3 = 2, not 0"),
        ({"micro_batch_size": 3}, "mini_batch_size 4 x n 2 = 8 samples, % micro_batch_size 3 = 2, not 0"),
    ],
)
def test_batches_that_do_not_divide_are_refused_with_the_arithmetic(
    fields: dict[str, Any], says: str, settings: Callable[..., RunSettings]
) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(**fields)


def test_what_cannot_work_is_refused_when_the_trainer_is_made(
    composed: Callable[..., Any], settings: Callable[..., RunSettings]
) -> None:
    config = composed(
        *to_overrides(settings()), "trainer.nnodes=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.model.use_liger=true",
        "critic.model.enable_activation_offload=true",
    )  # fmt: skip
    before = OmegaConf.to_container(config)
    with pytest.raises(ConfigError) as caught:
        prepare_trainer_config(config)
    assert [(finding.where, finding.given) for finding in caught.value.findings] == [
        ("trainer.n_gpus_per_node", "1"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "2"),
        ("trainer.v1.trainer_mode", "separate_async"),
        ("actor_rollout_ref.model.use_liger", "True"),
        ("critic.model.enable_activation_offload", "True"),
    ]
    assert OmegaConf.to_container(config) == before


def test_a_sampler_and_agent_loops_of_the_users_own_are_kept_and_it_is_said(
    composed: Callable[..., Any], settings: Callable[..., RunSettings]
) -> None:
    config = composed(
        *to_overrides(settings()), "trainer.v1.sampler.custom_sampler.path=mine.py", "trainer.v1.sampler.custom_sampler.name=S",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager",
    )  # fmt: skip
    with pytest.warns(ShardNotice) as said:
        prepare_trainer_config(config)
    assert [str(warning.message).split(" = ")[0] for warning in said] == [
        "trainer.v1.sampler.custom_sampler", "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
    ]  # fmt: skip
    assert config.trainer.v1.sampler.custom_sampler.path == "mine.py"
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class == "my.Manager"
