"""Which rank holds what: pure arithmetic on a model's shape.

Ranks of one stage are neighbours, so that they share a machine (and its fast links) where ranks are dealt out in order:
with tp 2 and pp 2, ranks 0 and 1 are stage 0, ranks 2 and 3 stage 1.

Source: Megatron-LM (Shoeybi et al., 2019; Narayanan et al., SC 2021).
"""

from dataclasses import dataclass

from gpu_worker.errors import UnusableModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One rank's place among tp * pp of them."""

    tp: int  # ranks that share each layer
    pp: int  # stages, each of some layers
    rank: int

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pp - 1

    @property
    def leads_stage(self) -> bool:
        """Whether this rank speaks for its stage."""
        return self.tp_rank == 0

    @property
    def samples(self) -> bool:
        """Whether this rank draws tokens: one rank has all logits, so that no two can disagree."""
        return self.is_last_stage and self.leads_stage

    def layers(self, num_layers: int) -> range:
        """The layers of this rank's stage. Earlier stages have one more where it does not come out even: the last
        stage has the head besides."""
        return _share(num_layers, self.pp, self.stage)

    def columns(self, total: int) -> range:
        """This rank's share of what its stage splits: heads, intermediate units, words of the vocabulary."""
        return _share(total, self.tp, self.tp_rank)

    def kv_heads(self, num_heads: int, num_kv_heads: int) -> range:
        """The key-value heads that this rank's query heads read. Where there are fewer than ranks, several ranks hold
        the same one."""
        group = num_heads // num_kv_heads
        heads = self.columns(num_heads)
        return range(heads.start // group, (heads.stop - 1) // group + 1)

    def check(self, *, num_layers: int, num_heads: int, num_kv_heads: int, intermediate_size: int) -> None:
        """Refuse a model that does not come apart like this.

        Raises:
            UnusableModel: With the numbers.
        """
        tp = self.tp
        if num_heads % tp:
            raise UnusableModel(f"--tp is {tp}; this model's {num_heads} heads do not come in {tp} equal parts")
        if num_kv_heads % tp and tp % num_kv_heads:
            raise UnusableModel(
                f"--tp is {tp}; this model's {num_kv_heads} key-value heads can neither be dealt out to {tp} ranks "
                "nor be held by several each"
            )
        if intermediate_size % tp:
            raise UnusableModel(
                f"--tp is {tp}; this model's intermediate size of {intermediate_size} does not come in {tp} equal parts"
            )
        if num_layers < self.pp:
            raise UnusableModel(f"--pp is {self.pp}; this model has only {num_layers} layers")


def _share(total: int, num_parts: int, index: int) -> range:
    """Part index of total: as equal as can be, the longer ones first."""
    length, num_longer = divmod(total, num_parts)
    start = index * length + min(index, num_longer)
    return range(start, start + length + (index < num_longer))
