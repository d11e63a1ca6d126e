"""Scheduling policies, one file each. A policy is pure: it orders requests and asks the batch for chunk sizes."""

from services.scheduler.policy import chunked_only, decode_first, hybrid_only, orca, prefill_first, stall_free
from services.scheduler.policy.batch import Policy

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        stall_free.POLICY,
        prefill_first.POLICY,
        orca.POLICY,
        decode_first.POLICY,
        chunked_only.POLICY,
        hybrid_only.POLICY,
    )
}
