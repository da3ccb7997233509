"""Memory that runs out in a mini-batch: it is done again in smaller pieces, and nothing but the pieces is different."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl_plugin.test_engine_batches import ROWS, _batch, _engine, _group, _laid_out, folder

from verl_shard.common.errors import ConfigError, DoesNotFitError
from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.verl_plugin.engine_batches import MicroBatches

__all__ = ["_group", "folder"]
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1.00 GiB is free."
)
OOM = torch.OutOfMemoryError

pytestmark = pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice")


def _loss(model_output: dict[str, Any], data: TensorDict, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Of all tokens but the last of each sequence: verl takes what follows in the row for the next one there."""
    del dp_group
    last = data["input_ids"].offsets()[1:] - 1
    weights = data["input_ids"].values().float().index_fill(0, last, 0.0)
    return -(model_output["log_probs"].values() * weights).sum() / 100, {"rows": len(data)}


def _gradients(engine: Any, batch: TensorDict) -> tuple[dict[str, torch.Tensor], Any]:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        made = engine.forward_backward_batch(batch, _loss)
        return {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}, made


class RunsOut:
    """Fails at the n-th time of being passed."""

    def __init__(self, at: int, times: int = 1) -> None:
        self.left, self.times = at, times

    def __call__(self) -> None:
        self.left -= 1
        if self.left <= 0 and self.times:
            self.times -= 1
            raise OOM(SAID)


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, RunsOut], None]:
    """Lets memory run out in a part of the work: in a block's forward, where losses are made, or in the backward."""

    def install(engine: Any, part: str, out: RunsOut) -> None:
        if part == "forward":
            engine.module.model.layers[2].mlp.register_forward_hook(lambda *_: out())
        elif part == "backward":
            engine.module.model.layers[1].mlp.register_full_backward_hook(lambda *_: out())
        else:
            finish = MicroBatches.finish

            def running_out(self: Any, *given: Any) -> Any:
                out()
                return finish(self, *given)

            monkeypatch.setattr(MicroBatches, "finish", running_out)

    return install


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(folder / "events.jsonl") if line["kind"] == kind]


@pytest.mark.parametrize("part", ["forward", "loss", "backward"])
@pytest.mark.parametrize("keys", [{"micro": 4}, {"tokens": 24, "packed": True}], ids=["sequences", "tokens"])
def test_the_gradients_of_an_undisturbed_mini_batch(
    folder: Path, tmp_path: Path, during: Callable[..., None], part: str, keys: dict[str, Any]
) -> None:
    expected, _ = _gradients(_engine(folder), _batch(**keys))
    engine = _engine(folder)
    during(engine, part, RunsOut(2))
    found, made = _gradients(engine, _batch(**keys))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    assert sum(made["metrics"]["rows"]) == len(ROWS)
    (remedy,) = events(tmp_path, "remedy")
    half = "micro-batches of 2 sequences" if "micro" in keys else "micro-batches of 12 tokens"
    assert (remedy["where"], remedy["after"]) == ("update_actor", half)
    (report,) = events(tmp_path, "out-of-memory")
    assert report["said"].startswith("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert report["module"] == {"forward": "model.layers.2.mlp", "loss": "", "backward": ""}[part]
    # The next mini-batch begins with the smaller pieces, and another pass with what it was asked.
    assert engine.pieces["train"].ladder.taken == 1
    assert engine.pieces["forward"].ladder.taken == 0


def test_a_pipeline_first_has_fewer_in_flight(folder: Path, tmp_path: Path, during: Callable[..., None]) -> None:
    expected, _ = _gradients(_engine(folder), _batch(2))
    engine = _engine(folder, in_flight=4)
    links = _laid_out(engine)
    during(engine, "forward", RunsOut(3, times=2))
    with links:
        found, _ = _gradients(engine, _batch(2))
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    assert [line["after"] for line in events(tmp_path, "remedy")] == [
        "micro-batches of 2 sequences, 2 in flight",
        "micro-batches of 2 sequences",
    ]
    assert read_json_lines(tmp_path / "memory.jsonl").__next__()["in_flight"] == 1


@pytest.mark.parametrize(
    ("precision", "keys", "in_flight", "times"),
    [
        ("bf16-mixed", {"micro": 4}, 1, 2),
        ("bf16-mixed", {"micro": 2}, 4, 3),
        ("bf16", {"tokens": 24, "packed": True}, 1, 1),
    ],
)
def test_gradients_in_bf16(
    folder: Path, during: Callable[..., None], precision: str, keys: dict[str, Any], in_flight: int, times: int
) -> None:
    """In smaller micro-batches, and first fewer in flight, within what bf16's rounding comes to: of each parameter 1 %."""
    expected, _ = _gradients(_engine(folder, precision=precision), _batch(**keys))
    engine = _engine(folder, precision=precision, in_flight=in_flight)
    during(engine, "forward", RunsOut(3 if in_flight > 1 else 2, times=times))
    with _laid_out(engine) if in_flight > 1 else nullcontext():
        found, _ = _gradients(engine, _batch(**keys))
    assert engine.pieces["train"].ladder.taken == times
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        wrong = (found[name].float() - gradient.float()).norm() / gradient.float().norm()
        assert wrong <= 1e-2, name
    # Other roundings there must be, or nothing was in bf16 or in smaller pieces.
    assert any((found[name] != gradient).any() for name, gradient in expected.items())


def test_scoring_goes_on_too(folder: Path, during: Callable[..., None]) -> None:
    def log_probs(engine: Any) -> list[torch.Tensor]:
        with engine.eval_mode():
            made = engine.forward_backward_batch(_batch(4), None, forward_only=True)
        return list(made["model_output"]["log_probs"].unbind())

    expected = log_probs(_engine(folder))
    engine = _engine(folder)
    during(engine, "forward", RunsOut(2))
    for one, other in zip(log_probs(engine), expected, strict=True):
        torch.testing.assert_close(one[:-1], other[:-1], rtol=1e-6, atol=1e-6)
    assert engine.pieces["forward"].ladder.taken == 1


@pytest.mark.parametrize("keys", [{"micro": 4}, {"tokens": 24, "packed": True}], ids=["sequences", "tokens"])
def test_smaller_pieces_while_another_process_has_the_memory(
    folder: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    expected, _ = _gradients(_engine(folder), _batch(**keys))
    engine = _engine(folder)
    pieces, shapes = engine.pieces["train"], list[torch.Size]()
    engine.module.model.layers[0].mlp.register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape[:2]))
    left = 1
    pieces.allocator.free = lambda: {"cpu": left}
    found, made = _gradients(engine, _batch(**keys))
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    assert sum(made["metrics"]["rows"]) == len(ROWS)
    # Sequences one by one, or as many tokens at once as the longest has.
    assert max(rows * length for rows, length in shapes) == 8
    smallest = {"micro": "micro-batches of 1 sequences", "tokens": "micro-batches of 8 tokens"}[next(iter(keys))]
    assert events(tmp_path, "remedy")[-1]["after"] == smallest
    assert not events(tmp_path, "out-of-memory")
    taken = pieces.ladder.taken
    assert taken == 2
    assert read_json_lines(tmp_path / "memory.jsonl").__next__().get("remedies", 0) == 0  # of the undisturbed engine
    left = 2**40
    for now in (taken, taken - 1, taken - 1, taken - 2):
        _gradients(engine, _batch(**keys))
        assert pieces.ladder.taken == now
    last = list(read_json_lines(tmp_path / "memory.jsonl"))
    assert [line.get("remedies", 0) for line in last] == [0, 2, 2, 1, 1, 0]


def test_an_allocator_that_is_off_looks_at_nothing(folder: Path) -> None:
    engine = _engine(folder, allocator="off")
    assert engine.pieces["train"].allocator is None
    _gradients(engine, _batch(4))
    with pytest.raises(ConfigError, match=r"actor\.device_map\.allocator = sometimes: no such choice"):
        _engine(folder, allocator="sometimes")


def test_one_sequence_that_does_not_fit_is_named(folder: Path, during: Callable[..., None]) -> None:
    engine = _engine(folder)

    def out(module: Any, given: Any, output: torch.Tensor) -> None:
        if output.shape[1] == 8:  # the third row is the longest
            raise OOM(SAID)

    engine.module.model.layers[2].mlp.register_forward_hook(out)
    with pytest.raises(DoesNotFitError) as caught:
        _gradients(engine, _batch(4))
    said = str(caught.value)
    assert said.startswith("update_actor: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert "Sequence 2 (8 tokens) of the batch alone does not fit. One of 8 tokens is estimated to take" in said
    assert all(parameter.grad is None for parameter in engine.module.parameters())


TWO = """
import sys
import warnings
import torch
from torch import nn
from verl_shard.common.errors import DoesNotFitError
from verl_shard.runtime.ladder import Ladder, Pieces
from verl_shard.verl_plugin.gradients import GradientAverager, same_parameters

warnings.simplefilter("ignore")
rank, store, where = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
same_parameters(model, None)
rows = [torch.randn(8, 8, generator=torch.Generator().manual_seed(process)) for process in (0, 1)]
expected = [
    sum(parts) / 2
    for parts in zip(*(torch.autograd.grad(model(x).square().sum(), list(model.parameters())) for x in rows))
]
averager = GradientAverager(model, None, 300)  # a bucket for each layer's weight
calls = 0


def out():
    global calls
    calls += 1
    if rank == 0 and (where == "always" or calls == {"first": 1, "averaging": 2}.get(where)):
        raise torch.OutOfMemoryError("CUDA out of memory.")


# Of a layer in the middle: in the last micro-batch some buckets have been sent by then.
model[3].register_full_backward_hook(lambda *_: out())


def run(pieces):
    parts = rows[rank].split(pieces.size)
    for number, part in enumerate(parts):
        loss = model(part).square().sum()
        if number < len(parts) - 1:
            loss.backward()
        else:
            with averager.averaging():
                loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def agree(state):
    worst = torch.tensor([state])
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    return int(worst)


def undo():
    model.zero_grad()
    averager.again()


ladder = Ladder("update_actor")
for repeat in range(2):
    model.zero_grad()
    try:
        found = ladder.work(
            run, Pieces(1, 4, total=8), undo=undo, too_large=str, settle=averager.catch_up, agree=agree
        )
    except DoesNotFitError as error:
        print("stopped", error)
        break
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(found, expected))
    print("well", ladder.taken)
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(("where", "said"), [("first", "well 1"), ("averaging", "well 1"), ("always", "stopped")])
def test_two_processes_go_on_together(tmp_path: Path, where: str, said: str) -> None:
    """One runs out before, or in the middle of, averaging. The other must neither wait for ever nor go on alone."""
    command = [sys.executable, "-c", TWO]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), where], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    for output in outputs:
        lines = output.splitlines()
        assert all(line.startswith(said) for line in lines), outputs
        assert len(lines) == (1 if where == "always" else 2)
