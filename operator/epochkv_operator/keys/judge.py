"""What a pool's Secret should hold, given what it holds, and why. Pure but for the keys that it draws.

An operator that runs remembers the content, and what it remembers counts. Two changes are nobody's mistake: `previous.pub` was
removed, which rejects the older key at once, and a rotation that the spec asks for was written by us without an answer, or by the
leader before. An operator that has just started can only judge each field by itself. What follows from another field is derived.
What is lost is replaced, so that running engines lose as little as possible.

No field can bring stale KV back: epoch and weights are part of each name. Another `root.secret` only splits the engines into
those that read it before and after, and these share nothing. So only that one needs engines to restart.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from epochkv_fence.net import CredentialsError, KeyPair, generate_keypair
from epochkv_fence.net.keys import check_key, public_of
from epochkv_operator.keys.content import (
    CHECK,
    FIRST,
    GENERATION,
    HUB,
    KEY,
    PREVIOUS,
    PUBLIC,
    ROOT,
    FenceKeys,
    Fields,
    content,
    is_root,
    root_check,
)

FIELDS: Final = (HUB, PUBLIC, KEY, ROOT, CHECK, GENERATION, FIRST, PREVIOUS)


@dataclass(frozen=True)
class Judged:
    """What the Secret should hold, and for each field that somebody else has changed a sentence. Other differences are our own work."""

    keys: FenceKeys
    changes: tuple[str, ...] = ()


def made(hub_public: str, generation: int) -> FenceKeys:
    """Keys of a pool that never had any."""
    pair = generate_keypair()
    return FenceKeys(hub_public, pair, secrets.token_hex(32), generation, first=pair.public)


def remembered(known: FenceKeys, found: Fields, pool_uid: str, asked: int, drawn: KeyPair | None) -> Judged:
    """Judge the Secret against what this process knows. `asked`: the generation in the spec; `drawn`: the pair of our own rotation."""
    wanted = content(known, pool_uid)
    if all(found.get(name) == value for name, value in wanted.items() if name != PREVIOUS):
        if PREVIOUS not in found:
            return Judged(replace(known, previous=None))
        if found[PREVIOUS] == known.previous:
            return Judged(known)
    if (rotated := _rotated(known, found, pool_uid, asked, drawn)) is not None:
        return Judged(rotated)
    wrong = [name for name in (*wanted, *([PREVIOUS] if known.previous is None else [])) if found.get(name) != wanted.get(name)]
    return Judged(known, tuple(f"{name} was {_what(name, found, wanted)}" for name in wrong))


def _what(name: str, found: Fields, wanted: Fields) -> str:
    return "removed" if name not in found else "changed" if name in wanted else "added"


def _rotated(known: FenceKeys, found: Fields, pool_uid: str, asked: int, drawn: KeyPair | None) -> FenceKeys | None:
    """The keys after a rotation of `known`; None: the Secret shows none."""
    pair, generation = _pair(found), _number(found.get(GENERATION, ""))
    if pair is None or generation is None or not known.generation < generation <= asked:
        return None
    previous = found.get(PREVIOUS)
    if previous != known.client.public and not (previous is None and pair == drawn):
        return None
    keys = replace(known, client=pair, generation=generation, previous=previous)
    return keys if all(found.get(name) == value for name, value in content(keys, pool_uid).items()) else None


def judged(found: Fields, hub_public: str, pool_uid: str, asked: int) -> Judged:
    """Judge the Secret field by field, with nothing remembered."""
    changes: list[str] = []
    changes += _hub(found, hub_public)
    client, previous, more = _client(found)
    changes += more
    generation, more = _generation(found, asked)
    changes += more
    if client.secret != found.get(KEY):
        generation = asked  # the pair is new
    root_secret, first, more = _root(found, client, pool_uid)
    changes += more
    return Judged(FenceKeys(hub_public, client, root_secret, generation, previous, first), tuple(changes))


def made_for(found: Fields, pool_uid: str) -> bool:
    """The root secret is the one that was made for this pool. Secrets of older operators do not tell."""
    root_secret, check = found.get(ROOT, ""), found.get(CHECK, "")
    return is_root(root_secret) and hmac.compare_digest(check.encode(), root_check(root_secret, found.get(FIRST, ""), pool_uid).encode())


def _hub(found: Fields, hub_public: str) -> Iterator[str]:
    if found.get(HUB) == hub_public:
        return
    try:
        check_key(HUB, found.get(HUB, ""))
    except CredentialsError:
        yield f"{HUB} was no key and is the hub's again"
    else:
        why = "the hub has a new key pair, or somebody changed the field"
        yield f"{HUB} was another key than the hub's: {why}. Engines that were given another one restart"


def _client(found: Fields) -> tuple[KeyPair, str | None, list[str]]:
    """The client key pair, and the older public key. A pair without its secret key is replaced as in a rotation."""
    changes = []
    previous = found.get(PREVIOUS)
    if previous is not None and not _is_key(previous):
        changes.append(f"{PREVIOUS} was no key and is gone; engines that still use the older key pair read the Secret again by themselves")
        previous = None
    if _is_key(found.get(KEY, "")):
        pair = KeyPair(public_of(found[KEY]), found[KEY])
        if pair.public != found.get(PUBLIC):
            changes.append(f"{PUBLIC} did not belong to {KEY} and is derived from it again")
        return pair, previous, changes
    public = found.get(PUBLIC, "")
    if _is_key(public):
        previous = public
    text = "there is a new key pair. Engines and trainers that read the Secret while they run take it by themselves"
    kept = "; until then the old one is accepted" if previous is not None else ""
    changes.append(f"{KEY} {'was no key' if KEY in found else 'was missing'}: {text}{kept}")
    return generate_keypair(), previous, changes


def _generation(found: Fields, asked: int) -> tuple[int, list[str]]:
    """One that nobody asked for says nothing about the pair. Below what is asked for, the pair is rotated."""
    if GENERATION not in found:
        return 0, []  # of an operator from before rotations
    number = _number(found[GENERATION])
    if number is not None and number <= asked:
        return number, []
    shown = "no number" if number is None else f"{number}, and spec.keys.generation is {asked}"
    return 0, [f"{GENERATION} was {shown}" + (": the key pair is replaced" if asked else "")]


def _root(found: Fields, client: KeyPair, pool_uid: str) -> tuple[str, str, list[str]]:
    """The root secret and what it is known by. Another `first.pub` restarts the engines, so that all of them have the same one."""
    root_secret, first = found.get(ROOT, ""), found.get(FIRST) or client.public
    if not is_root(root_secret):
        what = "is no secret" if ROOT in found else "is missing"
        text = f"{ROOT} {what}: it is new, engines restart with it, and KV that is stored is not found any more (misses)"
        return secrets.token_hex(32), generate_keypair().public, [text]
    if CHECK not in found or made_for(found, pool_uid):
        return root_secret, first, []
    text = f"{ROOT}, {FIRST} or {CHECK} was changed while no operator ran: engines restart, so that all of them share names again"
    return root_secret, generate_keypair().public, [text]


def _pair(found: Fields) -> KeyPair | None:
    try:
        return KeyPair(found.get(PUBLIC, ""), found.get(KEY, ""))
    except CredentialsError:
        return None


def _is_key(text: str) -> bool:
    try:
        check_key("it", text)
    except CredentialsError:
        return False
    return True


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None
