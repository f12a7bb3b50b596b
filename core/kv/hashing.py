"""Hashes that name a KV block by all the tokens up to its end, so that equal prefixes find each other.

hash of block i = digest(hash of block i - 1 | token ids of block i as int32 | its marks). The chain starts from a
root that holds the deployment's seed, the cache salt and whatever else changes the KV of a token; a mark says what
stands behind tokens that say nothing: the digest of an image that begins in the block.
"""

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash


@dataclass(frozen=True, slots=True, kw_only=True)
class HashChain:
    """Where one request's chain of block hashes starts, and the function that continues it. marks: by block."""

    root: bytes
    digest: Callable[[bytes], bytes]
    marks: Mapping[int, bytes] = field(default_factory=dict)

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
        """Append to `hashes` those of the full blocks of `token_ids` that it lacks."""
        parent = hashes[-1] if hashes else self.root
        for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
            mark = self.marks.get(start // block_size, b"")
            parent = self.digest(parent + array("i", token_ids[start : start + block_size]).tobytes() + mark)
            hashes.append(parent)


def start_chain(
    seed: int, *, cache_salt: str = "", extras: Sequence[bytes] = (), marks: Mapping[int, bytes] | None = None
) -> HashChain:
    """The chain of a request.

    seed: KVConfig.hash_seed, the same in all processes that share blocks. cache_salt: separates tenants; with one
    the digest is sha256, so that no tenant can construct another's hash, else xxh3-128. extras: everything besides
    the token ids that the KV of all tokens depends on (an adapter, the row of a rope table with variants).
    """
    seed_bytes = (seed & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")
    parts = (seed_bytes, cache_salt.encode("utf-8", "surrogatepass"), *extras)
    head = b"".join(len(part).to_bytes(4, "little") + part for part in parts)  # lengths: no two lists look alike
    digest = _sha256 if cache_salt else _seeded_xxh3(seed & 0xFFFFFFFFFFFFFFFF)
    return HashChain(root=digest(head), digest=digest, marks=marks or {})


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _seeded_xxh3(seed: int) -> Callable[[bytes], bytes]:
    xxh3 = xxhash.xxh3_128_digest

    def digest(data: bytes) -> bytes:
        return xxh3(data, seed)

    return digest
