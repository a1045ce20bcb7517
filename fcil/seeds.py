"""Independent random streams from one run's seed, the same in every process."""

import hashlib


def seed_of(*key: int | str) -> int:
    """Return a 63-bit seed for `key`, e.g. (run, client, step); different keys give unrelated streams."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
