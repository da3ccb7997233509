"""Rewards as people bring them: a function, a model, or several of both with weights; one score a response."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, Finding, RunError, config_error

Function = Callable[..., Any]
ScoreMany = Callable[[Sequence[tuple[Sequence[Mapping[str, Any]], str]]], list[float]]
"""Scores several (messages, response), in their order."""

TAKES = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt", "response", "messages")
"""What a reward function may take, by name: verl's four, and the prompt's last message, the response (solution_str by
another name) and the prompt's messages."""
MESSAGES = "messages_json"
"""The key of extra_info in which the prompt's messages stand."""


@dataclass(frozen=True)
class Part:
    """One reward of a weighted sum. source: a function, "file.py:name" or "pkg://module:name", or a model's folder or id."""

    name: str
    source: Any
    weight: float = 1.0
    model: Mapping[str, Any] | None = None
    """For a model: how to load it and score with it, the arguments of RewardModel."""


def load_here(path: str, settings: Mapping[str, Any]) -> ScoreMany:
    """A reward model in this process."""
    from verl_shard.training.reward_model import RewardModel

    return RewardModel(path, **settings).score_many


@dataclass
class Rewards:
    """All rewards of a run; can be pickled, and loads what it needs when it first scores.

    models: how a reward model, by path and settings, comes to score; where a run is unpickled it may be another way.
    """

    parts: tuple[Part, ...]
    models: Callable[[str, Mapping[str, Any]], ScoreMany] = load_here
    _ready: dict[str, Any] = field(default_factory=dict, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def compute_score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Any:
        """With verl's arguments and its result: a score, or of several rewards {"score": weighted sum, name: score ...}.

        Raises RunError for a score that is no finite number, with the reward's name and the response.
        """
        return self.compute_scores([
            {"data_source": data_source, "solution_str": solution_str, "ground_truth": ground_truth, "extra_info": extra_info}
        ])[0]  # fmt: skip

    def compute_scores(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """As compute_score, for several at once: a model scores them in batches. rows: the arguments of each."""
        given = [_given(row) for row in rows]
        by_part = [self._results(part, given) for part in self.parts]
        if len(self.parts) == 1 and self.parts[0].weight == 1.0:
            return by_part[0]
        made = []
        for results in zip(*by_part, strict=True):
            numbers = [result["score"] if isinstance(result, Mapping) else result for result in results]
            total = sum(part.weight * number for part, number in zip(self.parts, numbers, strict=True))
            named = {part.name: number for part, number in zip(self.parts, numbers, strict=True)}
            made.append({"score": total, **named})
        return made

    def move(self, model: Mapping[str, Any]) -> None:
        """Has reward models be where these settings say. What is loaded is released before it is loaded anew, as both may
        not fit; where that fails it stays with the old settings, and is loaded again when it next scores."""
        with self._lock:
            before, loaded = self.parts, [part.name for part in self.parts if part.model and part.name in self._ready]
            for name in loaded:
                del self._ready[name]
            _give_memory_back()
            self.parts = tuple(replace(part, model=dict(model)) if part.model is not None else part for part in before)
            try:
                self._ready |= {part.name: self._load(part) for part in self.parts if part.name in loaded}
            except BaseException:
                self.parts = before
                raise

    def _results(self, part: Part, given: Sequence[Mapping[str, Any]]) -> list[Any]:
        """What one reward says of each response, its score a finite number."""
        with self._lock:
            # verl's workers call from many threads, and a model is to be loaded once.
            if part.name not in self._ready:
                self._ready[part.name] = self._load(part)
        ready = self._ready[part.name]
        if part.model is not None:
            results = ready([(row["messages"], row["response"]) for row in given])
        else:
            results = [ready(**_arguments(ready, row)) for row in given]
        return [_checked(part, result, row["response"]) for result, row in zip(results, given, strict=True)]

    def _load(self, part: Part) -> Any:
        if part.model is not None:
            return self.models(str(part.source), part.model)
        return _named(part.source, "reward_model") if isinstance(part.source, str) else part.source


def _give_memory_back() -> None:
    import gc

    import torch

    gc.collect()  # hooks and what they are on hold each other
    torch.cuda.empty_cache()


def _given(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a reward may take, by name."""
    info = dict(row.get("extra_info") or {})
    messages, response = json.loads(info.get(MESSAGES) or "[]"), row["solution_str"]
    return {
        "data_source": row["data_source"], "solution_str": response, "ground_truth": row["ground_truth"],
        "extra_info": info, "prompt": str(messages[-1]["content"]) if messages else "", "response": response,
        "messages": messages,
    }  # fmt: skip


def _checked(part: Part, result: Any, response: str) -> Any:
    score: Any = result.get("score") if isinstance(result, Mapping) else result
    try:
        number = float(score)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        shown = response if len(response) < 200 else response[:200] + "..."
        raise RunError(f"the reward {part.name} gave {score!r}, which is no finite number, for the response {shown!r}")
    return {**result, "score": number} if isinstance(result, Mapping) else number


def read_rewards(given: Any, model_settings: Mapping[str, Any]) -> Rewards:
    """From what was given as reward_model: one reward, or a list of rewards and (reward, weight) pairs.

    model_settings: how a reward model is loaded. Raises ConfigError for every fault of a signature, a name or a weight.
    """
    faults: list[Finding] = []
    parts: list[Part] = []
    for index, item in enumerate(given if isinstance(given, list) else [given]):
        where = f"reward_model[{index}]" if isinstance(given, list) else "reward_model"
        source, weight = item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            faults.append(_fault("reward-weight", where, weight, "not a weight", "Give (reward, number)"))
            continue
        try:
            parts.append(_part(source, float(weight), model_settings, where))
        except ConfigError as error:
            faults += error.findings
    names = [part.name for part in parts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        why = f"{', '.join(twice)} is there more than once, and rewards are told apart by name"
        faults.append(_fault("reward-twice", "reward_model", names, why, "Give functions of different names"))
    if not parts and not faults:
        faults.append(_fault("no-reward", "reward_model", given, "the list is empty", "Give a reward"))
    if faults:
        raise ConfigError(faults)
    return Rewards(tuple(parts))


def is_function(source: Any) -> bool:
    """Whether a reward is a function or the name of one, and not a model."""
    named = isinstance(source, str) and (source.startswith("pkg://") or ".py:" in source)
    return named or (callable(source) and not hasattr(source, "state_dict"))


def _part(source: Any, weight: float, model_settings: Mapping[str, Any], where: str) -> Part:
    if not is_function(source):
        if not isinstance(source, str | Path):
            why = "neither a function nor a model's folder or id"
            raise config_error("not-a-reward", where, type(source).__name__, why, "Give one of these")
        return Part(Path(str(source)).name, str(source), weight, dict(model_settings))
    function = _named(source, where) if isinstance(source, str) else source
    check_signature(function, where)
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(source, str) and not source.startswith("pkg://"):
        path, _, attribute = source.rpartition(":")
        source = f"{Path(path).expanduser().resolve()}:{attribute}"
    return Part(name, source, weight)


def check_signature(function: Function, where: str) -> None:
    """Raises ConfigError unless the function can be called with some of TAKES, by name, and returns its score at once."""
    shown = getattr(function, "__name__", repr(function))
    fix = f"Take some of {', '.join(TAKES)}, by name"
    if inspect.iscoroutinefunction(function):
        raise config_error("async-reward", where, shown, "it is a coroutine function", "Give an ordinary function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise config_error("reward-signature", where, shown, f"its signature cannot be read ({error})", fix) from error
    kinds = inspect.Parameter
    odd = [
        p.name for p in parameters
        if (p.kind is kinds.POSITIONAL_ONLY)
        or (p.name not in TAKES and p.default is kinds.empty and p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL))
    ]  # fmt: skip
    if odd:
        raise config_error(
            "reward-signature", where, shown, f"it takes {', '.join(odd)}, which no reward is given", fix
        )
    if not any(p.name in TAKES or p.kind is kinds.VAR_KEYWORD for p in parameters):
        raise config_error("reward-signature", where, shown, "it takes nothing of the response", fix)


def _arguments(function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


def _named(source: str, where: str) -> Function:
    """The function behind "file.py:name" or "pkg://module:name"."""
    path, _, name = source.rpartition(":")
    try:
        if path.startswith("pkg://"):
            module = importlib.import_module(path.removeprefix("pkg://"))
        else:
            file = Path(path).expanduser()
            spec = importlib.util.spec_from_file_location(f"verl_shard_reward_{file.stem}", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    except (ImportError, OSError, SyntaxError) as error:
        why = f"it cannot be imported ({error})"
        raise config_error("no-reward-function", where, source, why, 'Write "file.py:name"') from error
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise config_error("no-reward-function", where, source, f"it has no function {name}", 'Write "file.py:name"')
    found: Function = function
    return found


def _fault(code: str, where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, where, str(given), why, fix)
