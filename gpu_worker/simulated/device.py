"""The simulated device: which result a plan brings, and when. Pure: the clock is its caller's.

Plans run one after another. Each is applied when it comes, which PlanState allows, so that all that is left to do when
its time is over is to send what is ready; the next one has been running since.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from common.cost.load import Load
from common.cost.roofline import Roofline
from common.injection import NO_DELAYS, Delays
from common.messages.plans import IterationDone, Plan, PlanRefused
from gpu_worker.slots import Iteration, Limits, PlanState, Resident, Row

_MIX = 0xBF58476D1CE4E5B9
_MIX_TOO = 0x94D049BB133111EB
_STEP = 0x9E3779B97F4A7C15
_64_BITS = (1 << 64) - 1
"""Of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), which turns neighbouring numbers into unrelated ones."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How tokens are drawn: a function of (seed, position), as a real sampler's is of them and the logits."""

    word_ids: "array[int]"
    eos_token_ids: tuple[int, ...] = ()
    mean_output_len: int = 0  # the mean length at which a request draws its end; 0: none does

    def token(self, resident: Resident, position: int) -> int:
        """The token at this position of prompt and output together."""
        noise = _noise(resident.seed, position)
        sampling = resident.sampling
        if self.mean_output_len and self.eos_token_ids and not sampling.ignore_eos:
            is_end = (noise >> 32) % self.mean_output_len == 0
            if is_end and position - resident.num_prompt_tokens >= sampling.min_tokens:
                return self.eos_token_ids[0]
        token_id = self.word_ids[noise % len(self.word_ids)]
        if sampling.stop_token_ids and token_id in sampling.stop_token_ids:
            # Not by chance: the next word that is none, or this one if all are.
            size = len(self.word_ids)
            others = (self.word_ids[(noise + step) % size] for step in range(1, len(sampling.stop_token_ids) + 1))
            return next((other for other in others if other not in sampling.stop_token_ids), token_id)
        return token_id


@dataclass(frozen=True, slots=True)
class Due:
    """A result, and the moment at which it is there."""

    at_ns: int
    result: IterationDone | PlanRefused
    num_tokens: int = 0  # computed


class SimulatedDevice:
    """Plans of one connection to a scheduler."""

    def __init__(
        self, limits: Limits, roofline: Roofline, draw: Draw, free_ns: int = 0, delays: Delays = NO_DELAYS
    ) -> None:
        """free_ns: until then the device is busy with what an earlier connection asked for."""
        self._delays = delays
        self._state = PlanState(limits)
        self._roofline = roofline
        self._draw = draw
        self._free_ns = free_ns
        self._due: deque[Due] = deque()

    @property
    def free_ns(self) -> int:
        """When it will have done all that it has been told to."""
        return self._free_ns

    @property
    def num_queued(self) -> int:
        """Results that have not been taken."""
        return len(self._due)

    @property
    def num_slots_in_use(self) -> int:
        return self._state.num_slots_in_use

    @property
    def next_due_ns(self) -> int | None:
        return self._due[0].at_ns if self._due else None

    def submit(self, plan: Plan, received_ns: int) -> None:
        """Take a plan that has just come."""
        started_ns = max(received_ns, self._free_ns)
        match applied := self._state.apply(plan):
            case Iteration():
                self._due.append(self._run(applied, received_ns, started_ns))
                self._free_ns = self._due[-1].at_ns
            case PlanRefused():
                self._due.append(Due(started_ns, applied))
            case None:
                pass  # Of an epoch that is over.

    def take(self, now_ns: int) -> Due | None:
        """Return the oldest result if its time has come."""
        return self._due.popleft() if self._due and self._due[0].at_ns <= now_ns else None

    def _run(self, iteration: Iteration, received_ns: int, started_ns: int) -> Due:
        rows = iteration.rows
        load = load_of(rows)
        device_ns = round(self._roofline.time_ns(load)) + self._delays.pass_by("iteration")
        sampled = [row for row in rows if row.is_sampled]
        finished_ns = started_ns + device_ns
        done = IterationDone(
            epoch=iteration.epoch,
            iteration=iteration.iteration,
            slots=tuple([row.resident.slot for row in sampled]),
            token_ids=tuple([self._draw.token(row.resident, row.start + row.num_tokens) for row in sampled]),
            received_ns=received_ns,
            started_ns=started_ns,
            finished_ns=finished_ns,
            device_ns=device_ns,
        )
        return Due(finished_ns, done, load.num_tokens)


def load_of(rows: Iterable[Row]) -> Load:
    """What these rows compute. As the scheduler counts it: a row at the end of its request is a decode."""
    load = Load()
    num_decodes = sum_of_starts = 0
    for row in rows:
        if row.is_sampled and row.num_tokens == 1:
            num_decodes += 1
            sum_of_starts += row.start
        else:
            load.add_chunk(row.start, row.num_tokens, is_sampled=row.is_sampled)
    load.add_decodes(num_decodes, sum_of_starts)
    return load


def _noise(seed: int, position: int) -> int:
    """64 bits that look random."""
    bits = (seed * _MIX_TOO + (position + 1) * _STEP) & _64_BITS
    bits = ((bits ^ (bits >> 30)) * _MIX) & _64_BITS
    bits = ((bits ^ (bits >> 27)) * _MIX_TOO) & _64_BITS
    return bits ^ (bits >> 31)
