"""The replicas of a served reward model, from outside of the run that asks them: some more, some fewer, while it trains."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayTaskError

from verl_shard.common.errors import RunError
from verl_shard.verl_plugin.reward.replicas import ROUTER


def replicas() -> dict[str, int]:
    """The addresses of the running job's replicas, with the requests that each has not answered."""
    found: dict[str, int] = _asked(find_router().addresses.remote())
    return found


def add_replica(address: str) -> None:
    """Has requests go to the server at `address` too. Raises RunError where none answers there."""
    _asked(find_router().add.remote(address))


def remove_replica(address: str) -> None:
    """Sends no more requests there, and returns once those it has are answered; its GPUs then do nothing. Raises RunError
    for the last replica, and where there is none."""
    _asked(find_router().remove.remote(address))


def find_router() -> Any:
    """The router of the job that runs on this machine's Ray cluster, whichever namespace it is in.

    Raises RunError where no cluster is found, no job serves a reward model, or several do.
    """
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise RunError(f"no Ray cluster runs here: {error}") from error
    spaces = [
        named["namespace"] for named in ray.util.list_named_actors(all_namespaces=True) if named["name"] == ROUTER
    ]
    if len(spaces) != 1:
        said = f"{len(spaces)} jobs on this cluster serve a reward model" if spaces else "no job serves a reward model"
        raise RunError(f"{said}: replicas are those of one run with reward.reward_model.enable=true")
    return ray.get_actor(ROUTER, namespace=spaces[0])


def _asked(called: Any) -> Any:
    """What the router says, or raises, without Ray's words."""
    try:
        return ray.get(called)
    except RayTaskError as error:
        raise error.cause from None
