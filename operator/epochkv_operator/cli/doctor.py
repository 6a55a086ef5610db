"""The checks of a cluster for `epochkv doctor`, which finds this function by its entry point."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from epochkv_fence.doctor import judging
from epochkv_fence.doctor.finding import Finding
from epochkv_fence.doctor.running import Check, Examination
from epochkv_fence.doctor.scope import ClusterScope
from epochkv_operator.doctor.access import look_at_access
from epochkv_operator.doctor.cluster import Cluster, look_at_api, place
from epochkv_operator.doctor.conditions import look_at_conditions, look_at_tiers
from epochkv_operator.doctor.definitions import look_at_definitions
from epochkv_operator.doctor.hubs import SECONDS, Hubs, judge_engines
from epochkv_operator.doctor.network import look_at_policies
from epochkv_operator.doctor.objects import look_at_pairs, look_at_pods
from epochkv_operator.doctor.operators import find_operators, judge_offset, look_at_operators
from epochkv_operator.doctor.secrets import look_at_secrets
from epochkv_operator.doctor.versions import look_at_versions


def cluster_checks(scope: ClusterScope) -> Examination:
    """All checks of the part of a cluster that is asked for."""
    cluster = Cluster(scope)
    hubs = Hubs(cluster)

    def check(name: str, look: Callable[[Cluster], Awaitable[list[Finding]]]) -> Check:
        return Check(name, partial(look, cluster))

    async def clocks() -> list[Finding]:
        offsets = [finding for operator in await find_operators(cluster) for finding in judge_offset(operator)]
        rates = hubs.checked("clocks", lambda pool, look: judging.judge_clocks(look, place(pool)), "the rates of clocks of {} pools agree")
        return [*offsets, *await rates()]

    stalled = hubs.checked("engines", judge_engines, "the engines of {} pools are in use")
    checks = [
        check("cluster", look_at_api),
        check("crds", look_at_definitions),
        check("rbac", look_at_access),
        check("operator", look_at_operators),
        Check("hub", hubs.reachable(), seconds=SECONDS),
        check("secrets", look_at_secrets),
        check("network", look_at_policies),
        check("conditions", look_at_conditions),
        check("tiers", look_at_tiers),
        check("pods", look_at_pods),
        check("pairs", look_at_pairs),
        Check("engines", stalled, seconds=SECONDS),
        Check("versions", partial(look_at_versions, cluster, hubs), seconds=SECONDS),
        Check("clocks", clocks, seconds=SECONDS),
    ]
    return Examination(checks, cluster.close)
