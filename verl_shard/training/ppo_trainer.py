"""PPOTrainer: PPO in one call, in this process, in those of a launcher, or on verl's trainer on Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_shard.common.collection import no_collection
from verl_shard.common.errors import MissingExtraError, config_error
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.config.data_files import DataFiles
from verl_shard.config.run_folder import Launch, RunFolder, whole_checkpoints
from verl_shard.training import placement
from verl_shard.training.callbacks import is_validation, progress_line
from verl_shard.training.data import write_rows
from verl_shard.training.folder import open_folder
from verl_shard.training.inputs import read_inputs
from verl_shard.training.models import as_folder, load_tokenizer
from verl_shard.training.rewards import Part, Rewards
from verl_shard.verl_plugin.local.group import Processes, join, launched, use_platform

if TYPE_CHECKING:
    from verl_shard.verl_plugin.local.run import LocalRun

Metrics = dict[str, Any]


class PPOTrainer:
    """PPO and its relatives on verl's engine and algorithms, for trying things out.

    actor_model, critic_model, ref_model: a hub id, a folder or a loaded transformers model; critic and reference are by
        default the actor's. A loaded model is saved to the run's folder and loaded from there, which a notice says.
    reward_model: a function that takes some of data_source, solution_str (or response), ground_truth, extra_info, prompt
        and messages by name and returns a number; "file.py:name"; a reward model; or a list of these or of
        (reward, weight) pairs. By default the quick start's verifier with its data, else verl's own by data_source.
    model_config: by role, where a model is and in what precision: {"actor": {"device": "cuda:0", "dtype": torch.bfloat16}}.
        Or a Plan. generation_config, ppo_config: see docs/local_ppo.md, which has every key. Keys that are not known are
        refused, none is ignored.
    train_data, val_data: a parquet file or several, a Dataset, or a list of prompts (texts, conversations or rows in
        verl's columns). Without train_data the quick start's tasks are taken, without val_data a tenth is held out.
    runner: "local" trains in this process, or in those that accelerate launch or torchrun started, each with GPUs of its
        own; "verl" hands the same to verl's trainer on Ray. At one seed, on the CPU, both do the same.
    output_dir: the run's folder, by default the next free runs/ppo-N. resume: go on with the run there, from its last
        whole checkpoint, whichever runner or number of processes wrote it.
    callbacks: see verl_shard.training.callbacks. loggers: of verl's console, tensorboard and wandb; metrics.jsonl is
        written anyway. overrides: more of verl's configuration, key=value.

    Raises ConfigError for everything that cannot be meant, before anything is loaded.
    """

    def __init__(
        self,
        actor_model: Any,
        critic_model: Any = None,
        reward_model: Any = None,
        ref_model: Any = None,
        *,
        model_config: Any = None,
        generation_config: Any = None,
        ppo_config: Mapping[str, Any] | None = None,
        train_data: Any = None,
        val_data: Any = None,
        runner: str = "local",
        use_gradient_checkpointing: bool = False,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        output_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        callbacks: Sequence[Any] = (),
        loggers: Sequence[str] = (),
        overrides: Sequence[str] = (),
        progress: bool = True,
    ) -> None:
        self.runner, self._loggers, self._extra, self._progress = runner, tuple(loggers), tuple(overrides), progress
        rank, size, _ = launched()
        with no_collection():
            self._inputs = read_inputs(
                models={"actor": actor_model, "critic": critic_model, "reward": reward_model, "ref": ref_model},
                model_config=model_config,
                settings={
                    "generation_config": generation_config,
                    "ppo_config": ppo_config,
                    "use_gradient_checkpointing": use_gradient_checkpointing,
                    "gradient_checkpointing_kwargs": gradient_checkpointing_kwargs,
                },
                data=(train_data, val_data),
                runner=runner,
                tokenizer=tokenizer,
                callbacks=callbacks,
                loggers=loggers,
                processes=size,
            )
        places = self._inputs.places
        use_platform(cpu=places.cpu)
        self._processes = Processes(rank, size, 0)
        if runner == "local":
            gpu = next((device for device in places.share if isinstance(device, int)), None)
            self._processes = join(gpu=gpu)
        identity = self._inputs.settings.identity()
        self.output_dir = open_folder(self._processes, output_dir, identity, resume=resume, runner=runner)
        self._run_folder = RunFolder(self.output_dir)
        # Of a run that goes on, what its last checkpoint has behind it.
        done = max(whole_checkpoints(self.output_dir / "checkpoints"), default=0)
        self._records: list[Metrics] = [r for r in self._run_folder.metrics() if done and r["step"] <= done]
        self._own_tokenizer = tokenizer is not None
        self._files, self._models, self._rewards = DataFiles(Path(), Path()), dict[str, str](), self._inputs.rewards
        self._prepare()
        self._launch: Launch | None = None
        self._local: LocalRun | None = None
        self._stopping = False

    @property
    def metrics(self) -> list[Metrics]:
        """{"step": ..., "data": {verl's metrics by name}} of each step so far; step 0 is the validation before the first."""
        return list(self._records)

    @property
    def model(self) -> Any:
        """The actor as it is now, with the local runner."""
        return self._started().workers.actor_module

    def train(self) -> list[Metrics]:
        """Trains to the last step, with callbacks, validations and checkpoints on the way; returns the metrics."""
        steps, done = self._inputs.settings.ppo["steps"], max((record["step"] for record in self._records), default=0)
        if done >= steps:
            why = f"the run in {self.output_dir} has {done} steps"
            raise config_error(
                "nothing-left", "ppo_config['steps']", steps, why, f"Give {done + 1} or more to train on"
            )
        if self.runner == "verl":
            self._on_ray()
        else:
            self._here()
        self._inputs.callbacks.tell("on_train_end", self)
        return self.metrics

    def step(self) -> Metrics:
        """One step of the local runner; returns its metrics."""
        self._need_local("step", "call train(), and listen with a callback")
        from verl_shard.training import loop

        run = self._started()
        with self._processes.together():
            metrics = loop.step(run)
            run.log(metrics)
            self._on_record(run.steps_done, metrics)
        return metrics

    def evaluate(self) -> Metrics:
        """The metrics of a validation with the weights as they are; on Ray with those of the last checkpoint."""
        if self.runner == "verl":
            metrics: Metrics = self._launch_verl("trainer.val_before_train=true", "trainer.val_only=true")[-1]["data"]
            return metrics
        run = self._started()
        with self._processes.together():
            metrics = run.validate()
        self._inputs.callbacks.tell("on_evaluate", self, run.steps_done, metrics)
        return metrics

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes the trained actor and its tokenizer as save_pretrained does. On Ray those of the last checkpoint."""
        path = Path(folder)
        model = self._from_checkpoint() if self.runner == "verl" else self.model
        if self._processes.first:
            model.save_pretrained(path)
            self._inputs.tokenizer.save_pretrained(path)
        return path

    def save_checkpoint(self) -> Path:
        """Writes a checkpoint of the local run, from which either runner goes on."""
        self._need_local("save_checkpoint", "set ppo_config['save_freq']")
        run = self._started()
        with self._processes.together():
            folder = run.save_checkpoint()
        self._inputs.callbacks.tell("on_save", self, run.steps_done, folder)
        return folder

    def stop(self) -> None:
        """Ends train() after the step under way; for callbacks of the local runner."""
        self._need_local("stop", "set ppo_config['steps']")
        self._stopping = True

    def _prepare(self) -> None:
        """Data and models as both runners load them: written by the first process, and named by all."""
        inputs, folder = self._inputs, self.output_dir

        def work() -> list[tuple[DataFiles, dict[str, str]]]:
            if not self._processes.first:
                return [(DataFiles(Path(), Path()), {})]
            files = write_rows(inputs.rows, inputs.held_out, folder / "data")
            if self._own_tokenizer:
                inputs.tokenizer.save_pretrained(folder / "tokenizer")
            models: dict[str, str] = {}
            for role in ("actor", "critic", "ref"):
                given = inputs.models[role] if inputs.models[role] is not None else inputs.models["actor"]
                own = role == "actor" or given is not inputs.models["actor"]
                models[role] = (
                    as_folder(role, given, inputs.tokenizer, folder / "models" / role) if own else models["actor"]
                )
            return [(files, models)]

        self._files, self._models = self._processes.gather(work)[0]
        self._rewards = self._with_saved_rewards()
        name = "plan.yaml" if self._processes.first else f"plan.{self._processes.rank}.yaml"
        self._plan = folder / name
        settings = inputs.settings
        placement.lay_out(
            inputs.places,
            self._models,
            self._plan,
            batch_size=settings.ppo["micro_batch_size"],
            seq_len=inputs.longest_prompt + settings.generation["max_new_tokens"],
            gradient_checkpointing=settings.gradient_checkpointing,
        )

    def _with_saved_rewards(self) -> Rewards | None:
        """The rewards with loaded reward models saved and named by their folders."""
        rewards, given = self._inputs.rewards, self._inputs.models["reward"]
        if rewards is None or given is None:
            return rewards
        parts: list[Part] = []
        for index, (part, item) in enumerate(
            zip(rewards.parts, given if isinstance(given, list) else [given], strict=True)
        ):
            module = item[0] if isinstance(item, tuple) else item
            if not hasattr(module, "state_dict"):
                parts.append(part)
                continue
            folder = self.output_dir / "models" / f"reward-{index}"
            if self._processes.first:
                as_folder("reward", module, load_tokenizer(module, None), folder)
            parts.append(Part(folder.name, str(folder), part.weight, part.model))
        self._processes.gather(list)
        return Rewards(tuple(parts))

    def _overrides(self, *, reward: str | None) -> list[str]:
        """verl's configuration of this run, from the checkpoint that its launch begins with."""
        assert self._launch is not None
        inputs, checkpoint = self._inputs, self._launch.checkpoint
        return inputs.settings.overrides(
            models=self._models,
            files=self._files,
            longest_prompt=inputs.longest_prompt,
            reward=reward,
            plan=self._plan,
            checkpoints=self.output_dir / "checkpoints",
            attention={role: place.attn_implementation for role, place in inputs.places.roles.items()},
            cpu=inputs.places.cpu,
            resume_from=None if checkpoint is None else Path(checkpoint),
            loggers=self._loggers,
            names=("verl_shard", self.output_dir.name),
            tokenizer=self.output_dir / "tokenizer" if self._own_tokenizer else None,
            extra=self._extra,
        )

    def _started(self) -> LocalRun:
        """The local run, loaded when first needed."""
        self._need_local("model", "use save()")
        if self._local is None:
            with no_collection():
                self._local = self._start()
        return self._local

    def _start(self) -> LocalRun:
        try:
            from verl_shard.training.scoring import scorer
            from verl_shard.verl_plugin.local.run import LocalRun
        except ImportError as error:
            raise MissingExtraError("PPOTrainer", "verl", error.name or "") from error
        os.environ[RUN_DIR_VARIABLE] = str(self.output_dir)
        with self._processes.together():
            if self._processes.first:
                self._launch = self._run_folder.new_launch()
                self._run_folder.write_metrics()
            launch = self._launch = self._processes.gather(lambda: [self._launch])[0]
            assert launch is not None
            overrides = self._overrides(reward=None)
            if self._processes.first:
                (self.output_dir / "overrides.txt").write_text("\n".join(overrides) + "\n", encoding="utf-8")
            return LocalRun.start(overrides, self._processes, scorer(self._rewards), launch.metrics_file)

    def _here(self) -> None:
        """Trains in this process."""
        from verl_shard.training import loop

        run = self._started()
        self._inputs.callbacks.tell("on_train_begin", self)
        with progress_line(run.total_steps, shown=self._progress and self._processes.first) as line:

            def on_record(step: int, metrics: Metrics) -> bool:
                line.show(step, metrics)
                return self._on_record(step, metrics)

            try:
                with self._processes.together():
                    loop.train(run, on_record)
            except BaseException:
                run.close(failed=True)
                raise

    def _on_record(self, step: int, metrics: Metrics) -> bool:
        """Keeps the metrics of a step and tells callbacks of them; whether to stop."""
        record = {"step": step, "data": metrics}
        self._records.append(record)
        if self._processes.first:
            self._run_folder.append_metrics(record)
        tell = self._inputs.callbacks.tell
        if is_validation(metrics):
            tell("on_evaluate", self, step, metrics)
        if step > 0:
            tell("on_step_end", self, step, metrics)
        return self._stopping

    def _on_ray(self) -> None:
        """Trains on verl's own trainer."""
        self._inputs.callbacks.tell("on_train_begin", self)
        self._launch_verl()

    def _launch_verl(self, *more: str) -> list[Metrics]:
        """Runs verl's main program once; returns what it logged."""
        from verl_shard.training.handed_reward import hand_over
        from verl_shard.verl_plugin.fork_server import can_fork, fork_server
        from verl_shard.verl_plugin.launch import environment, run_verl

        cpu, reward = self._inputs.places.cpu, None
        # Its processes compute in turn, so each may have all cores.
        env = environment(cpu=cpu, threads=int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
        env.setdefault("TENSORBOARD_DIR", str(self.output_dir / "tensorboard"))
        if self._rewards is not None:
            hand_over(self._rewards, self.output_dir)
            reward = "pkg://verl_shard.training.handed_reward:compute_score"
        launch = self._launch = self._run_folder.new_launch()
        self._run_folder.write_metrics()
        overrides = [*self._overrides(reward=reward), *more]
        (self.output_dir / "overrides.txt").write_text("\n".join(overrides) + "\n", encoding="utf-8")
        hydra = [f"hydra.run.dir={self.output_dir / 'launches' / f'{launch.number}.hydra'}", "hydra.output_subdir=."]
        total = self._inputs.settings.ppo["steps"]
        with ExitStack() as stack:
            line = stack.enter_context(progress_line(total, shown=self._progress))
            server = stack.enter_context(fork_server(env)) if cpu and can_fork() else None

            def on_record(record: Metrics) -> None:
                if not more and (record["step"] > launch.after_step or launch.after_step == 0):
                    line.show(record["step"], record["data"])
                    self._on_record(record["step"], record["data"])

            run_verl([*overrides, *hydra], self._run_folder, env=env, launch=launch, on_record=on_record, server=server)
        return launch.records()

    def _from_checkpoint(self) -> Any:
        """The actor of the last whole checkpoint."""
        import torch

        from verl_shard.runtime.load import load_sharded

        checkpoints = whole_checkpoints(self.output_dir / "checkpoints")
        if not checkpoints or self._inputs.settings.ppo["lora_rank"]:
            why = "the run has no checkpoint" if not checkpoints else "its checkpoints hold adapters"
            raise config_error(
                "nothing-to-save", "save", None, why, "Set ppo_config['save_freq'], or use runner='local'"
            )
        folder = checkpoints[max(checkpoints)]
        model = load_sharded(
            self._models["actor"], "cpu", task="causal-lm", dtype="float32", attn_implementation="sdpa"
        )
        weights = torch.load(folder / "actor" / "model_world_size_1_rank_0.pt", map_location="cpu", weights_only=False)
        model.load_state_dict(weights)
        return model

    def _need_local(self, what: str, fix: str) -> None:
        if self.runner != "local":
            why = "verl runs its own loop, from the beginning to the end"
            raise config_error("local-only", what, f"runner={self.runner!r}", why, fix[0].upper() + fix[1:])
