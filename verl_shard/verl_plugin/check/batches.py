"""Batch arithmetic, from the launcher's checks down to what the workers assert minutes later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl_shard.common.errors import Finding
from verl_shard.config.workload import group_of_one
from verl_shard.verl_plugin.check.tree import MISSING, Composed

A, RO, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
TRAIN, MINI = "data.train_batch_size", f"{A}.ppo_mini_batch_size"


@dataclass(frozen=True)
class Sizes:
    """Prompts in a step and in a mini-batch, responses to each, processes that share a batch."""

    train: int
    mini: int
    n: int
    world: int
    sp: int

    @property
    def dp(self) -> int:
        return max(self.world // self.sp, 1)


def find(made: Composed) -> Iterator[Finding]:
    """All that does not come out even, or is not given at all."""
    yield from _negative(made)
    yield from _lengths(made)
    yield from _given_at_all(made)
    yield from _dynamic(made)
    yield from _groups(made)
    sizes = sizes_of(made)
    if sizes is None:
        return
    whole = list(_whole(made, sizes))
    yield from whole
    if not whole and not made.on(f"{A}.use_dynamic_bsz"):
        yield from _micro(made, sizes)


def sizes_of(made: Composed) -> Sizes | None:
    """None where one of them is not known, or is no count."""
    found = [made.number(key) for key in (TRAIN, MINI, f"{RO}.n")]
    sp = made.number(f"{A}.ulysses_sequence_parallel_size") if made.sharded else 1
    numbers = [*found, made.world, sp]
    if any(number is None or number < 1 for number in numbers):
        return None
    return Sizes(*[int(number or 0) for number in numbers])


def _negative(made: Composed) -> Iterator[Finding]:
    for key in (TRAIN, MINI, f"{RO}.n", "data.max_prompt_length", "data.max_response_length", f"{A}.ppo_epochs"):
        number = made.number(key)
        if number is not None and number < 1:
            yield made.fault(key, "a number of 1 or more is needed", f"{key}=1", code="batch-arithmetic")
        elif number is None and made.value(key) is not MISSING and key in made.given:
            yield made.fault(key, "it is no whole number", f"{key}=8", code="wrong-value")


def _groups(made: Composed) -> Iterator[Finding]:
    said = group_of_one(made.text("algorithm.adv_estimator"), made.number(f"{RO}.n") or 0)
    if said is not None:
        why, fix = said
        yield made.fault(f"{RO}.n", why, f"{RO}.n=4. {fix}", "warning", "group-of-one")


def _whole(made: Composed, s: Sizes) -> Iterator[Finding]:
    """Steps into mini-batches, and these over the GPUs."""
    even = "batch-arithmetic"
    if s.train < s.mini:
        why = f"data.train_batch_size {s.train} is less than a mini-batch of {s.mini} prompts"
        yield made.fault(MINI, why, f"{MINI}={s.train}, or {TRAIN}={s.mini}", code=even)
        return
    if s.train % s.mini:
        why = f"{TRAIN} {s.train} % {s.mini} = {s.train % s.mini}, not 0: a step is cut into whole mini-batches"
        yield made.fault(MINI, why, f"{MINI}={_divisor(s.train, s.mini)}", code=even)
    samples = s.train * s.n
    shared = f"{s.world} GPUs" if s.sp == 1 else f"{s.world} GPUs / {s.sp} of a sequence = {s.dp} shares"
    if samples % s.world and not made.on(f"{A}.use_dynamic_bsz"):
        why = f"{s.train} prompts x {s.n} responses = {samples} samples, % {s.world} GPUs = {samples % s.world}, not 0"
        yield made.fault(TRAIN, why, f"{TRAIN}={_multiple(s.train, s.world, s.n)}", code=even)
    if s.mini * s.n % s.dp:
        why = f"{s.mini} prompts x {s.n} responses = {s.mini * s.n} samples, % {shared} = {s.mini * s.n % s.dp}, not 0"
        yield made.fault(MINI, f"{why}; the worker asserts it", f"{MINI}={_multiple(s.mini, s.dp, s.n)}", code=even)
    if made.has_critic and (critic := made.number("critic.ppo_mini_batch_size")) not in (None, s.mini):
        key = "critic.ppo_mini_batch_size"
        if critic > s.train or s.train % critic or critic * s.n % s.dp:
            why = f"a step of {s.train} prompts x {s.n} on {shared} is not cut into such mini-batches"
            yield made.fault(key, why, f"{key}={s.mini}, or leave it out: it follows the actor's", code=even)


def _micro(made: Composed, s: Sizes) -> Iterator[Finding]:
    """Mini-batches on a GPU into micro-batches."""
    mini, step = s.mini * s.n // s.dp, s.train * s.n // s.dp
    sizes = [(f"{A}.ppo_micro_batch_size_per_gpu", mini, "a mini-batch")]
    sizes.append((f"{RO}.log_prob_micro_batch_size_per_gpu", step, "a step"))
    if made.has_ref:
        sizes.append((f"{REF}.log_prob_micro_batch_size_per_gpu", step, "a step"))
    for key, mine, of in sizes:
        size = made.number(key)
        if size is None:
            continue
        if size < 1:
            yield made.fault(key, "a number of 1 or more is needed", f"{key}=1", code="batch-arithmetic")
        elif mine % size:
            prompts = s.mini if of == "a mini-batch" else s.train
            why = (
                f"{of} is {prompts} prompts x {s.n} = {prompts * s.n} samples / {s.dp} = {mine} on a GPU, % {size} = "
                f"{mine % size}, not 0; the worker asserts it"
            )
            yield made.fault(key, why, f"{key}={_divisor(mine, size)}", code="batch-arithmetic")


def _given_at_all(made: Composed) -> Iterator[Finding]:
    dynamic = made.on(f"{A}.use_dynamic_bsz")
    pairs = [(f"{A}.ppo_micro_batch_size", True), (f"{RO}.log_prob_micro_batch_size", True)]
    pairs += [(f"{REF}.log_prob_micro_batch_size", made.has_kl), ("critic.ppo_micro_batch_size", made.has_critic)]
    for old, needed in pairs:
        new = f"{old}_per_gpu"
        has_old, has_new = made.value(old) is not None, made.value(new) is not None
        if old == "critic.ppo_micro_batch_size":
            has_new = has_new and new in made.given  # by default it follows the old one
        elsewhere = dynamic if old != "critic.ppo_micro_batch_size" else made.on("critic.use_dynamic_bsz")
        if has_old and has_new and not elsewhere:
            why = f"it is deprecated, and {new} is given too, which verl refuses"
            yield made.fault(old, why, f"Leave it out and keep {new}={made.value(new)}", code="deprecated-key")
        elif has_old:
            why = "it is deprecated: a count over all GPUs, which passes verl's check and then fails in the worker"
            yield made.fault(old, why, f"{new}={_per_gpu(made, old)}", code="deprecated-key")
        elif not has_new and needed and not elsewhere:
            why = "neither it nor use_dynamic_bsz is set, and verl has no default"
            fix = f"{new}=4, or {A}.use_dynamic_bsz=True with {A}.ppo_max_token_len_per_gpu"
            yield made.fault(new, why, fix, code="no-micro-batch")


def _per_gpu(made: Composed, old: str) -> int:
    size, world = made.number(old) or 1, made.world or 1
    return max(size // world, 1)


def _dynamic(made: Composed) -> Iterator[Finding]:
    """Token budgets of dynamic micro-batches."""
    actor, rollout = made.on(f"{A}.use_dynamic_bsz"), made.on(f"{RO}.log_prob_use_dynamic_bsz")
    if actor != rollout and made.value(f"{RO}.log_prob_use_dynamic_bsz") is not MISSING:
        key = f"{RO}.log_prob_use_dynamic_bsz"
        why = f"{A}.use_dynamic_bsz is {str(actor).lower()}, and the worker asserts that both are the same"
        yield made.fault(key, why, f"{key}={actor}, or leave it out: it follows the actor's", code="dynamic-batch")
    prompt, response = made.number("data.max_prompt_length"), made.number("data.max_response_length")
    if prompt is None or response is None:
        return
    sp = made.number(f"{A}.ulysses_sequence_parallel_size") or 1
    budgets = [(f"{A}.ppo_max_token_len_per_gpu", actor), (f"{RO}.log_prob_max_token_len_per_gpu", rollout)]
    budgets.append(
        (f"{REF}.log_prob_max_token_len_per_gpu", made.has_ref and made.on(f"{REF}.log_prob_use_dynamic_bsz"))
    )
    budgets.append(("critic.ppo_infer_max_token_len_per_gpu", made.has_critic and made.sharded))
    said = False
    for key, used in budgets:
        budget = made.number(key)
        if key.startswith("critic") and budget is None:
            budget = 32768
        follows = key not in made.given and key != budgets[0][0] and not key.startswith("critic")
        if not used or budget is None or budget * sp >= prompt + response or (follows and said):
            continue
        said = True
        times = f" x {sp}" if sp > 1 else ""
        why = (
            f"a sequence may have {prompt} + {response} = {prompt + response} tokens, and a micro-batch {budget}{times}: "
            "the worker stops at the first that is longer"
        )
        sign = "+" if key.startswith("critic") else ""
        yield made.fault(key, why, f"{sign}{key}={-(-(prompt + response) // sp)}", code="dynamic-batch")


def _lengths(made: Composed) -> Iterator[Finding]:
    key = f"{RO}.max_model_len"
    longest, prompt, response = (
        made.number(key),
        made.number("data.max_prompt_length"),
        made.number("data.max_response_length"),
    )
    if longest is not None and prompt is not None and response is not None and longest < prompt + response:
        why = f"prompts and responses have up to {prompt} + {response} = {prompt + response} tokens"
        yield made.fault(key, why, f"{key}={prompt + response}", code="lengths")


def _divisor(of: int, wanted: int) -> int:
    """The largest that is not more than wanted."""
    return next(size for size in range(min(wanted, of), 0, -1) if of % size == 0)


def _multiple(prompts: int, share: int, n: int) -> int:
    """The nearest number of prompts, upwards, whose samples are shared out evenly."""
    return next(size for size in range(prompts, prompts + share + 1) if size * n % share == 0)
