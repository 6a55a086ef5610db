"""What travels between hub, agents and trainers: typed, tagged, versioned, size-checked (design page "fence", section 6).

A message is two frames: the protocol version (one byte) and a msgpack map with the tag in `type`. Fields may be added
within a version (unknown fields are ignored); anything else needs a new version. Whatever arrives, `decode` returns a
message or raises `WireError`, whose text names the tag and the version; the receiver answers it with `Error` and goes on.
"""

import enum
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

PROTOCOL_VERSION: Final = 2
VERSION_FRAME: Final = bytes([PROTOCOL_VERSION])
MAX_MESSAGE_BYTES: Final = 64 * 1024
INSTANCE_BYTES: Final = 16
WEIGHTS_BYTES: Final = 16
MAX_EPOCH: Final = 2**53 - 1  # what JSON and YAML readers carry exactly
MAX_EPOCH_STEP: Final = 10**13
"""By which one ask may raise the epoch: a timestamp in milliseconds fits, and a typing error leaves room for hundreds more."""
MAX_COUNT: Final = 2**63 - 1
MAX_STATS: Final = 64
MAX_STAT_NAME: Final = 64
MAX_TEXT: Final = 1024
MAX_NAME: Final = 253
MAX_VERSIONS: Final = 8
MAX_VERSION_TEXT: Final = 64
TierReason = Literal["TiersBroken", "LayoutUnsupported", "TiersOff", "SavesOnly", "OwnCache", "L1Only"]
"""Why an engine cannot use its tiers: an error turned them off, the layout of its KV does not allow it, its settings or its machine do
not. `SavesOnly`: it loads nothing. `OwnCache`: nothing of its KV reaches others, nor theirs it. `L1Only`: it uses no L2. Worst first."""
TIER_REASONS: Final[tuple[TierReason, ...]] = get_args(TierReason)
MAX_LABELS: Final = 16
"""Of one pool."""
STAMP_KEY: Final = "epochkv"
"""In the `kv_transfer_params` of a request and of its answer: what the engine says of the answer's weights (`client.stamps`)."""
UNKNOWN_WEIGHTS: Final = "unknown"
"""There, in the place of a digest."""
ASLEEP: Final = "the engine sleeps"
"""Why an engine that has unmapped memory does not know its weights."""
MAX_KEPT: Final = 1_024
"""Different weights in one `Reclaim`."""

Instance = Annotated[bytes, msgspec.Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]
"""128 random bits drawn when an EngineCore process starts."""
Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
EngineCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Of one engine, so that the sum over all engines of a pool is a `Count`."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Weights = Annotated[bytes, msgspec.Meta(min_length=WEIGHTS_BYTES, max_length=WEIGHTS_BYTES)]
"""Digest of the weights that the ranks of an engine hold. People are shown its first 8 hex digits."""
LeaseSeconds = Annotated[float, msgspec.Meta(gt=0.0, le=86_400.0)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
StatName = Annotated[str, msgspec.Meta(max_length=MAX_STAT_NAME)]
LabelText = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
VersionText = Annotated[str, msgspec.Meta(max_length=MAX_VERSION_TEXT)]
Versions = Annotated[dict[VersionText, VersionText], msgspec.Meta(max_length=MAX_VERSIONS)]
"""Version by the name of a package."""
WeightsHex = Annotated[str, msgspec.Meta(min_length=2 * WEIGHTS_BYTES, max_length=2 * WEIGHTS_BYTES)]


class Source(enum.Enum):
    """Who asked for an epoch."""

    SPEC = "Spec"  # the pool's owner: `spec.resetEpoch`
    TRAINER = "Trainer"
    ENGINE = "Engine"  # an engine whose own caches were reset, or that reports an epoch above the record


class Refusal(enum.Enum):
    """Why a message was not taken."""

    SIZE = "size"
    FRAMES = "frames"
    VERSION = "version"
    TAG = "tag"
    MALFORMED = "malformed"
    UNEXPECTED = "unexpected"
    POOL = "pool"
    LIMIT = "limit"
    NOT_LEADING = "not_leading"  # nor can this hub answer; it may soon, or another one does: ask again


class WireError(ValueError):
    """A message that cannot be taken. `code` is one of `Refusal`; `text` names tag and version where they are known."""

    def __init__(self, code: Refusal, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


SharingState = Literal["sharing", "isolated", "own", "unknown", "asleep", "behind"]


def one_line(text: str) -> str:
    """The text with a blank in the place of each character that a terminal or a log would act on."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)


def _check_lines(message: msgspec.Struct, *names: str) -> None:
    """What people are shown in logs, tables and conditions."""
    for name in names:
        if not (text := getattr(message, name)).isprintable():
            raise ValueError(f"{name} is {text[:64]!a}; give one line of printable characters")


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself. Heartbeats carry it, and status and the hub's view show it.

    Attributes:
        engine, pod, namespace, rank: who this is; `pod` and `namespace` are empty outside of Kubernetes.
        old_epoch_requests: requests admitted under a root that is no longer current.
        isolated: this instance's caches were reset alone: it shares nothing before the next epoch.
        weights: that its ranks hold; None: not known, and `weights_note` says why: `ASLEEP` while vLLM has unmapped memory.
        pushed: this instance has reported others before: these are not those that it started with.
        tiers_off: why it cannot use its tiers, or not all of them, one of `TIER_REASONS`; a newer engine may have others. Empty: it can.
        tiers_note: the same in a sentence, with what to change.
        versions: of what it runs: `epochkv`, `vllm`, `mooncake`.
    """

    engine: Name = ""
    pod: Name = ""
    namespace: Name = ""
    rank: Count = 0
    old_epoch_requests: EngineCount = 0
    fingerprint: Name = ""
    isolated: bool = False
    weights: Weights | None = None
    weights_note: Text = ""
    pushed: bool = False
    tiers_off: Name = ""
    tiers_note: Text = ""
    versions: Versions = {}

    def __post_init__(self) -> None:
        _check_lines(self, "engine", "pod", "namespace", "fingerprint", "weights_note", "tiers_off", "tiers_note")
        if not "".join((*self.versions, *self.versions.values())).isprintable():
            raise ValueError("versions are not printable")

    def report(self) -> dict[str, Any]:
        """The fields of the report alone, to be shown elsewhere."""
        return {name: getattr(self, name) for name in EngineReport.__struct_fields__}

    @property
    def asleep(self) -> bool:
        """vLLM has unmapped its memory."""
        return self.weights is None and self.weights_note == ASLEEP

    def sharing_state(self, behind: bool) -> SharingState:
        """What a live engine shares, in one word. `behind`: it is not at the target epoch."""
        if behind:
            return "behind"
        if self.weights is not None:
            return "isolated" if self.isolated else "sharing"
        if self.asleep:
            return "asleep"
        return "own" if self.tiers_off == "OwnCache" else "unknown"

    def name(self, instance: bytes) -> str:
        """What people call it: its pod, or its engine's name, with `/rank` above rank 0."""
        name = self.pod or self.engine or instance.hex()[:8]
        return f"{name}/{self.rank}" if self.rank else name


class Heartbeat(EngineReport, frozen=True, tag=True, tag_field="type"):
    """Agent -> hub, every third of a lease and at once on change.

    Attributes:
        seq: grows with every heartbeat of this engine instance; a grant names the one it answers.
        epoch: highest epoch adopted and acknowledged in this engine instance; None before the first.
        instance_age_seconds: age of the process on its own monotonic clock.
        stats: counters of the connector, for status and metrics.
        weights_age_seconds: for how long this engine instance has reported its `weights`, or that it sleeps: hubs come and go.
        pool: uid of the pool that it was set up for, which its names carry. Empty: whichever its keys are of.
        removes: it can remove old keys from the pool's store. One without a client of the store finds none there.
    """

    instance: Instance
    seq: Count
    epoch: Epoch | None = None
    instance_age_seconds: Seconds = 0.0
    stats: Annotated[dict[StatName, float], msgspec.Meta(max_length=MAX_STATS)] = {}
    weights_age_seconds: Seconds = 0.0
    pool: Name = ""
    removes: bool = True


class Grant(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Hub -> agent: instance `instance` may use `epoch` for `lease_seconds`, counted from when it *sent* heartbeat `seq`.

    Attributes:
        weights, label: what the engine reported last, and what people call it. Empty: nothing that the hub knows.
    """

    instance: Instance
    seq: Count
    epoch: Epoch
    lease_seconds: LeaseSeconds
    weights: Weights | None = None
    label: Name = ""


class Nudge(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Hub -> agent: please heartbeat now. Carries no authority."""

    instance: Instance


class Propose(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Agent -> hub: this engine's caches were reset while it was at `epoch - 1`; please go on to `epoch`."""

    instance: Instance
    epoch: Epoch


class Bump(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Trainer -> hub: raise the pool to `epoch`. Repeated until published; repeating it changes nothing.

    Attributes:
        request: drawn at random by the client for one reset, the same in all its repetitions, returned in every answer.
    """

    request: Count
    epoch: Epoch


class BumpStatus(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Hub -> trainer: where the asked epoch stands. It is done when `published >= epoch`.

    Attributes:
        engines: instances known to the hub.
        laggards: those of them that are not at the target.
        lease_seconds: the pool's; with its margin it bounds the time to publication.
    """

    request: Count
    epoch: Epoch
    target: Epoch
    published: Epoch
    engines: Count = 0
    laggards: Count = 0
    old_epoch_requests: Count = 0
    lease_seconds: Seconds = 0.0


class EngineStatus(EngineReport, frozen=True):
    """One engine instance in a `Status`: the report of its newest `Heartbeat`, and what the hub knows beside it.

    Attributes:
        epoch: highest epoch that the hub has heard from it.
        silent_seconds: since the hub last heard from it.
        since_seconds: for how long it has reported these `weights`, as far as this hub knows.
    """

    instance: Instance
    epoch: Epoch | None = None
    age_seconds: Seconds = 0.0
    silent_seconds: Seconds = 0.0
    since_seconds: Seconds = 0.0


class Status(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Trainer -> hub with `request` alone: a question. Hub -> trainer: the pool and its live instances.

    A pool with more instances than fit in one message is answered in pages, in the order of instances. Ask again with `after`, the
    last instance of the page before, until a page is empty. No instance that stays is missed, whoever comes and goes meanwhile.

    Attributes:
        after: only instances above this one. None: the first page.
        total: live instances, of all pages.
        pool: uid of the pool that the asker's key speaks for.
        origin: of the target.
        lease_seconds: the pool's, from its configuration.
        labels: what weights were called, by their 32 hex digits, newest last; on the first page only.
        settling_seconds: until every grant of an older hub is over; before that instances may live that this hub has not heard.
        version: of EpochKV, as the hub runs it. Empty: it runs from its source.
    """

    request: Count
    target: Epoch = 0
    published: Epoch = 0
    total: Count = 0
    engines: Annotated[list[EngineStatus], msgspec.Meta(max_length=64)] = []
    lease_seconds: Seconds = 0.0
    origin: Source = Source.SPEC
    pool: Name = ""
    after: Instance | None = None
    labels: Annotated[dict[WeightsHex, LabelText], msgspec.Meta(max_length=MAX_LABELS)] = {}
    settling_seconds: Seconds = 0.0
    version: VersionText = ""


class Label(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Trainer -> hub: these weights are called `label`, for people. Repeated until answered; answered when it is durable."""

    request: Count
    weights: Weights
    label: LabelText

    def __post_init__(self) -> None:
        _check_lines(self, "label")


class Labelled(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Hub -> trainer: the `Label` with these fields is durable."""

    request: Count
    weights: Weights
    label: LabelText


class Reclaim(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Hub -> agent: remove the pool's keys of every epoch below `below`. Best effort, never gates anything.

    Attributes:
        keep: unless it is empty, also remove the keys of all other weights than these, whatever their epoch.
        number: of this request; its answer gives it back.
    """

    instance: Instance
    below: Epoch
    keep: Annotated[list[Weights], msgspec.Meta(max_length=MAX_KEPT)] = []
    number: Count = 0


class Reclaimed(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Agent -> hub: `removed` of the keys that the `Reclaim` of this `number` names were removed; 0 means that none were left.

    Attributes:
        removed_bytes: what of them is known: keys of a foreign fingerprint have a size that this engine cannot tell.
    """

    instance: Instance
    below: Epoch
    removed: Count
    removed_bytes: Count = 0
    number: Count = 0


class Leave(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Agent -> hub: this engine instance has given up its lease for good, so nobody has to wait for the end of it."""

    instance: Instance


class Error(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Either side: a message of yours was not taken. Never answered."""

    code: Refusal
    text: Text


Message = Heartbeat | Grant | Nudge | Propose | Bump | BumpStatus | Status | Label | Labelled | Reclaim | Reclaimed | Leave | Error
TAGS: Final = tuple(kind.__name__ for kind in get_args(Message))


class _Tagged(msgspec.Struct):
    """Just the tag, to name it in an error."""

    type: str


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_tag_decoder = msgspec.msgpack.Decoder(_Tagged)


def encode(message: Message) -> list[bytes]:
    """The frames of a message: version, payload.

    Raises:
        WireError: the message is larger than `MAX_MESSAGE_BYTES`, which the receiver would refuse.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise WireError(Refusal.SIZE, f"{type(message).__name__} has {len(payload)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return [VERSION_FRAME, payload]


def decode(frames: Sequence[bytes]) -> Message:
    """The message in these frames.

    Raises:
        WireError: anything else than one well-formed message of this version. Never another exception.
    """
    size = sum(len(frame) for frame in frames)
    if size > MAX_MESSAGE_BYTES + len(VERSION_FRAME):
        raise WireError(Refusal.SIZE, f"message has {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    if len(frames) != 2:
        raise WireError(Refusal.FRAMES, f"message has {len(frames)} frames; expected 2 (version, payload)")
    version, payload = frames
    if version != VERSION_FRAME:
        raise WireError(
            Refusal.VERSION,
            f"message with tag {_tag_of(payload)} has version {_shown(version)}; this side speaks version {PROTOCOL_VERSION}",
        )
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeError, OverflowError) as error:
        tag = _tag_of(payload)
        if tag != "(none)" and tag.strip("'") not in TAGS:
            text = f"unknown tag {tag} in version {PROTOCOL_VERSION}; known tags: {', '.join(TAGS)}"
            raise WireError(Refusal.TAG, text) from error
        text = f"malformed message, tag {tag}, version {PROTOCOL_VERSION}: {error}"
        raise WireError(Refusal.MALFORMED, text[:MAX_TEXT]) from error


def _tag_of(payload: bytes) -> str:
    try:
        return repr(_tag_decoder.decode(payload).type[:64])
    except (msgspec.DecodeError, RecursionError, UnicodeError, OverflowError):
        return "(none)"


def _shown(version: bytes) -> str:
    return str(version[0]) if len(version) == 1 else f"0x{version[:16].hex()}" if version else "(empty)"
