"""From the core's full plans to the deltas that travel: a steady decode batch is an empty message."""

from common.ids import Slot
from common.messages.plans import Plan, PlanChunk
from services.scheduler.events import Decode, RunIteration


class PlanEncoder:
    """Knows what one worker knows, and says only what is new. Pure; one for each worker.

    The one thing to remember is the worker's decode set: slots that compute one token in every iteration until a plan
    says otherwise (common.messages.plans.Plan). Plans of a pipeline's micro-batches take turns, so each of them names
    what leaves and joins that set.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._decoding: dict[Slot, None] = {}  # an ordered set
        self._last_decodes: tuple[Decode, ...] = ()

    def encode(self, iteration: RunIteration) -> Plan:
        """Return the message for the worker's next iteration. Each one must be encoded, once and in order."""
        if iteration.epoch != self._epoch:
            self._epoch = iteration.epoch
            self._decoding.clear()
            self._last_decodes = ()
        for slot in iteration.released:
            self._decoding.pop(slot, None)
        decodes = iteration.decodes
        removed: tuple[Slot, ...] = ()
        added: tuple[Slot, ...] = ()
        if decodes != self._last_decodes or iteration.released:
            decoding = {decode.slot: None for decode in decodes}
            removed = tuple(slot for slot in self._decoding if slot not in decoding)
            added = tuple(slot for slot in decoding if slot not in self._decoding)
            for slot in removed:
                del self._decoding[slot]
            self._decoding.update(dict.fromkeys(added))
            self._last_decodes = decodes
        return Plan(
            epoch=iteration.epoch,
            iteration=iteration.iteration,
            released=iteration.released,
            introduced=iteration.introduced,
            grown=iteration.grown,
            decode_removed=removed,
            decode_added=added,
            chunks=tuple(
                PlanChunk(chunk.slot, chunk.start, chunk.num_tokens, chunk.is_sampled) for chunk in iteration.chunks
            ),
            kept=iteration.kept,
        )
