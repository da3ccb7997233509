"""One seed for a run; every other one comes from it."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: object) -> int:
    """A seed in [0, 2**63) that depends on `seed` and all of `names`, the same on every machine and Python.

    It is the BLAKE2b hash (RFC 7693) of 8 bytes of them as text, without its last bit.
    """
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()) >> 1
