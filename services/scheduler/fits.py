"""Fits of the cost model on disk: what one run has learned of a device and a model, the next starts from."""

import hashlib
from pathlib import Path

import msgspec
import structlog

from common.cost.fit import SavedFit
from common.cost.shapes import ModelShape
from common.messages.cards import WorkerCard
from services.scheduler.worker import Worker

log = structlog.get_logger()

LEAST_MEASURED = 200
"""Iterations below which a fit says less than the next worker's own profile."""


class FitFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file: the fit, and what it is a fit of."""

    device: str
    device_kind: str
    dtype: str
    attention: str
    tensor_parallel: int
    shape: ModelShape
    fit: SavedFit


def load_fit(directory: Path, card: WorkerCard) -> SavedFit | None:
    """Return the saved fit of this device, model and layout; None if there is none that can be read."""
    path = _path_of(directory, card)
    try:
        return msgspec.json.decode(path.read_bytes(), type=FitFile).fit
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("fit_unreadable", path=str(path), error=str(error))
        return None


def save_fit(directory: Path, worker: Worker) -> None:
    """Write the worker's fit if it has learned enough. A full disk is logged and no more: the next start is slower."""
    if worker.fit.num_measured < LEAST_MEASURED:
        return
    card = worker.card
    content = FitFile(
        device=card.device,
        device_kind=card.device_kind,
        dtype=card.dtype,
        attention=card.attention,
        tensor_parallel=card.tensor_parallel,
        shape=card.shape,
        fit=worker.fit.save(),
    )
    path = _path_of(directory, card)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
        scratch.replace(path)
    except OSError as error:
        log.warning("fit_not_saved", path=str(path), error=str(error))


def _path_of(directory: Path, card: WorkerCard) -> Path:
    layout = (card.tensor_parallel, card.pipeline_parallel)
    key = msgspec.json.encode((card.device, card.dtype, card.attention, layout, card.shape))
    return directory / f"{card.model.name}-{card.device_kind}-{hashlib.sha256(key).hexdigest()[:12]}.json"
