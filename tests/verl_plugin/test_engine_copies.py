"""A reference with several copies: what one copy gives, row by row, whichever way a batch is cut and whatever a copy meets."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fake_copies import FakeCopies
from runtime.fake_links import FakeLinks
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry
from verl_plugin.test_engine_batches import ROWS, _batch, _group, folder

from verl_shard.common.errors import ConfigError, DoesNotFitError
from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.planning.plan_file import SCHEMA, write_plan
from verl_shard.runtime.offload import offload_of
from verl_shard.runtime.stream_model import stream_model
from verl_shard.verl_plugin import engine_copies
from verl_shard.verl_plugin.config import DeviceMapEngineConfig
from verl_shard.verl_plugin.engine_copies import divide

__all__ = ["_group", "folder"]
LENGTHS = [len(row) for row in ROWS]
SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."
quiet = pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice")


def _ref(folder: Path, **engine: Any) -> Any:
    made = EngineRegistry.new(
        model_type="language_model",
        backend="device_map",
        model_config=HFModelConfig(
            path=str(folder), load_tokenizer=False, override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=False,
        ),
        engine_config=DeviceMapEngineConfig(role="ref", forward_only=True, **engine),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    made.initialize()
    return made


def _infer(engine: Any, data: TensorDict) -> dict[str, list[torch.Tensor]]:
    with engine.eval_mode():
        output = engine.infer_batch(data)
    return {name: list(value.unbind()) for name, value in output["model_output"].items()}


def _worst(found: Any, expected: Any) -> float:
    """The largest difference, of outputs with the same rows. The last token of a sequence has no next one: verl takes the one
    behind it in the row, which is another in another micro-batch."""
    assert found.keys() == expected.keys() == {"log_probs", "entropy"}
    pairs = [pair for name in found for pair in zip(found[name], expected[name], strict=True)]
    assert [tuple(one.shape) for one, _ in pairs] == [(length,) for length in LENGTHS] * 2
    return max(float((one[:-1] - other[:-1]).abs().max()) for one, other in pairs)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return _ref(folder)


@pytest.mark.parametrize(
    ("n", "keys", "exact"),
    [
        (2, {"micro": 2}, True),
        (3, {"micro": 1}, True),
        (2, {"micro": 2, "packed": True}, True),
        (3, {"micro": 4}, False),
        (2, {"tokens": 12}, False),
        (3, {"tokens": 40, "packed": True}, False),
    ],
    ids=str,
)
def test_all_rows_are_there_in_order_as_of_one_copy(
    folder: Path, alone: Any, n: int, keys: dict[str, Any], exact: bool
) -> None:
    engine = _ref(folder, copies_on=list(range(n)))
    expected, seen = _infer(alone, _batch(**keys)), []
    for copy in engine.copies.each:
        copy.module.register_forward_hook(lambda *_, copy=copy: seen.append((copy.device, threading.current_thread())))
    found = _infer(engine, _batch(**keys))
    assert _worst(found, expected) <= (0.0 if exact else 1e-6)
    assert {device for device, _ in seen} == set(range(n)), "each has some of the work"
    assert len({thread for _, thread in seen}) == n
    assert threading.main_thread() not in {thread for _, thread in seen}
    modules = [copy.module for copy in engine.copies.each]
    assert engine.module is modules[0]
    assert len({next(module.parameters()).data_ptr() for module in modules}) == n, "weights of their own"


def _sizes(data: TensorDict, n: int) -> list[list[int]]:
    return [sorted(rows) for rows, _, _ in divide(data, n)]


def test_shares_are_even_in_tokens_and_lose_no_row() -> None:
    """Of 35 tokens in 8 rows two copies have 17 and 18, and three 12 or so; whole micro-batches of rows that follow each other
    are of 9, 10, 10 and 6 tokens, and no two of them are nearer to half of it than 16 and 19."""
    assert sum(LENGTHS) == 35
    assert [sum(LENGTHS[row] for row in rows) for rows in _sizes(_batch(tokens=16), 2)] in ([17, 18], [18, 17])
    assert max(sum(LENGTHS[row] for row in rows) for rows in _sizes(_batch(tokens=16), 3)) <= 13
    assert sorted(sum(LENGTHS[row] for row in rows) for rows in _sizes(_batch(2), 2)) == [16, 19]
    for n in (1, 2, 3, 5, 8, 11):
        for data in (_batch(2), _batch(tokens=16)):
            assert sorted(row for rows in _sizes(data, n) for row in rows) == list(range(8))
            assert len(_sizes(data, n)) <= n
    # Two micro-batches of four are no work for three: four of two are.
    assert [int(part["micro_batch_size_per_gpu"]) for _, part, _ in divide(_batch(4), 3)] == [2, 2, 2]
    assert [calls for _, _, calls in divide(_batch(4), 3)].count(2) == 1
    # Rows that belong together are.
    together = tu.assign_non_tensor(_batch(tokens=16), force_group_size=2)
    for rows in _sizes(together, 2):
        assert all(row ^ 1 in rows for row in rows)


class RunsOut:
    """Fails at its first calls."""

    def __init__(self, error: Exception, times: int = 1) -> None:
        self.error, self.times = error, times

    def __call__(self, *_: Any) -> None:
        if self.times:
            self.times -= 1
            raise self.error


@quiet
def test_a_copy_without_memory_goes_on_in_smaller_pieces(
    folder: Path, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    engine = _ref(folder, copies_on=[2, 4])
    engine.copies.each[1].module.model.layers[2].mlp.register_forward_hook(RunsOut(torch.OutOfMemoryError(SAID)))
    found = _infer(engine, _batch(2))
    assert _worst(found, _infer(alone, _batch(2))) <= 1e-6
    assert [copy.pieces.ladder.taken for copy in engine.copies.each] == [0, 1]
    events = {line["kind"]: line for line in read_json_lines(tmp_path / "events.jsonl")}
    assert events["remedy"]["where"] == "ref_log_prob on GPU 4"
    assert events["remedy"]["after"] == "micro-batches of 1 sequences"
    assert events["out-of-memory"]["module"] == "model.layers.2.mlp"
    (line,) = [line for line in read_json_lines(tmp_path / "memory.jsonl") if "remedies" in line]
    assert (line["role"], line["phase"], line["remedies"]) == ("ref", "forward", 1)


@quiet
def test_errors_are_raised_as_they_are(folder: Path) -> None:
    engine = _ref(folder, copies_on=[0, 1])
    # Of the share that does not begin with the batch, so that places in it and in the batch differ.
    at = next(number for number, (rows, _, _) in enumerate(divide(_batch(2), 2)) if 0 not in rows)
    parts = [copy.module.model.layers[0].mlp for copy in engine.copies.each]
    always = parts[at].register_forward_hook(RunsOut(torch.OutOfMemoryError(SAID), times=99))
    with pytest.raises(
        DoesNotFitError, match=r"ref_log_prob: CUDA out of memory.*Sequence (\d) \((\d) tokens\)"
    ) as caught:
        _infer(engine, _batch(2))
    row, tokens = caught.value.args[0].split("Sequence ")[1].split(" tokens)")[0].split(" (")
    assert LENGTHS[int(row)] == int(tokens), "named by its place in the batch, not in the share"
    broken = parts[1 - at].register_forward_hook(RunsOut(KeyError("broken")))
    with pytest.raises(KeyError, match="broken"):  # and not that memory ran out besides
        _infer(engine, _batch(2))
    always.remove()
    broken.remove()
    assert len(_infer(engine, _batch(2))["log_probs"]) == len(ROWS)


def _where(engine: Any, links: FakeLinks) -> list[set[str]]:
    copies = [copy.module for copy in engine.copies.each] if engine.copies else [engine.module]
    return [{links.of(tensor) for tensor in (*module.parameters(), *module.buffers())} for module in copies]


MAP = {"model.embed_tokens": 1, "model.rotary_emb": 1, "model.norm": 2, "lm_head": 2} | {
    f"model.layers.{i}": 1 + i // 2 for i in range(4)
}


def test_it_moves_to_copies_and_back(folder: Path, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, links, expected = _ref(folder), FakeLinks(), _infer(alone, _batch(2))
    loads: list[Any] = []
    load = engine._load
    engine._load = lambda where: loads.append(where) or load(where)
    first = engine.module

    def check(*places: set[str], n_loads: int) -> None:
        assert _where(engine, links) == list(places)
        assert len(loads) == n_loads
        assert engine.module is engine.checkpoint_manager.model
        assert _worst(_infer(engine, _batch(2)), expected) == 0.0

    engine.move([2, 4], links=links)
    check({"gpu2"}, {"gpu4"}, n_loads=1)
    assert engine.module is first
    second = engine.copies.each[1].module
    engine.move([4, 3, 0], links=links)  # one stays, one moves, one comes
    check({"gpu4"}, {"gpu3"}, {"gpu0"}, n_loads=2)
    assert [copy.module for copy in engine.copies.each[:2]] == [second, first]
    del second
    gone = weakref.ref(engine.copies.each[2].module)
    engine.move([3], links=links)
    check({"gpu3"}, n_loads=2)
    assert gone() is None
    engine.move([1, 2], links=links)
    check({"gpu1"}, {"gpu2"}, n_loads=3)
    gone = weakref.ref(engine.copies.each[1].module)
    with monkeypatch.context() as patched:

        def move_model(*given: Any, real: Any = engine_copies.move_model, **more: Any) -> None:
            assert gone() is None, "it would take room where the other goes"
            real(*given, **more)

        patched.setattr(engine_copies, "move_model", move_model)
        engine.move(MAP, links=links)
    assert engine.copies is None
    assert _where(engine, links) == [{"gpu1", "gpu2"}]
    assert gone() is None
    with links:
        assert _worst(_infer(engine, _batch(2)), expected) == 0.0
    engine.move([1, 0], links=links)
    check({"gpu1"}, {"gpu0"}, n_loads=4)
    engine.move({"": 0}, links=links)
    assert (engine.copies, _where(engine, links)) == (None, [{"gpu0"}])
    assert _worst(_infer(engine, _batch(2)), expected) == 0.0


def test_what_cannot_move_is_where_it_was(folder: Path, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, links, expected = _ref(folder, copies_on=[0, 1]), FakeLinks(), _infer(alone, _batch(2))
    with pytest.raises(ConfigError):
        engine.move({"model": 0}, links=links)
    assert engine.copies.devices == (0, 1)
    assert _worst(_infer(engine, _batch(2)), expected) == 0.0

    def full(_: Any) -> Any:
        raise DoesNotFitError("GPU 3 is full")

    monkeypatch.setattr(engine, "_load", full)
    before = [copy.module for copy in engine.copies.each]
    with pytest.raises(DoesNotFitError, match="GPU 3 is full"):
        engine.move([2, 3, 1], links=links)
    assert [copy.module for copy in engine.copies.each] == before
    assert _where(engine, links) == [{"host"}, {"host"}], "nothing moved"

    class Links:
        def room(self, device: torch.device) -> int:
            return 2**20 if device.index == 3 else 10

    monkeypatch.setattr(engine_copies, "GpuLinks", Links)
    with pytest.raises(DoesNotFitError, match=r"LlamaForCausalLM cannot be copied: GPU 5 has 10 B free for 177.16 KiB"):
        engine.move([2, 3, 5, 1])
    assert engine.copies.devices == (0, 1)


@pytest.mark.parametrize(
    "entry",
    [
        {"copies_on": [3, 1], "precision": "fp32"},
        {"devices": [3, 1], "device_map": None, "precision": "fp32", "settings": {"strategy": "data_parallel"}},
    ],
)
def test_the_plan_says_where(folder: Path, tmp_path: Path, entry: dict[str, Any]) -> None:
    write_plan(tmp_path / "plan.yaml", {"ref": entry})
    assert SCHEMA in (tmp_path / "plan.yaml").read_text()
    engine = _ref(folder, plan=str(tmp_path / "plan.yaml"))
    assert engine.copies.devices == (3, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"copies_on": [0, 0]}, r"ref.device_map.copies_on = \[0, 0\]: a GPU is named twice"),
        ({"copies_on": "0-1"}, r"copies_on = 0-1: not a list of GPU ids. Write \[2, 4\]"),
        ({"copies_on": [-1]}, "not a list of GPU ids"),
        ({"copies_on": [0, 1], "device_map": {"": 0}}, "device_map says where one copy is"),
        ({"copies_on": [0, 1], "role": "actor"}, "the actor is trained, and copies of it would drift apart"),
        ({"copies_on": [0, 1], "plan": __file__}, "the plan says where the ref is. Leave it out"),
    ],
)
def test_faults_of_the_configuration(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DeviceMapEngineConfig(**{"role": "ref", "forward_only": True, **given})


def test_a_streamed_reference_has_its_weights_in_host_memory_for_each_copy(folder: Path, alone: Any) -> None:
    """On the CPU nothing is offloaded, which is said of each copy. Made-up copies to a GPU: blocks times micro-batches."""
    with pytest.warns(UserWarning, match="it computes on the CPU"):
        engine = _ref(folder, copies_on=[0, 1], offload="stream")
    expected = _infer(alone, _batch(2))
    assert _worst(_infer(engine, _batch(2)), expected) == 0.0
    logs, blocks = [], len(engine.module.model.layers)
    for copy in engine.copies.each:
        assert offload_of(copy.module) is not None
        link = FakeCopies()
        streamed = stream_model(copy.module, {"": link.device}, copies=lambda _, link=link: link)
        assert streamed.pinned_bytes >= sum(p.nbytes for p in copy.module.model.layers.parameters())
        logs.append(link.log)
    assert _worst(_infer(engine, _batch(2)), expected) == 0.0
    assert [sum(entry[0] == "copy" for entry in log) for log in logs] == [2 * blocks, 2 * blocks]
