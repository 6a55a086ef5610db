"""Rules that other parts than the state machines keep: authority, driver, connector, client, owner. Each taken away."""

from __future__ import annotations

from tests.model.mutants.kind import CALM, DUEL, Mutant
from tests.model.parts import Rules

SERVING = {"pushed": False, "trouble": 0.1, "takeovers": 0.1}
LONG = {**CALM, "pushed": True, "policy": "Retain", "push_crashes": 0.3, "idle": 0.0, "steps": 3000, "disorder": 0.1, "pace": 0.4}
PUSHED = {"pushed": True, "restores": False, "trouble": 0.3}

OUTSIDE_MUTANTS = {
    "grants without a leadership read": Mutant(Rules(verify_always=True), "4", {**DUEL, "watch": 1.0, "freezes": 1.0}),
    "the read before the heartbeats are collected": Mutant(
        Rules(read_before_collecting=True), "4", {**DUEL, "ambush": 0.1, "trouble": 1.0, "steps": 3000}
    ),
    "the read compares the holder, not the term": Mutant(
        Rules(holder_only=True), "4", {**DUEL, "takeovers": 1.0, "ambush": 0.1, "steps": 3000, "trouble": 0.3}
    ),
    "a new leader reads the record from a cache": Mutant(Rules(stale_load=True), "4", {**DUEL, "takeovers": 1.0}),
    "a late Record lowers the target": Mutant(Rules(record_lowers=True), "4"),
    "a new leader learns a longer lease late": Mutant(
        Rules(config_late=True), "4", {**DUEL, "reconfigures": True, "takeovers": 1.0, "steps": 1200}
    ),
    "loads are never poisoned": Mutant(Rules(loads_never_poisoned=True), "3", {**SERVING, "busy_store": True}),
    "the lease is not checked after a load": Mutant(Rules(lease_unchecked_after_load=True), "3", {**SERVING, "busy_store": True}),
    "saves under the names of old pins": Mutant(
        Rules(saves_under_old_pins=True), "3", {**PUSHED, "orders": ("client, fence first", "client, push under pause")}
    ),
    "bypass reuses across weights": Mutant(Rules(bypass_shares=True), "3", {**PUSHED, "orders": ("client, fence first",)}),
    "a local reset keeps a root that others used": Mutant(
        Rules(local_reset_keeps_unused=True), "3", {**PUSHED, "orders": ("engines reset together",)}
    ),
    "a local reset without a lease waits for no epoch": Mutant(
        Rules(local_reset_without_floor=True), "3", {**PUSHED, "orders": ("engines reset together",)}
    ),
    "a trainer resumes before publication": Mutant(
        Rules(trainer_resumes_unpublished=True), "5", {**PUSHED, "orders": ("client, push under pause",)}
    ),
    "a trainer lists the boots after the push": Mutant(
        Rules(trainer_lists_on_exit=True), "5", {**LONG, "orders": ("client, push under pause",)}
    ),
    "a trainer says that it asked just now": Mutant(Rules(trainer_says_now=True), "5", {**LONG, "orders": ("client, reset after a push",)}),
    "a trainer joins an epoch that others asked for": Mutant(
        Rules(trainer_takes_any_epoch=True),
        "5",
        {**LONG, "push_crashes": 0.0, "trainer_restarts": 0.5, "orders": ("client, reset after a push", "client, fence first")},
    ),
}
