"""What ends a worker of several ranks."""


class RankLost(Exception):
    """A rank is gone, and with it what the others could do."""

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(f"rank {rank}: {detail}")
        self.rank = rank
        self.detail = detail
