"""PPO, from top to bottom: what a step does, in the order in which it does it.

The models compute in `workers`, the arithmetic between them is verl's own. Run by one process, or by several at once, each
computing its share of the batch: what is written here is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable

from verl_shard.verl_plugin.local.run import Batch, LocalRun, Metrics

OnRecord = Callable[[int, Metrics], bool]
"""Hears of the metrics of a step; whether to stop after it."""


def train(run: LocalRun, on_record: OnRecord) -> None:
    """Steps until the last one, with validations and checkpoints between them."""
    trainer = run.config.trainer
    if run.steps_done == 0 and trainer.val_before_train:
        metrics = run.validate()
        run.log(metrics)
        on_record(0, metrics)
    while run.steps_done < run.total_steps:
        metrics = step(run)
        if run.due(trainer.save_freq):
            run.save_checkpoint()
        if run.due(trainer.test_freq):
            metrics |= run.validate()
        run.log(metrics)
        if on_record(run.steps_done, metrics):
            break


def step(run: LocalRun) -> Metrics:
    """One step of PPO: prompts, responses, rewards, what the models say of them, advantages, and the two updates."""
    workers, metrics = run.workers, Metrics()
    run.timing.clear()
    workers.take_over(run.steps_done + 1)
    with run.phase("step"):
        # The actor answers each prompt n times.
        with run.phase("gen"):
            prompts = run.prompts.next()
            samples = run.rollout.generate(prompts)
        batch = Batch.of(samples)

        # A score for each response, which stands at its last token.
        with run.phase("reward"):
            batch.score([score for score, _ in run.scores(samples)])

        # The log-probabilities of the responses' tokens before this step's updates: what the policy ratio is taken against.
        with run.phase("old_log_prob"):
            metrics |= workers.compute_old_log_prob(batch)

        # The same under the reference policy, for the KL.
        if workers.has_ref:
            with run.phase("ref"):
                workers.compute_ref_log_prob(batch)

        # What the critic expects of the rest of a response, at each of its tokens.
        if workers.has_critic:
            with run.phase("values"):
                workers.compute_values(batch)

        # How much better each token did than expected: GAE with a critic, else by comparing the responses to a prompt.
        with run.phase("adv"):
            metrics |= run.advantages(batch)

        # Both learn from the same batch, in mini-batches and epochs.
        if workers.has_critic:
            with run.phase("update_critic"):
                metrics |= workers.update_critic(batch)
        if run.config.trainer.critic_warmup <= run.steps_done + 1:
            with run.phase("update_actor"):
                metrics |= workers.update_actor(batch)

        # The rollout generates on the very weights that were trained; it only has to know that they are new.
        run.steps_done += 1
        run.rollout.set_steps_done(run.steps_done)
    return run.step_metrics(batch, metrics)
