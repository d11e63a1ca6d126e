"""What `legato up` starts, before it does."""

from services.launcher.config import UpConfig
from services.launcher.up import ring_of


def test_workers_of_several_ranks_have_gpus_of_their_own() -> None:
    ring = ring_of(UpConfig(workers=3, device="cuda", tp=2, pp=2), None)
    firsts = [worker.argv[worker.argv.index("--device-index") + 1] for worker in ring.workers]
    assert firsts == ["0", "4", "8"]
    assert all("--device-index" not in worker.argv for worker in ring_of(UpConfig(workers=2, tp=2), None).workers)
