"""What the trainer's client and the hub say of weights in running engines: that a push has arrived, or whom it missed.

That KV of other weights is never found is shown elsewhere, and without this client: names depend on nothing that it says. The
tests share two engines and leave both with the same weights.
"""

import pytest

from epochkv_fence import client
from tests.engine.conftest import Pair, Prompts, Reference, Weights


def test_an_update_waits_for_equal_new_weights_and_gives_them_a_label(
    pair: Pair, trainer: client.Pool, prompts: Prompts, reference: Reference, weights: Weights
) -> None:
    prompt = prompts()
    pair.check_sharing(prompt, reference(prompt, pair.model))
    target, (before,) = trainer.status().target, trainer.weights().groups
    with trainer.weight_update("step-1", timeout_s=60) as update:
        pair.push(weights.after(pair.model))
    assert update.other_than == {before.id}
    assert update.report is not None
    (after,) = update.report.groups
    assert (after.label, after.engines, update.report.unknown) == ("step-1", (pair.a.name, pair.b.name), ())
    assert after.id != before.id
    assert [(group.id, group.label) for group in trainer.weights().groups] == [(after.id, "step-1")]
    assert [(view.weights.hex(), view.label, view.engines) for view in pair.pool.snapshot().weights] == [(after.id, "step-1", 2)]
    pair.check_sharing(prompt, reference(prompt, pair.model))
    assert trainer.status().target == target, "new weights need no epoch"
    with pytest.raises(client.WeightsDiverged, match="the weights did not change"), trainer.weight_update("step-2", timeout_s=1):
        pair.push(pair.model)
    assert [group.label for group in trainer.weights().groups] == ["step-1"]


def test_an_engine_that_a_push_missed_is_named_until_it_has_the_weights(pair: Pair, trainer: client.Pool, weights: Weights) -> None:
    (before,) = trainer.wait_weights(timeout_s=60, label="before").groups
    new = weights.after(pair.model)
    with pytest.raises(client.WeightsDiverged) as missed, trainer.weight_update("half", timeout_s=3):
        pair.a.reload_weights(new)
    (after,) = missed.value.report.ids - {before.id}
    assert missed.value.engines == (pair.b.name,)
    assert f"{pair.b.name} does not. Now {after[:8]}" in str(missed.value)
    assert str(missed.value).endswith(f": {pair.a.name}; {before.id[:8]} (before): {pair.b.name}")
    assert "half" not in trainer.status().labels.values(), "only what all engines hold is called so"
    assert [view.engine for view in pair.pool.snapshot().diverged] == [pair.b.name]
    pair.push(new)
    assert trainer.wait_weights(timeout_s=60, label="whole").ids == {after}
    assert pair.pool.snapshot().diverged == []
