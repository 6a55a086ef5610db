"""Whether operator, masters, stores and engines are of one version, as far as their images and the hub say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from epochkv_fence import VERSION
from epochkv_fence.doctor import judging
from epochkv_fence.doctor.finding import CannotLook, Finding, Say
from epochkv_fence.doctor.looking import HubLook
from epochkv_operator.doctor.cluster import PART_OF, Cluster, place
from epochkv_operator.doctor.hubs import Hubs
from epochkv_operator.doctor.operators import Operator, find_operators, image_tag
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.resources import PODS
from epochkv_operator.planning.context import listed
from epochkv_operator.planning.names import COMPONENT_LABEL

OURS = ("master", "store", "engine")


async def look_at_versions(cluster: Cluster, hubs: Hubs) -> list[Finding]:
    try:
        operators = await find_operators(cluster)
    except CannotLook:
        operators = []
    pods = await cluster.objects(PODS, cluster.scope.namespace, PART_OF)
    found = [*judge_operators(operators), *judge_images(operators, pods)]
    for pool in await cluster.pools():
        try:
            look = await hubs.reached(pool)
        except CannotLook:
            continue  # the check of the hub says so
        found += judging.judge_versions(look, VERSION, place(pool))
        found += judge_own_image(pool, look)
    return found or [Say("versions").ok(f"this command is {VERSION or 'not installed'}; nothing else says its version")]


def judge_operators(operators: Sequence[Operator]) -> Iterable[Finding]:
    for operator in operators:
        say = Say("versions", f"operator {operator.namespace}")
        if operator.version[:1].isdigit() and VERSION and operator.version != VERSION:  # a tag like `dev` says nothing
            text = f"the operator's image is {operator.version}, and this command {VERSION}: it may judge by the wrong rules"
            yield say.warning(text, f"pip install 'epochkv[operator]=={operator.version}'")


def judge_images(operators: Sequence[Operator], pods: Sequence[Json]) -> list[Finding]:
    """Tags of images that come with the operator, against its own. Other images are their owners' affair."""
    tags = {operator.version for operator in operators if operator.version}
    by_image: dict[str, list[str]] = {}
    for pod in pods:
        component = (pod["metadata"].get("labels") or {}).get(COMPONENT_LABEL)
        for container in pod["spec"].get("containers") or ():
            if component in OURS and container.get("name") == component:
                by_image.setdefault(container["image"], []).append(f"{pod['metadata']['namespace']}/{pod['metadata']['name']}")
    say, found = Say("versions"), []
    for image, names in sorted(by_image.items()):
        shipped = image.rpartition("/")[2].partition(":")[0] in ("store", "engine") and "epochkv" in image
        if shipped and tags and image_tag(image) not in tags:
            text = f"{listed(names)}: image {image}, and the operator is {', '.join(sorted(tags))}"
            found.append(
                say.warning(
                    text, "finish the upgrade: set the image in the chart's values, in spec.image or in spec.distributed.mooncake.image"
                )
            )
    if not found and by_image:
        found.append(say.ok(f"images: {listed(sorted(by_image))}"))
    return found


def judge_own_image(pool: Json, look: HubLook) -> list[Finding]:
    """A store image of the owner's: nobody can tell its Mooncake, and two versions differ in silence."""
    image = ((pool["spec"].get("distributed") or {}).get("mooncake") or {}).get("image")
    clients = sorted({one.versions["mooncake"] for one in look.second.engines if "mooncake" in one.versions})
    if not image or not clients:
        return []
    namespace, name = pool["metadata"]["namespace"], pool["metadata"]["name"]
    text = f"engines run Mooncake {', '.join(clients)}; what the store image {image} has cannot be seen from outside, and must be the same"
    return [
        Say("versions", place(pool)).warning(text, f"kubectl -n {namespace} exec {name}-store-0 -- python3 -m pip list | grep -i mooncake")
    ]
