"""verl on the platform of the CPU, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from verl.plugin.platform import set_platform

from verl_shard.verl_plugin.platform_cpu import PlatformCPU

# verl looks for its platform once in a process, and finds a GPU where there is one.
set_platform(PlatformCPU())


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models as small as these are quicker on one thread, many times so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
