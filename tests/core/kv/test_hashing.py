"""Block hashes: what they are equal for, and what keeps them apart."""

import hashlib
import struct

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.kv.hashing import start_chain

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def hashes_of(token_ids: list[int], block_size: int = 4, *, seed: int = 0, salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    start_chain(seed, cache_salt=salt).extend(hashes, token_ids, block_size)
    return hashes


@given(token_ids=tokens, seed=st.integers(0, 2**64 - 1))
def test_unsalted_chain_is_seeded_xxh3_over_parent_and_int32_tokens(token_ids: list[int], seed: int) -> None:
    parent, expected = start_chain(seed).root, []
    for i in range(len(token_ids) // 4):
        parent = xxhash.xxh3_128(parent + struct.pack("=4i", *token_ids[4 * i : 4 * i + 4]), seed=seed).digest()
        expected.append(parent)
    assert hashes_of(token_ids, seed=seed) == expected


@given(token_ids=tokens)
def test_salted_chain_is_sha256(token_ids: list[int]) -> None:
    parent, expected = start_chain(0, cache_salt="tenant").root, []
    for i in range(len(token_ids) // 4):
        parent = hashlib.sha256(parent + struct.pack("=4i", *token_ids[4 * i : 4 * i + 4])).digest()
        expected.append(parent)
    assert hashes_of(token_ids, salt="tenant") == expected


@given(token_ids=tokens, cut=st.integers(0, 20))
def test_extending_in_parts_gives_the_same_chain(token_ids: list[int], cut: int) -> None:
    chain, hashes = start_chain(5), list[bytes]()
    chain.extend(hashes, token_ids[:cut], 4)
    chain.extend(hashes, token_ids, 4)
    assert hashes == hashes_of(token_ids, seed=5)


@given(first=tokens, second=tokens)
def test_hashes_are_equal_exactly_for_equal_prefixes(first: list[int], second: list[int]) -> None:
    a, b = hashes_of(first, 2), hashes_of(second, 2)
    for i in range(min(len(a), len(b))):
        assert (a[i] == b[i]) == (first[: 2 * i + 2] == second[: 2 * i + 2])


def test_seed_salt_and_extras_keep_prefixes_apart() -> None:
    roots = [
        start_chain(0),
        start_chain(1),
        start_chain(0, cache_salt="a"),
        start_chain(0, cache_salt="b"),
        start_chain(1, cache_salt="a"),
        start_chain(0, extras=(b"a",)),
        start_chain(0, extras=(b"a", b"b")),
        start_chain(0, extras=(b"ab",)),
        start_chain(0, extras=(b"", b"ab")),
        start_chain(0, cache_salt="a", extras=(b"b",)),
    ]
    assert len({chain.root for chain in roots}) == len(roots)
    assert len(start_chain(0).root) == 16 and len(start_chain(0, cache_salt="a").root) == 32


def test_any_text_is_a_salt_and_any_int_a_seed() -> None:
    assert start_chain(-1).root == start_chain(2**64 - 1).root
    assert start_chain(0, cache_salt="\ud800").root != start_chain(0, cache_salt="\ud801").root
