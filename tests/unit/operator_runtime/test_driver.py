"""What kopf is told about the network."""

from itertools import islice

from epochkv_operator.control.driver import kopf_settings


def test_kopf_tries_again_for_as_long_as_it_is_refused() -> None:
    backoffs = kopf_settings().networking.error_backoffs
    assert not isinstance(backoffs, float)
    seconds = list(islice(backoffs, 2000))
    assert len(seconds) == 2000, "an hour of them is not enough"
    assert all(0 < value <= 2 for value in seconds)
    assert list(islice(backoffs, 3)) == [0.2, 0.5, 1.0], "each request begins with the short ones"
