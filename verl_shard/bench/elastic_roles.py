"""A whole PPO step over roles that are wherever a placement puts them: plain transformers models on our runtime, no verl.

Phases have the planner's names and do what our engine does in them, such that a plan can be held against them.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_shard.bench.ladder_update import UnderAutocast
from verl_shard.bench.quick_weights import quick_weights
from verl_shard.common.choices import Task
from verl_shard.config.roles import TRAINED
from verl_shard.memory.losses import value_loss, verl_ppo_loss
from verl_shard.models.read import spec_of_module
from verl_shard.planning.layout import buffers_of
from verl_shard.planning.models import PHASES, PHASES_OF
from verl_shard.planning.placement_rules import STAGES

ROLES = ("actor", "critic", "ref", "reward")
_CLASSES = {
    "actor": "AutoModelForCausalLM", "ref": "AutoModelForCausalLM", "critic": "AutoModelForTokenClassification",
    "reward": "AutoModelForSequenceClassification",
}  # fmt: skip
_SETTINGS = {"attn_implementation": "sdpa"}


@dataclass(frozen=True, kw_only=True)
class Load:
    """One PPO step. sequences: in micro-batches of `micro_batch`; tokens of prompts and responses."""

    sequences: int
    micro_batch: int
    prompt: int
    response: int

    def __post_init__(self) -> None:
        assert self.sequences % self.micro_batch == 0, "micro-batches are of one size"

    @property
    def n_micro(self) -> int:
        return self.sequences // self.micro_batch

    @property
    def words(self) -> str:
        return f"{self.sequences} sequences of {self.prompt} + {self.response} tokens in {self.micro_batch}s"

    @property
    def workload(self) -> dict[str, Any]:
        """The same for build_plan."""
        return {"train_batch_size": self.sequences, "prompt_length": self.prompt, "response_length": self.response}


QUICK_LOAD = Load(sequences=8, micro_batch=4, prompt=224, response=32)
CPU_LOAD = Load(sequences=4, micro_batch=2, prompt=16, response=16)
"""Of the benches of whole steps: with --quick, and where there is no GPU."""


@dataclass(frozen=True)
class Place:
    """Where a role is. device_map: names to GPUs, or {"": "cpu"}. offload: of a role that scores, "stream" or "none"."""

    device_map: Mapping[str, Any]
    offload: str = "none"

    @property
    def devices(self) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(self.device_map.values()))


def plan_roles(config: Any, load: Load, *, mixed: bool, **more: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What build_plan is asked, with the settings that Roles has. more: by role, fields beside these."""
    trained = {
        **_SETTINGS, "precision": "bf16-mixed" if mixed else "fp32", "optimizer": "adamw", "gradient_checkpointing": True,
        "micro_batch_size": load.micro_batch, "lora_rank": 0, "in_flight": 1,
    }  # fmt: skip
    scoring = {
        **_SETTINGS, "precision": "bf16" if mixed else "fp32", "micro_batch_size": load.micro_batch, "offload": "none",
    }  # fmt: skip
    asked: dict[str, dict[str, Any]] = {
        "actor": {"model": config, "logits": "full", **trained},
        "critic": {"model": config, **trained},
        "ref": {"model": config, "logits": "full", **scoring},
        "reward": {"model": config, **scoring},
        "rollout": {"micro_batch_size": load.sequences},
    }
    return {role: {**own, **more.get(role, {})} for role, own in asked.items()}


@dataclass
class Roles:
    """Models with random weights, and the phases over them. mixed: bf16 autocast over fp32 weights in trained roles and bf16
    in those that score; else all is in fp32, as on the CPU.

    failed: how the phases that ran out of memory did so; it is for whoever runs stages side by side.
    """

    config: Any
    load: Load
    places: Mapping[str, Place]
    mixed: bool
    _models: dict[str, Any] = field(default_factory=dict)
    _optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)

    def make(self) -> None:
        """Makes the models where they belong."""
        for role, place in self.places.items():
            self._models[role] = made_model(self.config, role, place, mixed=self.mixed)
            if role in TRAINED:
                self._optimizers[role] = torch.optim.AdamW(self._models[role].parameters(), lr=1e-6)

    def phases(self) -> dict[str, Callable[[], None]]:
        """What each phase of a step does, in the step's order; of roles that there are."""
        made: dict[str, Callable[[], None]] = {
            "generate": self._generate,
            "reward": lambda: self._score("reward", lambda passed, ids: None),
            "old_log_prob": lambda: self._score("actor", _log_probs),
            "ref_log_prob": lambda: self._score("ref", _ref_log_probs),
            "values": lambda: self._score("critic", lambda passed, ids: None),
            "update_critic": lambda: self._update("critic", lambda passed, ids: value_loss(passed.pop())),
            "update_actor": lambda: self._update("actor", _policy_loss),
        }
        return {name: made[name] for name in PHASES if role_of(name) in self.places}

    def sets(self) -> list[tuple[str, ...]]:
        """Roles that share a device, directly or by way of others."""
        sets: list[set[str]] = []
        for role, place in self.places.items():
            mine = {role}
            for other in [s for s in sets if any(set(place.devices) & set(self.places[r].devices) for r in s)]:
                mine |= other
                sets.remove(other)
            sets.append(mine)
        return [tuple(role for role in self.places if role in one) for one in sets]

    def step(self, around: Callable[[str, Callable[[], None]], None]) -> None:
        """One step. around: runs a phase by its name. In each stage sets of roles with devices of their own work side by side,
        each in a thread; what one raises is raised when all are done."""
        phases = self.phases()
        for names in STAGES.values():
            jobs = [[name for name in names if name in phases and role_of(name) in roles] for roles in self.sets()]
            _side_by_side([[(name, phases[name]) for name in job] for job in jobs if job], around)

    def wait_for(self, phase: str) -> None:
        """Returns when the GPUs of the phase's role are done."""
        for device in self.places[role_of(phase)].devices:
            if device != "cpu":
                torch.cuda.synchronize(device)

    def _generate(self) -> None:
        from verl_shard.runtime.dispatch import input_device
        from verl_shard.runtime.generation import generate
        from verl_shard.runtime.generation_sampling import Sampling

        model = self._models["actor"]
        prompts = [[3] * (self.load.prompt - 4 * (i % 2)) for i in range(self.load.sequences)]
        sampling = Sampling(max_new_tokens=self.load.response, ignore_eos=True)
        with self._autocast("actor"):
            generate(
                model, prompts, list(range(len(prompts))), sampling, pad_token_id=0, eos_token_ids=[],
                device=input_device(model),
            )  # fmt: skip

    def _score(self, role: str, of: Callable[[list[torch.Tensor], torch.Tensor], object]) -> None:
        from verl_shard.runtime.dispatch import input_device
        from verl_shard.runtime.offload import several_calls

        model = self._models[role]
        model.eval()
        # As in the engine: casts of weights stay for all batches over several devices, and on one go before the loss.
        around = self._autocast(role) if len(self.places[role].devices) > 1 else nullcontext()
        with torch.no_grad(), around, several_calls(model, each=self.load.n_micro):
            for inputs in self._batches(input_device(model)):
                with self._autocast(role):
                    passed = [model(**inputs, use_cache=False).logits]
                with self._autocast(role):
                    of(passed, inputs["input_ids"].to(passed[0].device))

    def _update(self, role: str, loss: Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]) -> None:
        from verl_shard.runtime.dispatch import input_device
        from verl_shard.runtime.micro_batches import run_micro_batches

        model = self._models[role]
        model.train()
        batches: list[dict[str, Any]] = [
            {**inputs, "use_cache": False} for inputs in self._batches(input_device(model))
        ]
        several = len(self.places[role].devices) > 1

        def loss_of(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
            return loss_from([output.logits], batch)

        def loss_from(passed: list[torch.Tensor], batch: Mapping[str, Any]) -> torch.Tensor:
            with self._autocast(role):
                return loss(passed, batch["input_ids"].to(passed[0].device))

        under = UnderAutocast(model, self.mixed)
        if several:
            in_flight = min(len(self.places[role].devices), len(batches))
            run_micro_batches(under, batches, loss_of, in_flight=in_flight, scale="mean", max_grad_norm=1.0)
        else:
            for batch in batches:
                (loss_from([under(**batch).logits], batch) / len(batches)).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self._optimizers[role].step()
        self._optimizers[role].zero_grad(set_to_none=True)

    def _batches(self, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
        """Padded micro-batches: every second sequence is four tokens shorter."""
        chance = torch.Generator().manual_seed(1)
        length = self.load.prompt + self.load.response
        mask = torch.ones(self.load.micro_batch, length, dtype=torch.long)
        mask[1::2, -4:] = 0
        for _ in range(self.load.n_micro):
            ids = torch.randint(3, self.config.vocab_size, mask.shape, generator=chance)
            yield {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    def _autocast(self, role: str) -> AbstractContextManager[Any]:
        if not self.mixed or role == "reward":  # the engine computes a reference in bf16 under autocast too
            return nullcontext()
        kind = "cpu" if self.places[role].devices == ("cpu",) else "cuda"
        return torch.autocast(kind, torch.bfloat16)


def role_of(phase: str) -> str:
    """The role on whose model a phase runs: generation is on the actor's own."""
    found = next(role for role, phases in PHASES_OF.items() if phase in phases)
    return "actor" if found == "rollout" else found


def made_model(config: Any, role: str, place: Place, *, mixed: bool) -> Any:
    """A role's model with random weights; a scorer that is streamed is made on the host."""
    import transformers

    from verl_shard.runtime.offload import offload_model
    from verl_shard.runtime.pipeline import dispatch_model

    first, several = place.devices[0], len(place.devices) > 1
    scores = role not in TRAINED
    streamed = place.offload == "stream"
    own = copy.deepcopy(config)
    own.pad_token_id, own.num_labels = 0, 1
    own.classifier_dropout = 0.0  # as verl sets it: a critic's values are not noisy
    dtype = torch.bfloat16 if mixed and scores else torch.float32
    device = torch.device("cpu") if streamed or first == "cpu" else torch.device("cuda", first)
    with quick_weights(ROLES.index(role)), device:
        model = getattr(transformers, _CLASSES[role]).from_config(own, dtype=dtype, **_SETTINGS)
    if scores:
        model.eval().requires_grad_(False)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if streamed:
        task: Task = "reward" if role == "reward" else "causal-lm"
        ahead = buffers_of(spec_of_module(model, name=role, task=task))
        return offload_model(model, first, offload="stream", ahead=ahead, prefetch=True)  # as load_sharded does
    if several:
        model = dispatch_model(model, place.device_map)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a tied head is made before it is tied
    return model


def import_early(config: Any) -> None:
    """Once, for all processes that are forked, what every one of them would take seconds to import. Starts no CUDA."""
    import accelerate  # noqa: F401
    import transformers

    import verl_shard.runtime.generation
    import verl_shard.runtime.micro_batches
    import verl_shard.runtime.offload
    import verl_shard.runtime.pipeline  # noqa: F401

    for name in dict.fromkeys(_CLASSES.values()):
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            auto._model_mapping[type(config)]  # imports the model's code


def _without_padding(passed: list[torch.Tensor]) -> torch.Tensor:
    """A copy as one row, as the engine makes it, in the place of what was passed: both are the largest tensor there is."""
    return torch.cat(list(passed.pop()))[None]


def _ref_log_probs(passed: list[torch.Tensor], ids: torch.Tensor) -> None:
    """verl asks the reference for no entropies."""
    verl_ppo_loss(_without_padding(passed), ids, entropy=False, packed=True)


def _log_probs(passed: list[torch.Tensor], ids: torch.Tensor) -> None:
    verl_ppo_loss(_without_padding(passed), ids, entropy=True, packed=True)


def _policy_loss(passed: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    return verl_ppo_loss(_without_padding(passed), ids, entropy=False, packed=True)


def _side_by_side(
    jobs: Sequence[Sequence[tuple[str, Callable[[], None]]]], around: Callable[[str, Callable[[], None]], None]
) -> None:
    """Each job's phases in turn, the jobs at the same time."""
    raised: list[BaseException] = []

    def work(job: Sequence[tuple[str, Callable[[], None]]]) -> None:
        try:
            for name, run in job:
                around(name, run)
        except Exception as error:  # noqa: BLE001 - raised again when all are done
            raised.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs[1:]]
    for thread in threads:
        thread.start()
    for job in jobs[:1]:
        work(job)
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
