"""From a tokenizer's address as the operator wrote it to the addresses to dial."""

from collections.abc import Iterable

import structlog

from common.wire.names import look_up_all, name_in

log = structlog.get_logger()


async def resolve(addresses: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the addresses to dial for each configured address.

    A name that cannot be looked up now is left out: what it resolved to before may still be good.
    """
    found: dict[str, frozenset[str]] = {}
    for address in addresses:
        if (name := name_in(address)) is None:
            found[address] = frozenset({address})
            continue
        try:
            found[address] = frozenset(await look_up_all(*name))
        except (OSError, UnicodeError) as error:
            log.warning("name_not_resolved", name=name[0], error=str(error))
    return found
