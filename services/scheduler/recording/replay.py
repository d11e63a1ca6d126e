"""`legato replay FILE`: runs a recording again, and says at the first effect that differs."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.clock import NS_PER_S
from services.scheduler.events import Effect, RunIteration
from services.scheduler.recording.code import code_version
from services.scheduler.recording.files import segments_of
from services.scheduler.recording.segment import BadRecording, Segment, StepDecoder, StepEncoder, event_of

DESCRIPTION = """Feed a recorded segment's events to the scheduler's core again, from the state with which the segment
begins, and compare every effect. Exit status: 0 if all are equal, 1 if one differs, 2 if it cannot be replayed."""


class Differs(Exception):
    """The core has answered otherwise than it did."""


@dataclass(slots=True)
class Replayed:
    """What was run again."""

    num_steps: int = 0
    num_effects: int = 0
    num_iterations: int = 0
    num_by_event: dict[str, int] = field(default_factory=dict)
    first_ns: int = 0
    last_ns: int = 0
    is_torn: bool = False
    raised: str = ""  # what the core raised at the end, as it did then


def replay(segment: Segment) -> Replayed:
    """Run a segment again.

    Raises:
        Differs: At the first step whose effects are not equal to the byte.
        BadRecording: If this code cannot read it.
    """
    core = segment.core()
    done = Replayed(first_ns=segment.head.now_ns, last_ns=segment.head.now_ns)
    encoder, decoder = StepEncoder(), StepDecoder()
    for step in segment.steps():
        event, recorded = event_of(step), decoder.effects(step)
        try:
            effects: tuple[Effect, ...] | None = core.step(event, step.now_ns)
        except Exception as error:
            effects, done.raised = None, repr(error)
        if encoder.effects(effects) != bytes(step.effects):
            where = f"{segment.path.name}: step {done.num_steps}, {step.kind} at {step.now_ns} ns"
            raise Differs(_difference(where, recorded, effects, done.raised))
        done.num_steps += 1
        done.num_by_event[step.kind] = done.num_by_event.get(step.kind, 0) + 1
        done.last_ns = step.now_ns
        if effects is None:
            break  # So did the process.
        done.num_effects += len(effects)
        done.num_iterations += sum(isinstance(effect, RunIteration) for effect in effects)
    done.is_torn = segment.is_torn
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Replay; return the exit status."""
    parser = argparse.ArgumentParser(prog="legato replay", description=DESCRIPTION)
    parser.add_argument("path", type=Path, metavar="FILE", help="a segment, or a folder of them: all, oldest first")
    parser.add_argument("--other-code", action="store_true", help="try a recording of another version of the code")
    flags = parser.parse_args(argv)
    try:
        for path in segments_of(flags.path):
            segment = Segment(path)
            if segment.head.code != code_version() and not flags.other_code:
                raise BadRecording(
                    f"{path}: {segment.head.code} wrote it, this is {code_version()}; replay with that code, or see "
                    "with --other-code what this one does otherwise"
                )
            print(f"{path.name}: {_summary(replay(segment))}")
    except Differs as difference:
        print(f"legato replay: {difference}", file=sys.stderr)
        return 1
    except (BadRecording, OSError) as error:
        print(f"legato replay: {error}", file=sys.stderr)
        return 2
    return 0


def _summary(done: Replayed) -> str:
    seconds = (done.last_ns - done.first_ns) / NS_PER_S
    text = f"{done.num_steps} steps, {done.num_iterations} iterations, {done.num_effects} effects over {seconds:.1f} s"
    text += ": all equal"
    if done.raised:
        text += f"; then the core raised {done.raised}, as it did"
    if done.is_torn:
        text += "; the file's last frame is torn"
    return text


def _difference(where: str, recorded: Sequence[Effect], effects: Sequence[Effect] | None, raised: str) -> str:
    lines = [f"{where}: the core answers otherwise", *_told("recorded", recorded, ""), *_told("now", effects, raised)]
    return "\n".join(lines)


def _told(when: str, effects: Sequence[Effect] | None, raised: str) -> Iterator[str]:
    if effects is None:
        yield f"  {when}: the core raised {raised}".rstrip()
    elif not effects:
        yield f"  {when}: nothing"
    for effect in effects or ():
        yield f"  {when}: {effect!r}"[:2000]


if __name__ == "__main__":
    sys.exit(main())
