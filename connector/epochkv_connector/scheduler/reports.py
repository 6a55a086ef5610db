"""What ranks report: loads that have ended, and acknowledgements of jobs.

vLLM has consumed `failed_recving` by the time we are called, so a success cannot be turned into a failure here. One whose
names have changed meanwhile is hidden from vLLM instead, and every rank is asked to report once more, as failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from epochkv_connector.scheduler.requests import LoadEvent, LoadState
from epochkv_connector.scheduler.state import State
from epochkv_connector.wire.steps import WorkerReport

IDLE_DRAIN_SECONDS = 0.05
"""How long an in-process engine, which never steps after its last request, may wait for device-to-host copies."""


class LocalWorker(Protocol):
    """A worker half in this very process (`worker.facade.WorkerSide`)."""

    def drain(self, timeout: float) -> WorkerReport:
        """Wait for device-to-host copies, at most `timeout` seconds; acknowledgements that are ready."""


class Reports:
    """Takes the results of each step.

    Args:
        local_worker: finds the worker half when it lives in this process.
    """

    def __init__(self, state: State, local_worker: Callable[[], LocalWorker | None]) -> None:
        self._state, self._fence, self._requests, self._books = state, state.fence, state.requests, state.books
        self._local_worker = local_worker

    def take(self, output: Any) -> None:
        """Hide successes that must not be, record the other loads, count acknowledgements."""
        self._fence.enter_report()
        try:
            self._state.apply()
            self._record_loads(output)
        except Exception as error:
            self._state.on_error("record_loads", error)
            self._distrust_loads(output)
        finally:
            self._fence.leave_report()
        if isinstance(output.kv_connector_worker_meta, WorkerReport):
            self._count_acks(output.kv_connector_worker_meta)

    def _record_loads(self, output: Any) -> None:
        failed = set(output.failed_recving or ())
        for request_id in tuple(output.finished_recving or ()):
            record = self._requests.report(request_id, failed=request_id in failed)
            if record is None:
                continue
            if record.load is LoadState.REPEATED:
                self._hide(output, request_id)
                continue
            if request_id in failed:
                record.num_offered = 0  # its blocks are computed again
            self._fence.end_load(record.vllm, succeeded=request_id not in failed)

    def _distrust_loads(self, output: Any) -> None:
        """The bookkeeping has failed: take every success back, as if it was poisoned, and use the tiers no more."""
        self._state.broken = True
        for request_id in set(output.finished_recving or ()) - set(output.failed_recving or ()):
            record = self._requests.get(request_id)
            if record is not None and self._requests.on(record, LoadEvent.DISTRUST):
                self._hide(output, request_id)

    @staticmethod
    def _hide(output: Any, request_id: str) -> None:
        output.finished_recving = set(output.finished_recving) - {request_id}

    def _count_acks(self, report: WorkerReport) -> None:
        """One by one: what one acknowledgement breaks must not keep the blocks of others."""
        if self._books is None:
            return
        for ack in report.acks:
            try:
                self._books.on_acks((ack,))
            except Exception as error:
                self._state.fail("acknowledgement", error)

    def drain_when_idle(self) -> None:
        """An in-process engine never steps after its last request: collect device-to-host acknowledgements here."""
        if len(self._requests) or self._books is None or not self._books.saves.holds_gpu_blocks():
            return
        worker = self._local_worker()
        if worker is not None:
            self._count_acks(worker.drain(IDLE_DRAIN_SECONDS))
