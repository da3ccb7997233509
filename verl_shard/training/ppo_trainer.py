"""PPOTrainer: PPO in one call, in this process, in those of a launcher, or on verl's trainer on Ray."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_shard.common.collection import no_collection
from verl_shard.common.errors import MissingExtraError, config_error
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.common.tables import err
from verl_shard.config.data_files import DataFiles
from verl_shard.config.run_folder import Launch, RunFolder, whole_checkpoints
from verl_shard.training import moving, placement
from verl_shard.training.callbacks import is_validation, progress_line
from verl_shard.training.folder import open_folder
from verl_shard.training.inputs import loading, read_inputs
from verl_shard.training.keywords import refuse_unknown
from verl_shard.training.owners import Leases
from verl_shard.training.saved import save_inputs, with_saved_models
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
        Or a Plan, a ResourceConfig or the file of one. generation_config, ppo_config: see
        docs/local_ppo.md, which has every key. Keys that are not known are refused, none is ignored.
    train_data, val_data: a parquet file or several, a Dataset, or a list of prompts (texts, conversations or rows in
        verl's columns). Without train_data the quick start's tasks are taken, without val_data a tenth is held out.
    runner: "local" trains in this process, or in those that accelerate launch or torchrun started, each with GPUs of its
        own; "verl" hands the same to verl's trainer on Ray. At one seed, on the CPU, both do the same.
    use_gradient_checkpointing: activations inside of blocks are computed again in the backward: saves most of them, for a
        forward more. gradient_checkpointing_kwargs: as for transformers' gradient_checkpointing_enable.
    tokenizer: a folder, or a loaded one; by default the actor's. progress: a line of where it is on stderr, in a terminal.
    output_dir: the run's folder, by default the next free runs/ppo-N. resume: go on with the run there, from its last
        whole checkpoint, whichever runner or number of processes wrote it.
    callbacks: see verl_shard.training.callbacks. loggers: of verl's console, tensorboard and wandb; metrics.jsonl is
        written anyway. overrides: more of verl's configuration, key=value.

    Raises ConfigError for everything that cannot be meant, before anything is loaded.
    """

    @refuse_unknown
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
        if resume:
            places = moving.moved_before(self._run_folder, places, self._processes)
            self._inputs = replace(self._inputs, places=places)
        # Of a run that goes on, what its last checkpoint has behind it.
        done = max(whole_checkpoints(self.output_dir / "checkpoints"), default=0)
        self._records: list[Metrics] = [r for r in self._run_folder.metrics() if done and r["step"] <= done]
        self._own_tokenizer = tokenizer is not None
        self._files, self._models, self._rewards = DataFiles(Path(), Path()), dict[str, str](), self._inputs.rewards
        self._prepare()
        self._launch: Launch | None = None
        self._local: LocalRun | None = None
        self._leave_after: int | None = None
        self._stopping, self._shows_owners = False, False
        self._leases = Leases()
        weakref.finalize(self, self._leases.keep, ())

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
        steps, done = self._inputs.settings.ppo["steps"], self._last_step
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
        if self.runner == "verl":
            from verl_shard.training.on_verl import model_of_checkpoint

            lora = bool(self._inputs.settings.ppo["lora_rank"])
            model = model_of_checkpoint(self.output_dir / "checkpoints", self._models["actor"], lora=lora)
        else:
            model = self.model
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

    def update_resource(self, component: str, device_ids: Any, strategy: str | None = None) -> None:
        """Has a component be on other devices from the next step on; see docs/moving_resources.md for what can be moved.

        device_ids: GPU ids as a list or a text ("0-1"), a device_map, or "cpu" for a reward model. strategy: none, device_map,
        or data_parallel for ref and reward; by default what as many ids say.
        To be called between two steps, from a callback too; of several processes in all. The local runner moves at once, the
        optimizer's states too; on Ray the launch ends after its next checkpoint and another goes on from there.
        Raises ConfigError for what cannot be moved and GPUs that others use, and DoesNotFitError, before anything moves.
        """
        before, ppo = self._inputs.places, self._inputs.settings.ppo
        moving.check_between_steps(self._local)
        read = partial(moving.read_change, component, device_ids, strategy, runner=self.runner, places=before)
        change = moving.agreed(self._processes, partial(read, lora=bool(ppo["lora_rank"])))
        if change.is_nothing(before):
            return
        on_ray = self.runner == "verl" and self._launch is not None
        moving.check_checkpoints(change, ppo["save_freq"], under_way=on_ray)
        try:
            self._processes.gather(partial(self._move, change))
        except BaseException:
            self._leases.keep(before.gpus)
            raise
        self._inputs = replace(self._inputs, places=change.places)
        if on_ray:
            self._leave_after = self._last_step if self._leave_after is None else self._leave_after
        else:
            self._leases.keep(change.places.gpus)
        moving.remember(self._run_folder, self._processes, change.places, change.role)
        moving.record(self.output_dir, change, before, self._last_step, self._processes.rank)
        if self._progress and self._processes.first:
            err.print(f"{change.words}{' after the next checkpoint' if on_ray else ''}")

    def _move(self, change: moving.Change) -> list[None]:
        """What there is of a role now goes where it is to be, and the plan says so."""
        places, role = change.places, change.role
        if self._leases.gpus:
            self._leases.take(places.gpus)
        if role == "reward":
            assert self._rewards is not None
            self._rewards.move(loading(places.roles["reward"], cpu=places.cpu))
            return []
        entry = placement.entry_of(role, places, self._models, **self._inputs.pass_fields)
        if self._local is not None:
            self._local.workers.move(role, entry.get("copies_on") or entry["device_map"])
        placement.lay_out_again(role, entry, places, self._plan)
        return []

    @property
    def _last_step(self) -> int:
        return max((record["step"] for record in self._records), default=0)

    def _prepare(self) -> None:
        """Data, models and the plan as both runners load them."""
        inputs, folder, processes = self._inputs, self.output_dir, self._processes
        self._files, self._models = save_inputs(inputs, folder, processes, own_tokenizer=self._own_tokenizer)
        self._rewards = with_saved_models(inputs, folder, processes)
        if self._rewards is not None and "reward" in inputs.places.roles:  # it may have moved since the run began
            self._rewards.move(loading(inputs.places.roles["reward"], cpu=inputs.places.cpu))
        self._plan = folder / ("plan.yaml" if processes.first else f"plan.{processes.rank}.yaml")
        placement.lay_out(inputs.places, self._models, self._plan, **self._inputs.pass_fields)

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
        self._leases.own(self._inputs.places, self._processes, shown=self._shows_owners)
        with self._leases.until_failure(), self._processes.together():
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
        self._leases.own(self._inputs.places, self._processes, shown=False)  # given back by an earlier train()
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
            finally:
                self._leases.keep(())

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
        while True:
            self._leave_after = None
            with suppress(moving.Relaunch):
                self._launch_verl()
                return

    def _launch_verl(self, *more: str) -> list[Metrics]:
        """Runs verl's main program once; returns what it logged. more: overrides of a launch that is no training.

        Raises Relaunch where update_resource has it go on elsewhere.
        """
        from verl_shard.training.on_verl import REWARD, hand_over, run_launch

        reward = None if self._rewards is None else REWARD
        if self._rewards is not None:
            hand_over(self._rewards, self.output_dir)
        launch = self._launch = self._run_folder.new_launch()
        self._run_folder.write_metrics()
        if not more:  # what was beyond the checkpoint is done again
            self._records = [record for record in self._records if record["step"] <= launch.after_step]
        overrides = [*self._overrides(reward=reward), *more]
        steps, checkpoints = self._inputs.settings.ppo["steps"], self.output_dir / "checkpoints"

        def on_record(record: Metrics) -> None:
            if not more and (record["step"] > launch.after_step or launch.after_step == 0):
                self._on_record(record["step"], record["data"])

        def on_look() -> None:
            since = None if more else self._leave_after
            if since is not None and moving.can_leave(checkpoints, since=since, seen=self._last_step, last=steps):
                raise moving.Relaunch

        self._leases.own(self._inputs.places, self._processes, shown=self._shows_owners)
        try:
            return run_launch(
                self._run_folder, launch, overrides, cpu=self._inputs.places.cpu, on_record=on_record, on_look=on_look,
                steps=steps, shown=self._progress,
            )  # fmt: skip
        finally:
            self._launch = None
            self._leases.keep(())

    def _need_local(self, what: str, fix: str) -> None:
        if self.runner != "local":
            why = "verl runs its own loop, from the beginning to the end"
            raise config_error("local-only", what, f"runner={self.runner!r}", why, fix[0].upper() + fix[1:])
