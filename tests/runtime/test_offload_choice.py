"""What "auto" chooses, and what it says."""

from __future__ import annotations

import pytest

from verl_shard.common.errors import DoesNotFitError
from verl_shard.runtime.offload_choice import Share, choose_offload

GIB = 2**30


def _share(head_room: float, *, embedding: int = 1, device: str = "cuda:0") -> Share:
    """13 GiB of a 7B model: 26 blocks of half a GiB are 13, and 1 GiB of embeddings; bytes in GiB."""
    return Share(
        device=device,
        weights=14 * GIB,
        blocks=13 * GIB,
        largest_block=GIB // 2,
        embedding=embedding * GIB,
        largest_module=GIB,
        head_room=int(head_room * GIB),
    )


@pytest.mark.parametrize(
    ("head_room", "embedding", "host", "ahead", "chosen"),
    [
        (14, 1, 0, 2, ("none", False)),  # to the byte
        (13.9, 1, None, 2, ("stream", False)),
        (2, 1, 13, 2, ("stream", False)),  # 1 outside and two buffers of a half
        (1.9, 1, 14, 2, ("stream", True)),  # the buffers alone
        (2, 1, 14, 3, ("stream", True)),
        (1, 1, 14, 2, ("stream", True)),
        (1, 1, 13, 2, None),  # the host has no room for the embedding, and none for all of it
        (1.9, 0, 14, 2, ("cpu_offload", False)),  # a tied one does not go to the host
        (0.99, 1, 99, 2, None),
        (0.99, 1, 99, 1, ("stream", True)),
        (2, 1, 12.9, 2, None),  # no room for the blocks
    ],
)
def test_the_fastest_way_that_fits(
    head_room: float, embedding: int, host: float | None, ahead: int, chosen: tuple[str, bool] | None
) -> None:
    room = None if host is None else int(host * GIB)
    if chosen is None:
        with pytest.raises(DoesNotFitError, match=r"resident it would take 14\.00 GiB of"):
            choose_offload([_share(head_room, embedding=embedding)], ahead=ahead, host_room=room)
    else:
        choice = choose_offload([_share(head_room, embedding=embedding)], ahead=ahead, host_room=room)
        assert (choice.offload, choice.embeddings_on_host) == chosen


def test_it_says_why_with_the_bytes() -> None:
    def why(share: Share) -> str:
        return choose_offload([share], ahead=2, host_room=None).why

    assert why(_share(20)) == "it fits: 14.00 GiB of 20.00 GiB on cuda:0"
    assert why(_share(3)) == (
        "resident it would take 14.00 GiB of 3.00 GiB on cuda:0; with its blocks on the host, 2.00 GiB of 3.00 GiB on cuda:0"
    )
    assert why(_share(1.5)) == (
        "resident it would take 14.00 GiB of 1.50 GiB on cuda:0; with its blocks and embedding on the host, "
        "1.00 GiB of 1.50 GiB on cuda:0"
    )
    assert why(_share(1.5, embedding=0)) == (
        "resident it would take 14.00 GiB of 1.50 GiB on cuda:0; streamed, 2.00 GiB of 1.50 GiB on cuda:0; "
        "module by module, 1.00 GiB of 1.50 GiB on cuda:0"
    )
    with pytest.raises(DoesNotFitError, match=r"streamed, 1\.00 GiB of 512\.00 MiB on cuda:0\. Give it a larger GPU"):
        why(_share(0.5))
    with pytest.raises(DoesNotFitError, match=r"the host has room for 1\.00 GiB of the 13\.00 GiB of its blocks"):
        choose_offload([_share(3)], ahead=2, host_room=GIB)


def test_no_gpu_has_nothing_to_offload() -> None:
    choice = choose_offload([], ahead=2, host_room=None)
    assert (choice.offload, choice.why) == ("none", "there is no GPU to offload from")


def test_of_several_gpus_each_must_fit() -> None:
    wide, narrow = _share(20), _share(3, device="cuda:1")
    assert choose_offload([wide, _share(14, device="cuda:1")], ahead=2, host_room=None).offload == "none"
    choice = choose_offload([wide, narrow], ahead=2, host_room=None)
    assert choice.offload == "stream"
    assert choice.why == (
        "resident it would take 14.00 GiB of 3.00 GiB on cuda:1; with its blocks on the host, "
        "2.00 GiB of 20.00 GiB on cuda:0, 2.00 GiB of 3.00 GiB on cuda:1"
    )
    with pytest.raises(DoesNotFitError):  # accelerate's way computes on one device
        choose_offload([wide, _share(1.9, embedding=0, device="cuda:1")], ahead=2, host_room=None)
