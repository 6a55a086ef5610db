"""Planning: pure functions from specs and observations to objects, steps, conditions and statuses. No clock, no I/O, no kopf.

`desired_pool` and `desired_engine` make every object of a pool or an engine; `plan_pool` and `plan_engine` say what to apply and
delete; `pool_status` and `engine_status` make whole statuses, conditions included. Plans are level-triggered: planning again on
the result of a plan yields an empty one.
"""
