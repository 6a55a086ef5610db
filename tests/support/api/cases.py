"""What a case of the API's corpus says, and the parts that cases are made of."""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One create. `says`: fragments of the refusal, None when it must be accepted. `schema`: refused by the schema, not by a rule of
    ours, so the models refuse it, too."""

    id: str
    kind: str
    spec: Json | None
    says: tuple[str, ...] | None = None
    schema: bool = False
    name: str = "subject"


@dataclass(frozen=True)
class Change:
    """One update of an accepted object."""

    id: str
    kind: str
    old: Json
    new: Json
    says: tuple[str, ...] | None = None


def pool(id: str, spec: Json | None, *says: str, schema: bool = False, name: str = "subject") -> Case:
    return Case(id, "KVCachePool", spec, says or None, schema, name)


def engine(id: str, extra: Json, *says: str, schema: bool = False, name: str = "subject") -> Case:
    return Case(id, "InferenceEngine", {"model": {"name": "tiny"}, **extra}, says or None, schema, name)


STORE = {"segmentSize": "256Mi"}
MOONCAKE = {"mooncake": {"store": STORE}}
EXTERNAL = {"external": {"masterAddress": "mooncake.example:50051"}}
LOCAL = {"capacity": "1Gi"}


def mooncake(**changes: Any) -> Json:
    return {"distributed": {"mooncake": {"store": STORE, **changes}}}


def external(address: str, **more: str) -> Json:
    return {"distributed": {"external": {"masterAddress": address, **more}}}


def master(**fields: Any) -> Json:
    return mooncake(master=fields)


def etcd(*endpoints: str) -> Json:
    return {"backend": "Etcd", "etcd": {"endpoints": list(endpoints)}}
