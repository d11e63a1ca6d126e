"""`legato load run`: send a load, measure, report."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import option
from loadtest import report
from loadtest.client import RequestFailed
from loadtest.dialect import Dialect, ServerUnusable
from loadtest.drive import Outcome
from loadtest.options import LoadOptions
from loadtest.plots import charts_of
from loadtest.png import check_png, write_png
from loadtest.prompts import PromptMaker
from loadtest.shards import ShardFailed, run_shards
from loadtest.single import run_here, run_loop
from loadtest.summary import report_of

EXIT_OK, EXIT_INVALID, EXIT_UNUSABLE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(LoadOptions):
    """Options of `legato load run`."""

    json: Path | None = option(None, "write the report here, as one JSON object")
    jsonl: Path | None = option(None, "write a line per request here")
    html: Path | None = option(None, "write a page with plots here")
    png: Path | None = option(None, "write the plots here (needs matplotlib)")
    progress: bool = option(True, "show a line on standard error while the run goes on")

    def __post_init__(self) -> None:
        LoadOptions.__post_init__(self)
        if self.png is not None:
            check_png()


def run(options: RunOptions) -> int:
    """Carry out the run; 0 if it is valid, 1 if not, 2 if it could not be begun."""
    try:
        trace = options.read_trace()
        classes = options.classes(trace)
        outcome, about = run_loop(measure(options, is_progress_shown=options.progress))
    except (ServerUnusable, RequestFailed, ShardFailed, ValueError) as error:
        print(f"legato load run: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    about["lengths"] = trace.source if trace else f"prompt {options.prompt_len}, output {options.output_len}"
    found = report_of(outcome, classes, about)
    if options.json is not None:
        report.write_json(options.json, found)
    if options.jsonl is not None:
        report.write_lines(options.jsonl, outcome)
    text = report.as_text(found)
    charts = charts_of(outcome, options.tbt_target_ms) if options.html or options.png else []
    if options.html is not None:
        report.write_html(options.html, "Load test", text, charts, found)
    if options.png is not None:
        write_png(options.png, charts)
    print(text)
    return EXIT_OK if found["valid"] else EXIT_INVALID


async def measure(options: LoadOptions, is_progress_shown: bool = False) -> tuple[Outcome, dict[str, Any]]:
    """Run the load in as many processes as asked for; also return what a reader must know to repeat it."""
    if options.processes == 1:
        outcome, dialect, prompts = await run_here(options, is_progress_shown=is_progress_shown)
    else:
        async with options.client() as client:
            dialect, prompts = await options.meet(client)
        outcome = await run_shards(options)
    return outcome, _about(options, dialect, prompts)


def _about(options: LoadOptions, dialect: Dialect, prompts: PromptMaker) -> dict[str, Any]:
    """What a reader must know to repeat the run. The address and the key stay out: they are nobody's business."""
    open_loop = {"rate_rps": options.rate or 1.0} if options.trace is None or options.rate else {}
    return {
        "arrivals": options.arrivals,
        **({"users": options.users} if options.arrivals == "closed" else open_loop),
        "seed": options.seed,
        "model": dialect.model,
        "endpoint": dialect.endpoint,
        "forced_lengths": dialect.has_ignore_eos,
        "prompts": prompts.vocabulary.source,
        "prompt_lengths_are_exact": prompts.vocabulary.is_exact,
        "processes": options.processes,
        "startup_s": options.startup_s,
    }
