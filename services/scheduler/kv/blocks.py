"""KV blocks of one worker: who holds which, what is free, and what free ones still remember."""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.ids import BlockId


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix that the pool remembers."""

    num_blocks: int = 0
    num_free: int = 0  # of these, blocks that nobody holds: sharing them takes them from the free ones


class BlockPool:
    """Hands out blocks and takes them back; a full block whose hash is published may be held by several requests.

    A free block keeps its contents until it is handed out again. Blocks without a published hash go first, then the
    least recently used.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_reserved = 0  # free blocks that are promised to requests which must not be preempted again
        self._free: deque[BlockId] = deque(BlockId(block) for block in range(num_blocks))
        self._remembered: OrderedDict[BlockId, None] = OrderedDict()  # free, with a published hash; oldest first
        self._num_holders = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, BlockId] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, reserved ones included."""
        return len(self._free) + len(self._remembered)

    @property
    def num_available(self) -> int:
        """Free blocks that are not reserved."""
        return self.num_free - self.num_reserved

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def take(self, num_blocks: int) -> tuple[BlockId, ...]:
        """Take all of num_blocks; the caller has looked at num_free."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks wanted, {self.num_free} free"
        num_blank = min(num_blocks, len(self._free))
        blocks = [self._free.popleft() for _ in range(num_blank)]
        blocks += [self._forget_one() for _ in range(num_blocks - num_blank)]
        for block in blocks:
            self._num_holders[block] = 1
        return tuple(blocks)

    def match(self, hashes: Sequence[bytes]) -> Match:
        """How many leading hashes are remembered."""
        num_blocks = num_free = 0
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            num_blocks += 1
            num_free += self._num_holders[block] == 0
        return Match(num_blocks, num_free)

    def find(self, hashes: Sequence[bytes]) -> list[BlockId]:
        """The blocks of the leading hashes that are remembered."""
        blocks: list[BlockId] = []
        for block_hash in hashes:
            if (block := self._block_of.get(block_hash)) is None:
                break
            blocks.append(block)
        return blocks

    def share(self, hashes: Sequence[bytes]) -> list[BlockId]:
        """Hold the blocks of these hashes, all of which match has found."""
        blocks = self.find(hashes)
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._remembered[block]
            self._num_holders[block] += 1
        return blocks

    def publish(self, blocks: Sequence[BlockId], hashes: Sequence[bytes]) -> None:
        """Make full blocks' contents findable. If another block holds the same, that one stays the one found."""
        hash_of, block_of = self._hash_of, self._block_of
        for block, block_hash in zip(blocks, hashes, strict=True):
            if hash_of[block] is None and block_hash not in block_of:
                hash_of[block] = block_hash
                block_of[block_hash] = block

    def give_back(self, blocks: Sequence[BlockId]) -> None:
        """Stop holding blocks. The last ones of a request are forgotten first: a prefix is of use without its end."""
        num_holders, hash_of = self._num_holders, self._hash_of
        for block in reversed(blocks):
            num_left = num_holders[block] = num_holders[block] - 1
            assert num_left >= 0, f"block {block} was given back twice"
            if num_left == 0:
                if hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._remembered[block] = None

    def num_held_alone(self, blocks: Sequence[BlockId]) -> int:
        """Of blocks that some requests hold, each as often as they do, those that are free once all have given them
        back."""
        return sum([count == self._num_holders[block] for block, count in Counter(blocks).items()])

    def free_blocks(self) -> tuple[BlockId, ...]:
        """The free blocks, next to be taken first; for checks."""
        return (*self._free, *self._remembered)

    def _forget_one(self) -> BlockId:
        """The block whose contents have not been used for longest, without them."""
        block, _ = self._remembered.popitem(last=False)
        forgotten = self._hash_of[block]
        assert forgotten is not None, "a remembered block has its hash"
        del self._block_of[forgotten]
        self._hash_of[block] = None
        return block
