"""verl on the platform of the CPU, in this process."""

from __future__ import annotations

from verl.plugin.platform import set_platform

from verl_shard.verl_plugin.platform_cpu import PlatformCPU

# verl looks for its platform once in a process, and finds a GPU where there is one.
set_platform(PlatformCPU())
