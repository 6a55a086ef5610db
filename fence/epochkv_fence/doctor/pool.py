"""The checks of one pool by its connection file."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from epochkv_fence import VERSION
from epochkv_fence.connection import CONFIG_ENV, ROOT_SECRET_FILE, ConfigurationError, Connection, read_document
from epochkv_fence.doctor import judging
from epochkv_fence.doctor.finding import CannotLook, Finding, Say
from epochkv_fence.doctor.looking import HubLook, NoHub, look_at_hub
from epochkv_fence.doctor.plugins import VARIABLES, check_plugins
from epochkv_fence.doctor.running import Check, Examination, Shared
from epochkv_fence.doctor.store import look_at_admins, look_at_master
from epochkv_fence.net.keys import CLIENT_SECRET_FILE

OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
NO_HUB: Final = "the hub was not reached"
COPY: Final = "copy STATE/client of that hub here again (on Kubernetes: the Secret <pool>-fence), and give its connection.json"


def pool_checks(config: str | None, store_admin: Sequence[str] = ()) -> Examination:
    """What can be looked at with a connection file alone.

    Args:
        config: as `--config`; None: what `EPOCHKV_CONFIG` names.
        store_admin: URLs of the admin ports of the store's masters.
    """
    shared, words = Shared(), judging.standalone_words(config or "")

    async def hub() -> HubLook | NoHub:
        try:
            connection = Connection.load(config, what="--config")
            connection.client_keys()
        except ConfigurationError:
            raise CannotLook("the connection file cannot be used") from None
        return await look_at_hub(connection)

    async def reached() -> HubLook:
        look = await shared.get("hub", hub)
        if isinstance(look, NoHub):
            raise CannotLook(NO_HUB)
        return look

    def judged(name: str, judge: Callable[[HubLook], list[Finding]]) -> Check:
        async def look() -> list[Finding]:
            return judge(await reached())

        return Check(name, look)

    async def connected() -> list[Finding]:
        return judge_hub(await shared.get("hub", hub))

    checks = [
        Check("connection", _now(lambda: check_connection(config))),
        Check("hub", connected),
        judged("epoch", lambda look: judging.judge_epoch(look, words)),
        judged("engines", lambda look: judging.judge_engines(look, words)),
        judged("weights", judging.judge_weights),
        judged("tiers", judging.judge_tiers),
        judged("versions", lambda look: judging.judge_versions(look, VERSION)),
        judged("clocks", judging.judge_clocks),
        *([Check("plugins", _now(lambda: check_plugins(os.environ)))] if any(name in os.environ for name in VARIABLES) else []),
        *([Check("store", lambda: look_at_admins(store_admin))] if store_admin else []),
        *[Check("store", partial(look_at_master, address)) for address in _master(config)],
    ]
    return Examination(checks)


def judge_hub(look: HubLook | NoHub, about: str = "") -> list[Finding]:
    """Whether the hub answers, and what to do when it does not."""
    say = Say("hub", about)
    if isinstance(look, HubLook):
        text = f"{look.endpoint} answers in {1000 * look.round_trip_seconds:.1f} ms"
        settling = look.second.settling_seconds
        return [say.ok(f"{text}; it has only begun to lead, and knows all engines in {settling:.0f} s" if settling else text)]
    host, _, port = look.endpoint.removeprefix("tcp://").rpartition(":")
    if look.dialled == "open":
        fixes = {"pool": "take connection.json and keys from one pool", "": "look at the log of the hub: does it hang?"}
        return [say.wrong(look.text, fixes.get(look.trouble, COPY))]
    fix = {
        "unresolved": f"getent hosts {host}   # or start the hub with --advertise tcp://ADDRESS:{port}, and copy STATE/client again",
        "refused": f"epochkv hub --pool NAME --listen tcp://0.0.0.0:{port} --state DIR   # on {host}, if it does not run there",
        "silent": f"open TCP port {port} of {host} for this machine: firewall, security group, NetworkPolicy",
        "unroutable": f"ip route get {host}",
    }
    return [say.wrong(look.text, fix[look.dialled])]


def check_connection(config: str | None, environ: dict[str, str] | None = None) -> list[Finding]:
    """Whether the connection file and its keys can be used, by engines, too, and by nobody else."""
    say, variables = Say("connection"), os.environ if environ is None else environ
    try:
        connection = Connection.load(config, variables, what="--config")
        connection.client_keys()
    except ConfigurationError as error:
        return [say.wrong(str(error))]
    found = []
    try:
        connection.root_secret()
    except ConfigurationError as error:
        found.append(say.warning(f"{error}; a trainer does not need it", COPY))
    folder = connection.hub.credentials_dir
    for name in (CLIENT_SECRET_FILE, ROOT_SECRET_FILE) if folder is not None else ():
        path = Path(folder or "") / name
        if path.exists() and path.stat().st_mode & OTHERS and not _mounted(path):
            text = f"{path} can be read by others (mode {stat.S_IMODE(path.stat().st_mode):04o}), who can then speak for the pool"
            found.append(say.warning(text, f"chmod go-rwx {path}"))
    origin = connection.origin if connection.origin != CONFIG_ENV else f"the variable {CONFIG_ENV}"
    return found or [say.ok(f"pool {connection.pool.name} ({connection.pool.uid}), from {origin}")]


def _mounted(path: Path) -> bool:
    """A file of a volume that Kubernetes mounts is a link into a folder whose name begins with two dots; its mode is the pod's affair."""
    return path.is_symlink() and any(part.startswith("..") and len(part) > 2 for part in os.readlink(path).split("/"))


def _master(config: str | None) -> list[str]:
    """The Mooncake master that the connection file names, if it does."""
    try:
        distributed = read_document(config, os.environ, "--config").content.get("distributed")
    except ConfigurationError:
        return []
    address = distributed.get("master_address") if isinstance(distributed, dict) else None
    return [address] if isinstance(address, str) else []


def _now(look: Callable[[], list[Finding]]) -> Callable[[], Awaitable[list[Finding]]]:
    async def looked() -> list[Finding]:
        return look()

    return looked
