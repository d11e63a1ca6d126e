"""What an iteration computes, as sums over its rows: enough to say how long it takes."""

from dataclasses import dataclass


@dataclass(slots=True)
class Load:
    """Adding a row is a few additions, so a plan's time is known at every moment while it is built."""

    num_tokens: int = 0
    num_chunks: int = 0  # of prefill
    prefill_pairs: int = 0  # twice the sum of (query, key) pairs that chunks attend to
    prefill_tokens: int = 0
    prefill_keys: int = 0  # sum over chunks of the keys that they read
    num_decodes: int = 0
    decode_keys: int = 0  # sum over decodes of the keys that they read
    num_sampled: int = 0  # rows of logits: drawn from, or scores of a prompt

    def add_chunk(self, start: int, num_tokens: int, *, is_sampled: bool, num_scored: int = 0) -> None:
        """A prefill chunk of num_tokens behind start tokens of context, with logits for num_scored of them as well."""
        self.num_tokens += num_tokens
        self.num_chunks += 1
        self.prefill_pairs += num_tokens * (2 * start + num_tokens + 1)
        self.prefill_tokens += num_tokens
        self.prefill_keys += start + num_tokens
        self.num_sampled += is_sampled + num_scored

    def add_decodes(self, num_decodes: int, sum_of_starts: int) -> None:
        """Many of add_decode at once."""
        self.num_tokens += num_decodes
        self.num_decodes += num_decodes
        self.decode_keys += sum_of_starts + num_decodes
        self.num_sampled += num_decodes

    def remove_chunk(self, start: int, num_tokens: int, *, is_sampled: bool, num_scored: int = 0) -> None:
        """Undo add_chunk."""
        self.num_tokens -= num_tokens
        self.num_chunks -= 1
        self.prefill_pairs -= num_tokens * (2 * start + num_tokens + 1)
        self.prefill_tokens -= num_tokens
        self.prefill_keys -= start + num_tokens
        self.num_sampled -= is_sampled + num_scored

    def remove_decode(self, start: int) -> None:
        """Undo add_decode."""
        self.num_tokens -= 1
        self.num_decodes -= 1
        self.decode_keys -= start + 1
        self.num_sampled -= 1

    def decodes_alone(self) -> "Load":
        """The same without its prefill."""
        load = Load()
        load.add_decodes(self.num_decodes, self.decode_keys - self.num_decodes)
        return load

    def copy(self) -> "Load":
        return Load(
            self.num_tokens,
            self.num_chunks,
            self.prefill_pairs,
            self.prefill_tokens,
            self.prefill_keys,
            self.num_decodes,
            self.decode_keys,
            self.num_sampled,
        )
