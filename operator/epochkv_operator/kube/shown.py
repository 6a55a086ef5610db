"""What a LIST shows of objects without reading them: who there is, in which version. Metadata alone is sent, and two fields are read."""

from __future__ import annotations

import msgspec

ACCEPT = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class _Metadata(msgspec.Struct, gc=False):
    uid: str
    resourceVersion: str


class _Item(msgspec.Struct, gc=False):
    metadata: _Metadata


class _ListMetadata(msgspec.Struct):
    resourceVersion: str = ""
    token: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct):
    metadata: _ListMetadata
    items: list[_Item] | None = None


_decoder = msgspec.json.Decoder(_Page)


def page(data: bytes) -> tuple[dict[str, int], int, str]:
    """The versions of a page's objects by uid, the version of the list, and the token of the next page (empty: this is the last).

    Raises:
        ValueError: no such page.
    """
    read = _decoder.decode(data)
    versions = {item.metadata.uid: int(item.metadata.resourceVersion) for item in read.items or ()}
    return versions, int(read.metadata.resourceVersion or 0), read.metadata.token
