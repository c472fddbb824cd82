"""Shuffling without a table: the order of any number of things, one place at a time."""

from __future__ import annotations

import hashlib

_ROUNDS = 6
_MASK = (1 << 64) - 1


def order_key(*parts: int) -> int:
    """A key for `permute`, from integers such as seed and epoch; other integers give an unrelated order."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permute(place: int, count: int, key: int) -> int:
    """The number in 0..count-1 that stands at `place` of the permutation `key`.

    A Feistel network over the next even number of bits, applied again until it lands below `count` (cycle walking): a bijection for any
    round function, needing no memory, so that a worker can shuffle a billion samples.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), section 3.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = place
    while True:
        left, right = value >> half, value & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(right + key + number * 0x9E3779B97F4A7C15) & mask)
        value = left << half | right
        if value < count:
            return value


def _mix(value: int) -> int:
    """The finaliser of splitmix64.

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (OOPSLA 2014), figure 18.
    """
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
