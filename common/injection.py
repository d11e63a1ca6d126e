"""Delays on purpose: `--inject-delay` makes a process hold up the ring at a named place, so that tests see the account
find it. A process of a real system has none.
"""

import time
from dataclasses import dataclass

SITES = ("plan", "step", "text", "write", "iteration")
"""In the scheduler, before a plan leaves and before an event is handled; in the tokenizer, before a batch of text
leaves; in the gateway, before a batch of text is taken; in a simulated worker, at the end of an iteration."""


@dataclass(frozen=True, slots=True)
class _Delay:
    delay_ns: int
    every: int


class Delays:
    """SITE:MS:EVERY, comma separated: at every EVERY-th passage of SITE, MS milliseconds. Each process knows its own
    sites, and passes over those of others."""

    def __init__(self, spec: str) -> None:
        """
        Raises:
            ValueError: If spec is malformed.
        """
        self._delays: dict[str, _Delay] = {}
        self._passages: dict[str, int] = {}
        for part in filter(None, spec.split(",")):
            try:
                site, delay_ms, every = part.split(":")
                delay = _Delay(int(float(delay_ms) * 1e6), int(every))
            except ValueError:
                raise ValueError(f"--inject-delay has {part!r}; it takes SITE:MS:EVERY") from None
            if site not in SITES or delay.delay_ns <= 0 or delay.every <= 0:
                raise ValueError(f"--inject-delay has {part!r}; sites are {', '.join(SITES)}, numbers above 0")
            self._delays[site] = delay

    def __bool__(self) -> bool:
        return bool(self._delays)

    def pass_by(self, site: str) -> int:
        """Count a passage; return the nanoseconds by which to delay it, mostly 0."""
        delay = self._delays.get(site)
        if delay is None:
            return 0
        self._passages[site] = num_passages = self._passages.get(site, 0) + 1
        return 0 if num_passages % delay.every else delay.delay_ns

    def block(self, site: str) -> None:
        """Count a passage, and hold up the whole process for as long as it is to be delayed."""
        if delay_ns := self.pass_by(site):
            time.sleep(delay_ns / 1e9)


NO_DELAYS = Delays("")
