"""Names of KV block contents: a hash over all tokens up to the block's end.

Two requests share a block exactly when everything that its KV depends on is equal: every token before, the tokens
in it, and the salt that keeps tenants apart.
"""

from array import array
from hashlib import sha256


class PrefixHashes:
    """The hash chain of one request, grown as its tokens become known."""

    def __init__(self, salt: str) -> None:
        self._hashes: list[bytes] = []
        self._root = sha256(b"legato" + salt.encode()).digest()

    def first(self, num_blocks: int, token_ids: "array[int]", block_size: int) -> list[bytes]:
        """Return the hashes of at least the first num_blocks full blocks; not to be changed."""
        hashes = self._hashes
        if (num_known := len(hashes)) < num_blocks:
            parent = hashes[-1] if hashes else self._root
            tokens = token_ids[num_known * block_size : num_blocks * block_size].tobytes()
            block_bytes = block_size * token_ids.itemsize
            for start in range(0, len(tokens), block_bytes):
                parent = sha256(parent + tokens[start : start + block_bytes]).digest()
                hashes.append(parent)
        return hashes
