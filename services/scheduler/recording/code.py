"""Which code the core is: the modules that hold its state and its decisions, and a digest of their text."""

import hashlib
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MODULES = (
    *("common.clock", "common.ids"),
    *("common.cost.devices", "common.cost.fit", "common.cost.load", "common.cost.roofline", "common.cost.shapes"),
    *("common.messages.base", "common.messages.cards", "common.messages.gaps", "common.messages.logprobs"),
    *("common.messages.plans", "common.messages.requests", "common.messages.streams"),
    *("common.traceparent", "services.scheduler.account"),
    *(
        "services.scheduler.admission",
        "services.scheduler.answers",
        "services.scheduler.budget",
        "services.scheduler.core",
        "services.scheduler.deadlines",
    ),
    *("services.scheduler.events", "services.scheduler.giving_way"),
    *("services.scheduler.kv.blocks", "services.scheduler.kv.prefix"),
    *("services.scheduler.limits", "services.scheduler.margin", "services.scheduler.micro_batches"),
    *("services.scheduler.outboxes", "services.scheduler.placement"),
    *("services.scheduler.planner", "services.scheduler.request"),
    *("services.scheduler.waiting", "services.scheduler.worker"),
    *("services.scheduler.policy", "services.scheduler.policy.batch"),
    *("services.scheduler.policy.chunked_only", "services.scheduler.policy.decode_first"),
    *("services.scheduler.policy.hybrid_only", "services.scheduler.policy.orca"),
    *("services.scheduler.policy.prefill_first", "services.scheduler.policy.stall_free"),
)
"""The core and all that it is made of. A test finds one that is missing here: nothing else that it imports is ours."""


@cache
def classes() -> dict[str, type]:
    """The classes that a core's state may consist of, by name; nothing else is ever made from a file."""
    found = {}
    for name in MODULES:
        for value in vars(import_module(name)).values():
            if isinstance(value, type) and value.__module__ == name:
                found[f"{name}.{value.__qualname__}"] = value
    return found


@cache
def code_version() -> str:
    """The program's version, and a digest of the core's text: two that are equal decide alike."""
    digest = hashlib.sha256()
    for name in MODULES:
        path = import_module(name).__file__
        assert path is not None, "modules of ours are files"
        digest.update(name.encode() + b"\0" + Path(path).read_bytes() + b"\0")
    try:
        program = version("legato")
    except PackageNotFoundError:  # Run from a tree that is not installed.
        program = "0"
    return f"{program}+{digest.hexdigest()[:12]}"
