"""From the arguments of `epochkv plan` to outcomes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from epochkv_operator.cli import files, look
from epochkv_operator.cli.cluster import NoCluster, connect
from epochkv_operator.cli.preview import Outcome
from epochkv_operator.kube.client import ApiError, Forbidden

__all__ = ["NoCluster", "Unanswered", "planned"]


class Unanswered(Exception):
    """The cluster did not answer what was asked; the text says what to do."""


def planned(
    paths: Sequence[str], live: bool, namespace: str | None, context: str | None, operator_namespace: str
) -> tuple[list[Outcome], list[str]]:
    """Outcomes, and what a person should know of how they came about.

    Raises:
        files.FilesError: files that cannot be read, or would be refused.
        NoCluster, Unanswered: the cluster cannot be asked.
    """
    if live:
        return asyncio.run(_live(paths, namespace, context, operator_namespace))
    found = _read(paths, namespace, "default")
    return look.from_files(found.manifests, operator_namespace).outcomes(), _skipped(found)


async def _live(
    paths: Sequence[str], namespace: str | None, context: str | None, operator_namespace: str
) -> tuple[list[Outcome], list[str]]:
    client, default_namespace = await connect(context)
    try:
        found = _read(paths, namespace, default_namespace)
        seen = await look.from_cluster(client, found.manifests, operator_namespace)
        return await look.checked(client, seen.outcomes(), seen.world), [*_skipped(found), *seen.warnings]
    except Forbidden as error:
        raise Unanswered(f"{error.message}: ask for this right, or leave out --live") from error
    except ApiError as error:
        raise Unanswered(f"{client.configuration.host}: {error}") from error
    finally:
        await client.close()


def _read(paths: Sequence[str], namespace: str | None, default_namespace: str) -> files.Found:
    found = files.read(paths, sys.stdin, namespace, default_namespace)
    if not found.manifests:
        raise files.FilesError(f"no KVCachePool or InferenceEngine in {', '.join(paths)}", *_skipped(found))
    return found


def _skipped(found: files.Found) -> list[str]:
    return [f"skipped, not a kind of EpochKV: {name}" for name in found.skipped]
