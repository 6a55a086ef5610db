"""How an engine, a trainer or the command line reaches a pool: one small JSON and five files, or the environment alone.

Everything is checked where it is read. Every error names the key, file or variable and what to do about it, because
people read it in the log of somebody else's launcher. Whatever comes in, only `ConfigurationError` comes out.

The JSON is the connector's configuration file; a client reads its `pool` and `hub` and leaves the rest alone:

    {"pool": {"name": "policy", "uid": "6d1c..."}, "hub": {"endpoint": "tcp://hub.example:7700", "credentials_dir": "."}}

Without `credentials_dir` the keys come from the environment, so that Ray's `runtime_env.env_vars` is enough.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from epochkv_fence.net.keys import ClientKeys

T = TypeVar("T")
CONFIG_ENV: Final = "EPOCHKV_CONFIG"
FENCE_ENV: Final = "EPOCHKV_FENCE"
CAPACITY_ENV: Final = "EPOCHKV_LOCAL_CAPACITY"
ATTACH_ENV: Final = "EPOCHKV_ATTACH"
"""Switches the connector on in engines that have none configured (`epochkv_connector.engine.plugin`)."""
CONFIG_FILE: Final = "connection.json"
GIVEN: Final = "the connection configuration"
"""What errors call a source that has no other name."""
HUB_PUBLIC_ENV: Final = "EPOCHKV_HUB_PUBLIC_KEY"
CLIENT_PUBLIC_ENV: Final = "EPOCHKV_CLIENT_PUBLIC_KEY"
CLIENT_SECRET_ENV: Final = "EPOCHKV_CLIENT_SECRET_KEY"
CLIENT_ENVS: Final = (HUB_PUBLIC_ENV, CLIENT_PUBLIC_ENV, CLIENT_SECRET_ENV)
"""In the order of `ClientKeys`."""
ROOT_SECRET_ENV: Final = "EPOCHKV_ROOT_SECRET"
ROOT_SECRET_FILE: Final = "root.secret"
ROOT_SECRET_BYTES: Final = 32
KEY_FILES: Final = "hub.pub, client.pub and client.key (a copy of STATE/client of `epochkv hub`, or the mounted Secret <pool>-fence)"
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_UID: Final = 253
RELOAD_TRIES: Final = 4
RELOAD_SECONDS: Final = 0.025
ENDPOINT: Final = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s\[\]:/@*;]+):(?P<port>[0-9]{1,5})")


class ConfigurationError(ValueError):
    """The pool cannot be reached with what was given; the message names key, file or variable and the remedy."""


class PoolRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pool. `uid` is never reused, also when a pool of the same name is made again."""

    name: Annotated[str, Meta(description="The pool's name, for people.", extra={"allowed": "the pool's name"})]
    uid: Annotated[
        str,
        Meta(
            description="Part of every block's name. A new pool gets a new uid, even under an old name.",
            extra={"allowed": "the pool's uid"},
        ),
    ]
    namespace: Annotated[str, Meta(description="Its Kubernetes namespace, if it has one.", extra={"allowed": "the pool's namespace"})] = ""


class HubRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the hub listens, and the directory with its keys."""

    endpoint: Annotated[
        str, Meta(description="The hub's address, as this engine reaches it.", extra={"allowed": "an address like tcp://host:7700"})
    ]
    credentials_dir: Annotated[
        str | None,
        Meta(
            description="The folder of the keys; in a file, relative to that file. An engine that cannot read them at its start serves in "
            f"bypass. Without it, the keys come from `{HUB_PUBLIC_ENV}`, `{CLIENT_PUBLIC_ENV}`, `{CLIENT_SECRET_ENV}` and "
            f"`{ROOT_SECRET_ENV}`.",
            extra={"allowed": "the directory with hub.pub, client.pub, client.key and root.secret"},
        ),
    ] = None


class _Needed(msgspec.Struct, frozen=True):
    """What a client needs of the file; the rest is the connector's."""

    pool: PoolRef
    hub: HubRef


class Document(NamedTuple):
    """A configuration as it was found: JSON whose paths are absolute, and where it came from, for errors."""

    content: dict[str, Any]
    origin: str


@dataclass(frozen=True, slots=True)
class Connection:
    """One pool and the way to its hub. `origin` says where this was read, for errors."""

    pool: PoolRef
    hub: HubRef
    origin: str = GIVEN
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False, compare=False)

    @classmethod
    def load(
        cls, source: str | os.PathLike[str] | Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, what: str = GIVEN
    ) -> Connection:
        """Read and check.

        Args:
            source: path of a `connection.json` or of the directory that holds one, JSON text, or its content;
                None: what the environment variable `EPOCHKV_CONFIG` names (or holds).
            what: what its giver calls `source`, for errors.

        Raises:
            ConfigurationError: nothing was given, or it cannot be used.
        """
        variables = os.environ if environ is None else environ
        document = read_document(source, variables, what)
        try:
            needed = msgspec.convert(document.content, _Needed)
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError) as error:
            unknown = "take that key out, or correct its name: " if "unknown field" in str(error) else ""
            form = 'it must have {"pool": {"name", "uid"}, "hub": {"endpoint", "credentials_dir"}}'
            raise ConfigurationError(f"{document.origin}: {error}; {unknown}{form}") from error
        check_pool(needed.pool, document.origin)
        check_endpoint(needed.hub.endpoint, f"{document.origin}: hub.endpoint")
        return cls(needed.pool, needed.hub, document.origin, variables)

    def client_keys(self) -> ClientKeys:
        """The key pair that speaks for the pool, and the hub's public key. Raises as `read_client_keys`."""
        return read_client_keys(self.hub, self.environ)

    def root_secret(self) -> bytes:
        """What the pool's names are made with; engines need it, clients do not. Raises as `read_root_secret`."""
        return read_root_secret(self.hub, self.environ)


def read_document(source: str | os.PathLike[str] | Mapping[str, Any] | None, environ: Mapping[str, str], what: str = GIVEN) -> Document:
    """Find and parse a configuration; a relative `hub.credentials_dir` of a file is made absolute.

    Raises:
        ConfigurationError: nothing was given, or it is no JSON object.
    """
    if isinstance(source, Mapping):
        return Document(dict(source), what)
    if source is None:
        value = environ.get(CONFIG_ENV, "")
        if not value.strip():
            raise ConfigurationError(
                f"no connection configuration: give the path of the pool's {CONFIG_FILE}, or set {CONFIG_ENV} to it or to its text"
            )
        return _from_text(value, CONFIG_ENV)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigurationError(f"{what} is a {type(source).__name__}; give a path, JSON text or a mapping")
    text = os.fspath(source)
    if not isinstance(text, str):
        raise ConfigurationError(f"{what} is given as bytes; give a path as text")
    return _from_text(text, what)


def _from_text(text: str, what: str) -> Document:
    if text.lstrip().startswith("{"):
        return Document(_parse(text, what), what)
    if not text.strip():
        raise ConfigurationError(f"{what} is {_shown(text)}; give the path of the pool's {CONFIG_FILE}, or of the directory that holds it")
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            path = path / CONFIG_FILE
            if not path.exists():
                raise ConfigurationError(f"{what}: {_shown(text)} is a directory without a {CONFIG_FILE}; give the path of that file")
        content = _read_bytes(path)
    except ConfigurationError:
        raise
    except OSError as error:
        raise ConfigurationError(
            f"{what}: {_shown(text)} cannot be read ({error.strerror or error}); give the path of the pool's {CONFIG_FILE}"
        ) from error
    except (ValueError, RuntimeError) as error:  # a NUL or lone surrogate in the path; no home for "~"
        raise ConfigurationError(f"{what}: {_shown(text)} is no path ({error}); give the path of the pool's {CONFIG_FILE}") from error
    document = _parse(content.removeprefix(codecs.BOM_UTF8), str(path))
    hub = document.get("hub")
    if isinstance(hub, dict) and isinstance(hub.get("credentials_dir"), str):
        folder = os.path.join(os.path.dirname(os.path.abspath(path)), os.path.expanduser(hub["credentials_dir"]))
        document["hub"] = {**hub, "credentials_dir": os.path.normpath(folder)}
    return Document(document, str(path))


def _read_bytes(path: Path) -> bytes:
    """A regular file's content, bounded: a FIFO or a device would hang or fill the memory of an engine."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigurationError(f"{path} is not a regular file; give the path of the pool's {CONFIG_FILE}")
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise ConfigurationError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes; give the path of the pool's {CONFIG_FILE}")
    return content


def _parse(content: str | bytes, origin: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{origin} is not a JSON object: {error}; it must have the keys pool and hub") from error


def check_pool(pool: PoolRef, origin: str) -> None:
    """Raise `ConfigurationError` for a pool that cannot be one."""
    if not pool.uid:
        raise ConfigurationError(f"{origin}: pool.uid is empty; give the pool's uid")
    if len(pool.uid) > MAX_UID or not pool.uid.isprintable():
        raise ConfigurationError(f"{origin}: pool.uid is {_shown(pool.uid)}; give the pool's uid, 1 to {MAX_UID} printable characters")


def check_endpoint(endpoint: str, what: str) -> tuple[str, int]:
    """Host and port of what a client may dial. Raises `ConfigurationError`: it does not look like `tcp://host:7700`."""
    match = ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match["port"]) < 65536 or len(match["host"]) > 255 or not endpoint.isprintable():
        raise ConfigurationError(f"{what} is {_shown(endpoint)}; it must look like tcp://host:7700")
    return match["host"], int(match["port"])


# ------------------------------------------------------------------ credentials


def read_client_keys(hub: HubRef, environ: Mapping[str, str] = os.environ) -> ClientKeys:
    """The client's key pair and the hub's public key, from the directory or the environment.

    Raises:
        ConfigurationError: a file or variable is missing or holds no key.
    """
    from epochkv_fence.net.keys import ClientKeys, CredentialsError

    folder = hub.credentials_dir
    if folder is None:
        try:
            return ClientKeys(*(_variable(name, environ) for name in CLIENT_ENVS))
        except CredentialsError as error:
            raise ConfigurationError(f"{', '.join(CLIENT_ENVS)} cannot be used: {error}") from error
    try:
        return _read_again(folder, CredentialsError, lambda: ClientKeys.load(_folder(folder)))
    except CredentialsError as error:
        raise ConfigurationError(f"{_folder_problem(folder, str(error))}; give the folder with {KEY_FILES}") from error


def read_root_secret(hub: HubRef, environ: Mapping[str, str] = os.environ) -> bytes:
    """The pool's root secret (32 bytes, kept as 64 hex digits), from the directory or the environment.

    Raises:
        ConfigurationError: the file or variable is missing or holds no secret.
    """
    if hub.credentials_dir is None:
        return _secret(_variable(ROOT_SECRET_ENV, environ), ROOT_SECRET_ENV)
    path = _folder(hub.credentials_dir) / ROOT_SECRET_FILE
    try:
        text = _read_again(hub.credentials_dir, OSError, lambda: _read_bytes(path)).decode("ascii")
    except OSError as error:
        problem = _folder_problem(hub.credentials_dir, f"{path} cannot be read ({error.strerror or error})")
        raise ConfigurationError(f"{problem}; give the folder with the pool's {ROOT_SECRET_FILE}, which engines need") from error
    except UnicodeError as error:
        raise ConfigurationError(f"{path} is not hex text; it must hold {2 * ROOT_SECRET_BYTES} hex digits") from error
    return _secret(text, str(path))


def _read_again(folder: str, failed: type[Exception], read: Callable[[], T]) -> T:
    """What `read` returns. Files are replaced one by one, or a link moves to others: for a moment one is missing or does not fit."""
    for _ in range(RELOAD_TRIES - 1):
        try:
            return read()
        except failed:
            if not os.path.isdir(folder):
                break
            time.sleep(RELOAD_SECONDS)
    return read()


def _secret(text: str, what: str) -> bytes:
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:  # without its text, which would show the secret
        secret = b""
    if len(secret) != ROOT_SECRET_BYTES:
        raise ConfigurationError(f"{what} does not hold {2 * ROOT_SECRET_BYTES} hex digits; take the pool's root.secret")
    return secret


def _variable(name: str, environ: Mapping[str, str]) -> str:
    value = environ.get(name, "").strip()
    if not value:
        raise ConfigurationError(f"{name} is not set and the configuration has no hub.credentials_dir; set one of them")
    return value


def _folder_problem(folder: str, problem: str) -> str:
    """What is wrong with the folder of the keys, in the words of the configuration."""
    what = f"hub.credentials_dir is {_shown(folder)}"
    if not os.path.isabs(folder):  # given inline: a file's are absolute by now
        what += " (in the working directory of this process: in a configuration that is no file give an absolute path)"
    if not os.path.isdir(folder):
        return f"{what}, which is " + ("no folder" if os.path.exists(folder) else "not there, or not visible to this user")
    return f"{what}: {problem.partition('; mount')[0]}"


def _folder(text: str) -> Path:
    if not text or "\0" in text:
        raise ConfigurationError(f"hub.credentials_dir is {_shown(text)}; give the directory with the pool's keys, or leave it out")
    return Path(text)


def _shown(text: str) -> str:
    """Text from outside, in an error: quoted, short, one line."""
    return repr(text if len(text) <= 200 else text[:200] + "...")
