"""`epochkv doctor`: what is wrong with a pool or with a cluster, and what mends it. Nothing is changed.

A pool is examined by its connection file. What examines a cluster comes from another package, by the entry point `cluster` of the group
`epochkv.doctor`: an async function of `ClusterScope` that returns findings. The fence imports nothing of it.
"""

import asyncio
import contextlib
import enum
import logging
import os
import shlex
import stat
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from epochkv_fence import quantity
from epochkv_fence.cli.render import Output, show_json
from epochkv_fence.client.probe import HubAnswer, NoHub, is_inside, probe_hub, probe_master
from epochkv_fence.client.results import PoolStatus, WeightsReport, report
from epochkv_fence.connection import (
    ATTACH_ENV,
    CAPACITY_ENV,
    CONFIG_ENV,
    FENCE_ENV,
    ROOT_SECRET_FILE,
    ConfigurationError,
    Connection,
    read_document,
)
from epochkv_fence.net.keys import CLIENT_SECRET_FILE
from epochkv_fence.protocol.pool import listed

logger = logging.getLogger(__name__)
GROUP: Final = "epochkv.doctor"
CHECK_SECONDS: Final = 30.0
NO_CLUSTER: Final = (
    "epochkv doctor looks at one pool with --config PATH (or the variable EPOCHKV_CONFIG), or else at a cluster, which needs what is not "
    "installed: install epochkv[operator]"
)
COPY: Final = "copy STATE/client of that hub here again (on Kubernetes: the Secret <pool>-fence), and give its connection.json"
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class Level(enum.StrEnum):
    """How bad it is, best first."""

    OK = "ok"
    WARNING = "warning"  # it works, with fewer hits, or not for long
    UNKNOWN = "unknown"  # this could not be looked at
    WRONG = "wrong"


STYLE: Final = {Level.OK: "green", Level.WARNING: "yellow", Level.UNKNOWN: "magenta", Level.WRONG: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `fix`: what to do, as a command to paste where there is one. `about`: the object, such as `pool rl/policy`."""

    check: str
    level: Level
    text: str
    fix: str = ""
    about: str = ""


class CannotLook(Exception):
    """A check cannot be made; the text says why, and `fix` how it can be."""

    def __init__(self, text: str, fix: str = "") -> None:
        super().__init__(text)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class ClusterScope:
    """Options of the command. None: all namespaces of pools, wherever an operator is found, the hubs that the pools name."""

    namespace: str | None = None
    operator_namespace: str | None = None
    hub: str | None = None


async def guarded(check: str, work: Awaitable[Sequence[Finding]], about: str = "", seconds: float = CHECK_SECONDS) -> list[Finding]:
    """What a check finds. One that hangs, breaks or may not look is one line, and costs no other."""
    try:
        async with asyncio.timeout(seconds):
            return list(await work)
    except TimeoutError:
        text, fix = f"no answer within {seconds:g} s", ""
    except CannotLook as error:
        text, fix = str(error), error.fix
    except Exception as error:
        logger.debug("check %s", check, exc_info=True)
        text, fix = f"the check itself failed: {type(error).__name__}: {error}", ""
    return [Finding(check, Level.UNKNOWN, text, fix, about)]


# --------------------------------------------------------------------------------------------------------------- the command


def doctor(
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="PATH", help="Look at this pool alone, by its connection.json or the directory of it."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Only pools and engines of this namespace. Default: all.")
    ] = None,
    operator_namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where the operator runs. Default: wherever one is found.")
    ] = None,
    hub: Annotated[
        str | None,
        typer.Option(metavar="tcp://HOST:PORT", help="Dial the hub at this address, such as that of a port-forward. Default: the pools'."),
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Lines for people, or JSON.")] = Output.TABLE,
) -> None:
    """Say what is wrong, and how to fix it. Nothing is changed.

    With --config or the variable EPOCHKV_CONFIG it looks at that pool, without Kubernetes. Otherwise, and with an option of clusters,
    it looks at the cluster of the kubeconfig (or of the pod it runs in).

    \b
      epochkv doctor --config policy/client
      epochkv doctor -n rl
      epochkv doctor -o json | jq -r '.findings[] | select(.level == "wrong") | .fix'

    Exit status: 0 nothing is wrong; 1 something is; 2 some checks could not run; the others found nothing wrong.
    """
    of_cluster = (namespace, operator_namespace, hub) != (None, None, None)
    if of_cluster and config is not None:
        raise typer.BadParameter("--config looks at one pool; leave it out to look at a cluster")
    if config is not None or (CONFIG_ENV in os.environ and not of_cluster):
        examined = examine_pool(config)
    else:
        examined = _of_cluster()(ClusterScope(namespace, operator_namespace, hub))
    found = asyncio.run(examined)
    show(found, output)
    levels = {finding.level for finding in found}
    raise typer.Exit(1 if Level.WRONG in levels else 2 if Level.UNKNOWN in levels else 0)


def _of_cluster() -> Callable[[ClusterScope], Coroutine[Any, Any, list[Finding]]]:
    """Raises `ConfigurationError` where no package examines clusters."""
    for entry in entry_points(group=GROUP, name="cluster"):
        with contextlib.suppress(ModuleNotFoundError):
            found: Callable[[ClusterScope], Coroutine[Any, Any, list[Finding]]] = entry.load()
            return found
    raise ConfigurationError(NO_CLUSTER)


def show(found: Sequence[Finding], output: Output) -> None:
    counts = {level.value: sum(finding.level is level for finding in found) for level in Level}
    if output is Output.JSON:
        show_json({"findings": [asdict(finding) for finding in found], **counts})
        return
    console = Console(soft_wrap=True)
    width = max((len(finding.check) for finding in found), default=0)
    for finding in found:
        line = Text(f"{finding.level.value:<8}", style=STYLE[finding.level])
        about = f"{finding.about}: " if finding.about else ""
        line.append(f"{finding.check:<{width}}  {about}{finding.text}", style="default")
        console.print(line, highlight=False)
        if finding.fix:
            console.print(Text(f"{'':<8}{'':<{width}}  -> {finding.fix}"), highlight=False)
    summary = ", ".join(f"{number} {level}" for level, number in reversed(counts.items()) if number)
    console.print(summary or "nothing was looked at", highlight=False, markup=False)


# -------------------------------------------------------------------------------------------------------------------- a pool


async def examine_pool(config: str | None) -> list[Finding]:
    """What can be seen with a connection file alone. `config` None: the one that `EPOCHKV_CONFIG` names."""
    found = [*check_connection(config), *check_plugins(os.environ)]
    if found[0].level is Level.WRONG:
        return found
    found += await guarded("hub", _hub(Connection.load(config, what="--config"), config))
    distributed = read_document(config, os.environ, "--config").content.get("distributed")
    address = distributed.get("master_address") if isinstance(distributed, dict) else None
    return found + (await guarded("store", _master(str(address))) if address else [])


def check_connection(config: str | None) -> list[Finding]:
    """Whether the connection file and its keys can be used, by engines, too, and by nobody else."""
    try:
        connection = Connection.load(config, what="--config")
        connection.client_keys()
    except ConfigurationError as error:
        return [Finding("connection", Level.WRONG, str(error), COPY)]
    found = []
    try:
        connection.root_secret()
    except ConfigurationError as error:
        found.append(Finding("connection", Level.WARNING, f"{error}; a trainer does not need it", COPY))
    folder = Path(connection.hub.credentials_dir or os.devnull)
    for path in (folder / CLIENT_SECRET_FILE, folder / ROOT_SECRET_FILE):
        # A link is of a volume that Kubernetes mounts: its mode is the pod's affair.
        if path.exists() and path.stat().st_mode & OTHERS and not path.is_symlink():
            text = f"{path} can be read by others (mode {stat.S_IMODE(path.stat().st_mode):04o}), who can then speak for the pool"
            found.append(Finding("connection", Level.WARNING, text, f"chmod go-rwx {shlex.quote(str(path))}"))
    return found or [Finding("connection", Level.OK, f"pool {connection.pool.name} ({connection.pool.uid})")]


async def _hub(connection: Connection, config: str | None) -> list[Finding]:
    answer = await probe_hub(connection)
    if isinstance(answer, HubAnswer):
        well = Finding("hub", Level.OK, f"{connection.hub.endpoint} answers in {1000 * answer.round_trip_seconds:.1f} ms")
        return [well, *judge_pool(answer.status, f" --config {shlex.quote(config)}" if config else "")]
    return [Finding("hub", Level.WRONG, answer.text, fix_of_hub(answer))]


def fix_of_hub(answer: NoHub) -> str:
    """What to do where no hub answers."""
    host, _, port = answer.endpoint.removeprefix("tcp://").rpartition(":")
    if answer.dialled == "open":
        hangs = "look at the log of the hub: does it hang?"
        return {"pool": "take connection.json and keys from one pool", "key": f"{COPY}; if that does not help, {hangs}"}.get(
            answer.trouble, hangs
        )
    return {
        "unresolved": f"getent hosts {host}   # or start the hub with --advertise tcp://ADDRESS:{port}, and copy STATE/client again",
        "refused": f"epochkv hub --pool NAME --listen 'tcp://*:{port}' --state DIR   # on {host}, if it does not run there",
        "silent": f"open TCP port {port} of {host} for this machine: firewall, security group, NetworkPolicy",
        "unroutable": f"ip route get {host}",
    }[answer.dialled]


def judge_pool(now: PoolStatus, option: str = "") -> list[Finding]:
    """What the hub says of the pool and its engines that is not as it should be, in its own words."""
    found = [*_epoch(now, option), *_engines(now)]
    known = WeightsReport(report(now.engines, now.labels).groups)
    if known.groups and not known.equal:
        fix = f"epochkv weights{option}   # push again to those that missed a push"
        found.append(Finding("weights", Level.WARNING, f"engines hold different weights, and share less: {known}", fix))
    versions = sorted({engine.versions["mooncake"] for engine in now.engines if "mooncake" in engine.versions})
    if len(versions) > 1:
        text = f"engines run different versions of Mooncake ({', '.join(versions)}), which may misread each other's bytes"
        found.append(Finding("versions", Level.WRONG, text, "give all engines and stores one image, or one wheel of Mooncake"))
    well = f"epoch {now.published} is published, {len(now.engines)} engines connected"
    return found or [Finding("engines", Level.OK, f"{well}, and none that is awake stalls, shares nothing or lacks a tier")]


def _epoch(now: PoolStatus, option: str) -> Iterator[Finding]:
    if not now.converged:
        waits = f"waits for {listed(now.laggards)}" if now.laggards else "waits for leases that are out"
        text = f"epoch {now.target} is asked for and {now.published} is published: it {waits}"
        yield Finding("epoch", Level.WARNING, text, f"epochkv wait {now.target}{option}")


def _engines(now: PoolStatus) -> Iterator[Finding]:
    if not now.engines:
        settling = f"the hub became leader just now; the list of engines is complete in {now.settling_seconds:.0f} s"
        yield Finding("engines", Level.WARNING, settling if now.settling_seconds else "no engine is connected, so nobody uses this pool")
    for engine in now.engines:
        if now.converged and engine.state == "behind":
            text = f"{engine.name} is at epoch {engine.epoch}, and {now.published} is published: if that lasts, it stalls"
            level = Level.WRONG if engine.age_seconds > now.lease_seconds else Level.WARNING
            yield Finding("engines", level, text, "end its process, and start it again")
        elif engine.state in ("unknown", "isolated"):
            why = "its names of this epoch are given up; it has asked for the next" if engine.weights else "its weights are not known yet"
            yield Finding("engines", Level.WARNING, f"{engine.name} shares nothing: {engine.weights_note or why}")
        elif engine.silent_seconds > 2 / 3 * now.lease_seconds:
            text = f"{engine.name} was last heard {engine.silent_seconds:.0f} s ago, and has a lease of {now.lease_seconds:.0f} s"
            yield Finding("engines", Level.WARNING, text, "look whether its process runs and reaches the hub")
        if engine.tiers_off:
            text = f"{engine.name}: {engine.tiers_off}: {engine.tiers_note or 'it does not say why'}"
            yield Finding("tiers", Level.WARNING, text, "change what the line says, then restart the engine")


async def _master(address: str) -> list[Finding]:
    dialled, text = await probe_master(address)
    if dialled == "open":
        return [Finding("store", Level.OK, text, about=address)]
    if dialled == "unresolved" and is_inside(address.rpartition(":")[0]):
        raise CannotLook(f"{address} is an address inside of a cluster, and this machine does not know it", "epochkv doctor -n NAMESPACE")
    what = "etcd --listen-client-urls=http://0.0.0.0:" if address.startswith("etcd://") else "mooncake_master --rpc_port="
    fix = f"{what}{address.rpartition(':')[2]}   # where it is to run"
    return [Finding("store", Level.WRONG, f"{text}; engines serve without L2 meanwhile", fix, address)]


def check_plugins(environ: Mapping[str, str]) -> list[Finding]:
    """Whether vLLM and verl would load our plugins in processes that are started from this environment.

    A process that does not load a plugin runs no code of ours, so it cannot say that `EPOCHKV_ATTACH` did nothing in it.
    """
    found = []

    def wrong(text: str, fix: str) -> None:
        found.append(Finding("plugins", Level.WRONG, text, fix))

    for name in (ATTACH_ENV, FENCE_ENV):
        value = environ.get(name, "").strip()
        if value not in ("", "0", "1"):
            wrong(f"{name} is {value!r}; it must be 1, or 0 for off", f"export {name}=1")
        if value == "1" and "epochkv" not in entry_points(group="vllm.general_plugins").names:
            wrong(f"{name} is 1, and the connector is not installed here", "pip install '.[connector]'   # in a clone")
    if size := environ.get(CAPACITY_ENV, "").strip():
        with contextlib.suppress(ValueError):
            size = "" if quantity.parse(size) >= 0 else size
        if size:
            wrong(f"{CAPACITY_ENV} is {size!r}; it must be a size such as 64Gi", f"export {CAPACITY_ENV}=64Gi")
    for name, lost in (
        ("VLLM_PLUGINS", f"vLLM does not load epochkv: {ATTACH_ENV} and {FENCE_ENV} do nothing, and engines share nothing"),
        ("VERL_USE_EXTERNAL_PLUGINS", "verl does not load epochkv, and refuses the block kv_store"),
    ):
        given = environ.get(name, "epochkv").split(",")
        names = [part.strip() for part in given]
        loads = {"epochkv", "auto"} & {one.lower() for one in names} if name.startswith("VERL") else "epochkv" in given
        if not loads:  # vLLM takes a name as it is, blanks and all
            rest = [one for one in names if one.lower() not in ("", "none", "epochkv")]
            wrong(f"{name} is {environ[name]!r}, so {lost}", f"export {name}={','.join((*rest, 'epochkv'))}")
    return found
