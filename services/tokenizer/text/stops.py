"""Stop strings in a text that comes in pieces."""


class StopMatcher:
    """Finds the first place at which a stop string is complete, and holds back only what may still become one.

    "First" is by where a stop string ends, since that is when the text may stop coming; of two that end together, the
    longer one wins. So the result does not depend on how the text is cut into pieces, and nothing waits for a longer
    match that may never come.

    Each stop string has a Knuth-Morris-Pratt automaton: its state is the length of the longest end of the text that
    begins the stop string, which is exactly what must be held back. A character costs one step a stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """stops are not empty strings; there may be none."""
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = stops
        self._borders = [_borders_of(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take more text; return what is certainly no part of a stop string. Once matched is set, nothing follows."""
        assert self.matched is None, "text after a stop string is waste"
        if not self._held and self._first_characters.isdisjoint(text):
            return text  # Nearly always.
        for position, character in enumerate(text):
            if (stop := self._step(character)) is not None:
                self.matched = stop
                before = self._held + text[: position + 1]
                self._held = ""
                return before[: -len(stop)]
        known = self._held + text
        num_sure = len(known) - max(self._states)
        self._held = known[num_sure:]
        return known[:num_sure]

    def finish(self) -> str:
        """Return what was held back: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Advance each automaton; return the longest stop string that this character completes."""
        completed: str | None = None
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = self._borders[index][state]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                if completed is None or len(stop) > len(completed):
                    completed = stop
                state = 0  # Never used again; in range for the reader's sake.
            self._states[index] = state
        return completed


def _borders_of(stop: str) -> list[int]:
    """For each n, the length of the longest proper prefix of stop[:n] that is also its suffix."""
    borders = [0] * (len(stop) + 1)
    length = 0
    for n in range(2, len(stop) + 1):
        while length and stop[length] != stop[n - 1]:
            length = borders[length]
        if stop[length] == stop[n - 1]:
            length += 1
        borders[n] = length
    return borders
