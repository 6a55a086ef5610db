"""Planning: pure functions from specs and observations to objects, steps, conditions and statuses. No clock, no I/O, no kopf.

    desired_pool(pool, context) -> list[Json]                        every object of a pool but its Secret; raises InvalidTemplate
    desired_engine(engine, pool | None, context) -> list[Json]       every object of an engine; pool None: serves without connector
    plan_pool(pool, observed, context) -> Plan                       apply, delete, details, problem
    plan_engine(engine, pool | None, observed, context) -> Plan
    pool_status(pool, observed, context, previous, now) -> Json      a whole status; conditions included
    engine_status(engine, pool | None, observed, previous, now) -> Json

`pool` and `engine` come from `epochkv_operator.api.parse_pool` / `parse_engine`. `Context` holds the operator's own settings,
`Observed` live
objects as JSON, the hub's view and the problem of the last plan. A `Plan` with a `problem` changes nothing: pass the problem on
in `Observed`, and
the conditions say it. Plans are level-triggered: planning again on the result of a plan yields an empty one.
"""

from epochkv_operator.planning.conditions import engine_conditions, epoch_ahead, pool_conditions
from epochkv_operator.planning.connection import connection, connection_hash, transfer_config
from epochkv_operator.planning.context import (
    PUSH_SECONDS,
    Condition,
    Context,
    HubEngine,
    HubView,
    KeysView,
    Observed,
    Outlier,
    Problem,
    ReclaimView,
    WeightsGroup,
    timestamp,
)
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.merge import InvalidTemplate
from epochkv_operator.planning.plan import Plan, plan_engine, plan_pool
from epochkv_operator.planning.pool import desired_pool
from epochkv_operator.planning.status import engine_status, pool_status

__all__ = [
    "PUSH_SECONDS",
    "Condition",
    "Context",
    "HubEngine",
    "HubView",
    "InvalidTemplate",
    "KeysView",
    "Observed",
    "Outlier",
    "Plan",
    "Problem",
    "ReclaimView",
    "WeightsGroup",
    "connection",
    "connection_hash",
    "desired_engine",
    "desired_pool",
    "engine_conditions",
    "engine_status",
    "epoch_ahead",
    "plan_engine",
    "plan_pool",
    "pool_conditions",
    "pool_status",
    "timestamp",
    "transfer_config",
]
