"""Rules that other parts than the state machines keep: authority, driver, connector, client, owner. Each taken away."""

from __future__ import annotations

from tests.model.mutants.kind import DUEL, Mutant
from tests.model.parts import Rules

SERVING = {"trouble": 0.1, "takeovers": 0.1}
ALONE = {"restores": False, "trouble": 0.3}
LABELLING = {"orders": ("client, label",), "pushes": 1.0, "restores": False, "idle": 0.0, "trouble": 0.03, "freezes": 0.03}

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
    "loads are never invalidated": Mutant(Rules(loads_never_invalidated=True), "3", {**SERVING, "busy_store": True}),
    "the lease is not checked after a load": Mutant(Rules(lease_unchecked_after_load=True), "3", {**SERVING, "busy_store": True}),
    "saves under the names of old pins": Mutant(Rules(saves_under_old_pins=True), "3", SERVING),
    "an engine shares without a lease": Mutant(Rules(serves_without_lease=True), "3", SERVING),
    "a local reset keeps the names of its epoch": Mutant(
        Rules(local_reset_keeps_root=True), "3", {**ALONE, "orders": ("engines reset together", "one engine reset")}
    ),
    "a local reset without a lease waits for no epoch": Mutant(
        Rules(local_reset_without_floor=True), "3", {**ALONE, "orders": ("engines reset together", "one engine reset", "spec, reset")}
    ),
    "a trainer goes on before publication": Mutant(
        Rules(trainer_resumes_unpublished=True), "4", {"orders": ("client, reset",), "restores": False}
    ),
    "a trainer asks above a target of before": Mutant(
        Rules(trainer_remembers_target=True), "4", {"orders": ("client, reset", "spec, reset"), "restores": False}
    ),
    "labels replace those on record": Mutant(Rules(labels_replace=True), "4", {**LABELLING, "takeovers": 1.0}),
}
