"""The text of one output: tokens in; text out that is neither half a character nor part of a stop string."""

from collections.abc import Iterable, Set

from services.tokenizer.text.detokenizer import Detokenizer
from services.tokenizer.text.stops import StopMatcher


class TextStream:
    """A function of the tokens alone, whatever the pieces in which they come. So a stream that is rebuilt from the
    tokens delivered so far goes on with exactly the text that is still missing."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: tuple[str, ...] = (),
        silent_ids: Set[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        """Start before the first output token.

        Args:
            detokenizer: A fresh one; the stream owns it.
            stops: Stop strings.
            silent_ids: Tokens that give no text: special tokens, and stop ids, which are no more part of the text
                than stop strings are.
            min_tokens: Text of so many first tokens is not searched for stop strings, so that these keep the promise
                that Sampling.min_tokens makes of stop ids.
        """
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._silent_ids = silent_ids
        self._min_tokens = min_tokens
        self.num_tokens = 0  # taken, up to the one that completed a stop string
        self.num_chars = 0  # of text returned
        self.offsets: list[int] = []  # of the tokens of the latest push: characters that those before each completed
        self._num_decoded = 0  # characters out of the detokenizer, also those that the matcher holds back

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, once one has."""
        return self._matcher.matched

    def push(self, token_ids: Iterable[int]) -> str:
        """Take tokens up to the first that completes a stop string, and return the text that is now certain."""
        pieces = []
        self.offsets = []
        for token_id in token_ids:
            if self.stop is not None:
                break
            self.num_tokens += 1
            self.offsets.append(self._num_decoded)
            if token_id not in self._silent_ids:
                text = self._detokenizer.push(token_id)
                self._num_decoded += len(text)
                pieces.append(self._match(text))
        return self._count("".join(pieces))

    def finish(self) -> str:
        """Return the text that was held back, as no token follows. It, too, may complete a stop string."""
        if self.stop is not None:
            return ""
        text = self._match(self._detokenizer.finish())
        return self._count(text + self._matcher.finish())

    def _match(self, text: str) -> str:
        if self.num_tokens <= self._min_tokens or not text:
            return text
        return self._matcher.feed(text)

    def _count(self, text: str) -> str:
        self.num_chars += len(text)
        return text
