"""Gradients averaged over two processes, against the average computed by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from verl_shard.verl_plugin.gradients import make_buckets

SCRIPT = """
import sys
import torch
from torch import nn
from verl_shard.verl_plugin.gradients import GradientAverager, same_parameters

rank, store, bucket_bytes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


sent, begun = [], []
reduce = torch.distributed.all_reduce


def all_reduce(tensor, **options):
    sent.append(len(tensor))
    return reduce(tensor, **options)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.often, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.sometimes, self.low = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x, which):
        x = self.first(x)
        if self.training and x.requires_grad:
            x.register_hook(lambda _: begun.append(len(sent)))
        x = self.often(x)
        if which == 0:  # like an expert to which only one process sends tokens
            x = self.sometimes(x)
        return self.low(self.frozen(x).bfloat16()).float().square().sum()


torch.manual_seed(rank)
model = Model()
with torch.no_grad():
    model.frozen.weight.copy_(torch.arange(16.0).reshape(4, 4) / 16)  # as from a file
    model.frozen.bias.zero_()
same_parameters(model, None)
weights = {name: value.clone() for name, value in model.state_dict().items()}

torch.manual_seed(7)
micro_batches = [[torch.randn(3, 4) for _ in range(2)] for _ in range(2)]  # by process

expected = {}
for process in (0, 1):
    model.zero_grad()
    for x in micro_batches[process]:
        model(x, process).backward()
    for name, param in model.named_parameters():
        if param.grad is not None:
            expected[name] = expected.get(name, 0) + param.grad.float() / 2

torch.distributed.all_reduce = all_reduce
averager = GradientAverager(model, None, bucket_bytes)
before = []
for repeat in range(2):
    model.zero_grad()
    model(micro_batches[rank][0], rank).backward()
    sent.clear()
    begun.clear()
    with averager.averaging():
        model(micro_batches[rank][1], rank).backward()
    before += begun  # buckets that were under way when the backward came to the first layer
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert set(found) == set(expected), set(found) ^ set(expected)
    for name, grad in found.items():
        torch.testing.assert_close(grad.float(), expected[name], rtol=2e-2 if name.startswith("low") else 1e-5, atol=1e-6)
every = [None, None]
torch.distributed.all_gather_object(every, {name: value for name, value in weights.items() if "frozen" not in name})
assert all(torch.equal(every[0][name], every[1][name]) for name in every[0]), "the same weights to begin with"
print(f"{len(averager.buckets)} buckets, under way {before}")
"""


@pytest.mark.parametrize(
    ("bucket_bytes", "buckets", "under_way"),
    [
        # Of 5 layers that train the last two, of which one is the first process's alone; then also the one before a layer
        # that gets no gradient. A bucket for each weight and bias.
        (1, 10, ([4, 6], [2, 2])),
        # Two of the three hold parameters that get none, until those have a bucket of their own.
        (100, 4, ([0, 2], [0, 0])),
        (2**20, 3, ([1, 1], [1, 1])),
    ],
)
def test_two_processes(bucket_bytes: int, buckets: int, under_way: tuple[list[int], list[int]], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), str(bucket_bytes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended[0][1][-2000:] + ended[1][1][-2000:]
    for rank, (out, _) in enumerate(ended):
        assert f"{buckets} buckets, under way {under_way[rank]}" in out, out


def test_buckets_are_of_one_dtype_and_hold_all_that_trains_once() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16) * 3))
    model[0].weight.requires_grad_(False)
    for size in (1, 300, 10**6):
        buckets = make_buckets(model.parameters(), size)
        held = [param for bucket in buckets for param in bucket.params]
        assert sorted(map(id, held)) == sorted(id(param) for param in model.parameters() if param.requires_grad)
        assert all(len({param.dtype for param in bucket.params}) == 1 for bucket in buckets)
    assert len(make_buckets(model.parameters(), 10**6)) == 2


def test_buckets_are_of_one_device_the_last_ones_first() -> None:
    devices = ["cpu", "cpu", "meta", "meta"]  # a model over two devices
    model = nn.Sequential(*(nn.Linear(8, 8, device=device) for device in devices))
    buckets = make_buckets(model.parameters(), 8 * 8 * 4)
    assert [{param.device.type for param in bucket.params} for bucket in buckets] == [
        {"meta"},
        {"meta"},
        {"cpu"},
        {"cpu"},
    ]
