"""The margin between a prediction and its deadline: adaptive conformal control of the share of late gaps.

Source: the quantile tracker of online conformal prediction (Gibbs and Candès, NeurIPS 2021; Angelopoulos et al., 2023).
After each observation the margin moves by step * (missed - allowed share): in the long run the share of misses is the
allowed one, whatever the noise looks like, as long as the margin is what decides.
"""

STEP_SHARE = 0.03
"""Of the target, how far one wholly late iteration raises the margin."""
FIRST_SHARE = 0.1
"""Of the target, the margin before anything is observed."""
MAX_SHARE = 0.6
"""Of the target, the largest margin: beyond it hardly anything would be planned, and nothing learned."""


class Margin:
    """Learns from iterations in which it bound the plan, and from no others.

    Otherwise quiet hours, in which nothing is late, would bank credit that is spent as stalls when prompts come.
    """

    def __init__(self, late_share: float, target_ns: int) -> None:
        self._late_share = late_share
        self._target_ns = target_ns
        self.ns = FIRST_SHARE * target_ns
        self.num_observed = 0

    def learn(self, share_late: float) -> None:
        """Take in an iteration that the margin bound: the share of its gaps that were late."""
        self.num_observed += 1
        moved = self.ns + STEP_SHARE * self._target_ns * (share_late - self._late_share)
        self.ns = min(max(0.0, moved), MAX_SHARE * self._target_ns)
