"""What the ladder, elastic and offload-advice have in common: how they are asked, what they run on, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from verl_shard.bench.machine import Machine, in_a_process, look, named_config, read_limit
from verl_shard.bench.record import tell
from verl_shard.common.errors import Faults, RunError
from verl_shard.common.outputs import check_outputs
from verl_shard.common.tables import err
from verl_shard.config.cards import card_of_memory

L = TypeVar("L")
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """The options. result, picture: where JSON and a PNG go. model: a language model of the zoo, "llama-1b" or "tiny"; None is
    the bench's own choice for the machine. quick: a smaller load, and fewer repeats. gpu_memory: such as "80GiB": torch gets
    no more of each GPU, as if it were a smaller one."""

    result: Path | None = None
    picture: Path | None = None
    model: str | None = None
    quick: bool = False
    gpu_memory: str | None = None


@dataclass(frozen=True)
class Sizes(Generic[T]):
    """A model or a load: on a GPU, on one with `quick`, without one, and on several GPUs, where that is another one."""

    full: T
    quick: T
    on_cpu: T
    several: T | None = None

    def of(self, found: Machine, *, quick: bool) -> T:
        if not found.gpus:
            return self.on_cpu
        if quick:
            return self.quick
        return self.several if found.gpus > 1 and self.several is not None else self.full


@dataclass(frozen=True)
class Setting(Generic[L]):
    """What is run on what. name: of the model. limit: bytes that torch may take of each GPU, None for all."""

    found: Machine
    name: str
    config: Any
    load: L
    limit: int | None = None

    @property
    def room(self) -> int:
        """Bytes that torch can take of each GPU, 0 without one."""
        return self.limit or self.found.memory


def opened(asked: Asked, models: Sizes[str], loads: Sizes[L]) -> Setting[L]:
    """Looks at the machine and chooses. Raises ConfigError for an unknown model, for a limit that cannot be, and for files
    that could not be written in the end."""
    faults, config = Faults(), None
    with faults.gathering():
        check_outputs(out=asked.result, picture=asked.picture)
    with faults.gathering():
        config = named_config(asked.model or models.full)
    with faults.gathering():
        if asked.gpu_memory is not None:
            card_of_memory(asked.gpu_memory)  # refuses 80, which would be 80 bytes
    faults.check()
    found = look(config)
    name = asked.model or models.of(found, quick=asked.quick)
    load = loads.of(found, quick=asked.quick)
    return Setting(found, name, named_config(name), load, read_limit(asked.gpu_memory, found))


NOT_REACHED = "the bench was ended before it was measured"


def each_alone(
    runs: Mapping[str, Callable[[], T]],
    said: Callable[[str, T], str],
    missing: dict[str, str],
    keep: Callable[[Sequence[T], Mapping[str, str]], None],
) -> dict[str, T]:
    """What each run made, by its name: each in a process of its own, so that one that runs out of memory leaves nothing to
    the next. said: a line on what was made. One that dies is added to `missing`, with why.

    keep: gets what there is and what is missing before each run, should the bench be ended in it.
    Raises RunError when none made anything.
    """
    made: dict[str, T] = {}
    for at, (name, run) in enumerate(runs.items()):
        if made:
            keep(list(made.values()), {**missing, **dict.fromkeys(list(runs)[at:], NOT_REACHED)})
        ran = in_a_process(run)
        if ran.made is None:
            err.print(f"{name}: {ran.why}", style="red")
            missing[name] = ran.why
            continue
        made[name] = ran.made
        err.print(said(name, ran.made))
    if not made:
        raise RunError("; ".join(f"{name}: {why}" for name, why in missing.items()))
    return made


def left_out_words(record: Mapping[str, Any]) -> list[str]:
    """A sentence for each thing that a record says was left out."""
    return [f"Left out: {what}: {why}." for what, why in record["left_out"].items()]


def keep(asked: Asked, setting: Setting[Any], schema: str, record: Mapping[str, Any]) -> None:
    """Writes the record as far as it has come: a bench that is ended by its time limit loses nothing that it measured."""
    tell(schema, record, [], result=asked.result, facts=setting.found.facts)


def finish(
    asked: Asked,
    setting: Setting[Any],
    schema: str,
    record: Mapping[str, Any],
    shown: Iterable[Any],
    draw: Callable[[Mapping[str, Any], Path], None],
) -> None:
    """Prints what is shown, and writes the record and draws it where that is asked."""
    tell(schema, record, shown, result=asked.result, facts=setting.found.facts)
    if asked.picture is not None:
        draw(record, asked.picture)
