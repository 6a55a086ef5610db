"""The disk of a store pod, which L2 goes on to where its memory ends."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from epochkv_fence import quantity
from epochkv_operator.api.base import ApiModel, rule, rules
from epochkv_operator.api.values import Size

_SSD_TOO_SMALL = "store.ssd.capacity must be at least 4Gi: Mooncake leaves a part of the disk free; make it larger, or remove ssd"


class Ssd(ApiModel):
    """Disk of each store pod. Blocks are copied to it as they come, and found there when memory has no room for them any more."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "type(self.capacity) == int ? self.capacity >= 4294967296 : "
                "(!isQuantity(self.capacity) || quantity(self.capacity).compareTo(quantity('4Gi')) >= 0)",
                _SSD_TOO_SMALL,
                path=".capacity",
            )
        )
    )

    capacity: Size
    """Bytes of disk for each store pod: the size of a volume that is made for the pod and deleted with it. Mooncake fills nine tenths
    of the volume's file system; then the oldest blocks go."""
    storage_class_name: Annotated[str | None, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] = None
    """Class of the volume; the cluster's default when unset. For another kind of volume, give `template` a volume named `ssd`: a file
    system of its own, as Mooncake fills it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if quantity.to_bytes(self.capacity) < 4 * 2**30:
            raise ValueError(_SSD_TOO_SMALL)
        return self
