"""What stands in for hooks that vLLM lacks: functions of vLLM that we wrap, and objects that we find among our callers."""

import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from epochkv_connector.engine.blocks import CLIENT_MARK, CONTENT_MARK, owner_of
from epochkv_connector.engine.interface import kv_cache_utils
from epochkv_connector.naming.root import PIN_ATTRIBUTE

PREFIX = "EpochKV"


class _Ours(logging.Handler):
    """Hands records to vLLM's handlers, with our name in front: vLLM's lines show only a file's name."""

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith(PREFIX):
            record = copy.copy(record)
            record.msg = f"{PREFIX}: {record.msg}"
        for handler in logging.getLogger("vllm").handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def share_log_handlers() -> None:
    """Let our packages log as vLLM does (time, level, module, process), unless the user has set up logging for them. Without handlers INFO
    lines would be lost."""
    handlers = logging.getLogger("vllm").handlers
    for name in ("epochkv_connector", "epochkv_fence"):
        logger = logging.getLogger(name)
        if not logger.handlers and logger.level == logging.NOTSET and handlers:
            logger.handlers = [_Ours()]
            logger.setLevel(logging.INFO)


_AROUND = "_epochkv_around"


def around(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Run `instead(function, *args, **kwargs)` in place of the owner's function."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return instead(function, *args, **kwargs)

    setattr(wrapped, _AROUND, True)
    setattr(owner, name, wrapped)


def wrap(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """As `around`, for what may be wrapped already, or is missing in another version: then nothing changes."""
    function = getattr(owner, name, None)
    if function is not None and not hasattr(function, _AROUND):
        around(owner, name, instead)


def around_arguments(
    before: Callable[[Any], None], after: Callable[[Any], None], failed: Callable[[BaseException], None] | None = None
) -> None:
    """Call `before` with the arguments of each engine, and `after` with the configuration that vLLM makes of them. Nothing is loaded yet.
    With `failed`, an error of any of them is told to it alone, and vLLM goes on with the arguments that it was given.

    vLLM's commands and Python programs alike make engines with `EngineArgs`, whose constructor loads plugins. A process that
    has not imported it when plugins are loaded makes no engine of its own.
    """

    def create(function: Callable[..., Any], arguments: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(vars(arguments))
        try:
            before(arguments)
            config = function(arguments, *args, **kwargs)
            after(config)
            return config
        except (Exception, SystemExit) as error:
            if failed is None:
                raise
            failed(error)
        vars(arguments).update(given)
        return function(arguments, *args, **kwargs)

    wrap(getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None), "create_engine_config", create)


def before_packing(mark: Callable[[Any], None]) -> None:
    """Call `mark` with each layer before a CPU kernel packs its weights away, at load and at every reload."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils

    def marking(place: int) -> Callable[..., Any]:
        def pack(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            mark(args[place] if len(args) > place else kwargs["layer"])
            return function(*args, **kwargs)

        return pack

    wrap(utils, "dispatch_cpu_unquantized_gemm", marking(0))
    try:
        from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    except ImportError:  # elsewhere in another version: such a layer then hides its weights, and the engine says so
        return
    wrap(CPUInt8ScaledMMLinearKernel, "process_weights_after_loading", marking(1))


def after_scheduler(build: Callable[[Any], None]) -> None:
    """Call `build` with each scheduler of vLLM that is made in this process, at the end of its constructor. `builders` finds the scheduler
    meanwhile, because it looks for functions that are called `__init__`."""
    from vllm.v1.core.sched.scheduler import Scheduler

    construct = Scheduler.__init__
    if hasattr(construct, "__wrapped__"):
        return

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        build(self)

    Scheduler.__init__ = __init__


def mend_hashes() -> None:
    """Leave an adapter's name and path out of the block hashes of pinned requests: their root says which adapter it is.

    vLLM 0.30 continues a request's hashes with its last picture, whatever pictures are before it; there, look at all of them.
    """

    def unless_pinned(keys_of: Callable[[Any], list[Any]], request: Any) -> list[Any]:
        pin = getattr(request, PIN_ATTRIBUTE, None)
        return [] if pin is not None and pin.adapter else list(keys_of(request))

    wrap(kv_cache_utils, "_gen_lora_extra_hash_keys", unless_pinned)
    if not hasattr(kv_cache_utils, "get_mm_features_in_window"):
        wrap(kv_cache_utils, "_gen_mm_extra_hash_keys", lambda keys_of, *where: keys_of(*where[:3], max(where[3], 0)))


def keep_covered_media() -> None:
    """Send media with a new request though a hit covers them. Named anew and preempted, it computes them, and vLLM's first runner of models
    gets them only once."""
    from vllm.v1.core.sched import output

    wrap(output, "strip_covered_mm_data", lambda strip, features, *args, **kwargs: features)


class _Told(str):
    """An id that this process has marked. What a client or another front end sends with tensors is a plain string, whatever it says."""

    __slots__ = ()


def mark_media_ids() -> None:
    """Let `MultiModalFeatureSpec.mm_hash` say which ids come from clients, and which are digests of content.

    vLLM takes an id as it is, or hashes it together with options, and nobody can tell that from a digest of bytes. The identifier, by
    which vLLM names blocks and outputs of encoders, stays what it would have been where it is a digest. A client's id is kept apart from
    digests, and from the same id under another salt, in every cache: else what a client calls by another's digest would be found, and
    saved, under that digest. Ids that come with tensors count as a client's, and none is the same as one that was marked here.
    """
    from vllm.multimodal import hasher
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.multimodal.processing import ProcessorInputs
    from vllm.v1.engine.input_processor import InputProcessor

    def tokens(function: Callable[..., Any], renderer: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        whose = owner_of(prompt.get("cache_salt"))
        given = {
            modality: [one if one is None else whose + one for one in ([ids] if isinstance(ids, str) else ids)]
            for modality, ids in (prompt.get("multi_modal_uuids") or {}).items()
        }
        return function(renderer, {**prompt, "multi_modal_uuids": given} if given else prompt, *args, **kwargs)

    def hashes(function: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
        given = inputs.mm_uuid_items or {}
        return {
            modality: [
                _Told(f"{CONTENT_MARK}{found}" if one is None else f"{CLIENT_MARK}{one} {found}")
                for found, one in zip(ids, given.get(modality) or [None] * len(ids), strict=True)
            ]
            for modality, ids in function(inputs, *args, **kwargs).items()
        }

    def identifier(function: Callable[..., Any], processor: Any, mm_hash: str, *args: Any, **kwargs: Any) -> Any:
        marked = mm_hash if isinstance(mm_hash, _Told) else f"{CLIENT_MARK}tensors {mm_hash}"
        return function(processor, marked.removeprefix(CONTENT_MARK), *args, **kwargs)

    def told(function: Callable[..., None], feature: Any, *args: Any, **kwargs: Any) -> None:
        function(feature, *args, **kwargs)
        if (given := feature.mm_hash) is not None:  # as the core is told of it, which takes no `_Told`
            forged = given.startswith((CLIENT_MARK, CONTENT_MARK)) and not isinstance(given, _Told)
            feature.mm_hash = f"{CLIENT_MARK}tensors {given}" if forged else str(given)

    with suppress(ImportError):  # without it, no id is of a salt
        from vllm.renderers.base import BaseRenderer

        for name in ("_process_tokens", "_process_tokens_async"):
            wrap(BaseRenderer, name, tokens)
    wrap(ProcessorInputs, "get_mm_hashes", hashes)
    wrap(InputProcessor, "_get_mm_identifier", identifier)
    wrap(hasher, "_get_image_id_bytes", lambda *args: None)  # an id in a picture's metadata is its author's
    wrap(MultiModalFeatureSpec, "__init__", told)  # processors that are there already make them, too


class _Instead:
    """An object of vLLM, one function of which is another one."""

    def __init__(self, whole: Any, name: str, function: Callable[..., Any]) -> None:
        self._whole = whole
        setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def around_all_reduce(carry: Callable[[Any, Callable[[Any], Any]], Any]) -> str:
    """Let `carry` run the all-reduce over data-parallel ranks that precedes each forward pass. Why that cannot be; empty: it will."""
    from vllm.v1.worker import dp_utils

    places = [dp_utils]
    with suppress(ImportError):  # of the second model runner
        from vllm.v1.worker.gpu import dp_utils as second

        places.append(second)
    if not all(hasattr(place, "dist") or hasattr(place, "get_dp_group") for place in places) or not hasattr(dp_utils, "_run_ar"):
        return "this vLLM tells data-parallel ranks of each other's steps in a way that is not known; use a version that was tested"

    def carrying(whole: Any, name: str) -> Any:
        reduce = getattr(whole, name)
        return _Instead(whole, name, lambda tensor, *args, **kwargs: carry(tensor, lambda both: reduce(both, *args, **kwargs)))

    for place in places:
        if hasattr(place, "dist"):
            place.dist = carrying(place.dist, "all_reduce")
        else:  # from 0.33 on
            group_of = place.get_dp_group
            place.get_dp_group = lambda group_of=group_of: carrying(group_of(), "cpu_all_reduce_")
    return ""


def listen_on_both_families() -> None:
    """vLLM's publisher of KV events listens on IPv4 alone."""
    import zmq
    from vllm.distributed.kv_events import ZmqEventPublisher

    def set_up(function: Callable[..., Any], publisher: Any) -> Any:
        if "*" in publisher._endpoint or "::" in publisher._endpoint:  # else it dials, and a name's IPv4 address would be left out
            publisher._ctx = zmq.Context.shadow(publisher._ctx)  # whose options are its own
            publisher._ctx.setsockopt(zmq.IPV6, 1)  # without IPv6 here, ZeroMQ listens on IPv4
        return function(publisher)

    wrap(ZmqEventPublisher, "_socket_setup", set_up)


def around_events(block_pool: Any, of_request: Callable[[Any, list[Any]], list[Any]], taken: Callable[[list[Any]], list[Any]]) -> None:
    """Replace KV events: those that are queued as blocks of a request get names, and those that are taken to be published."""

    def name_blocks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = len(block_pool.kv_event_queue)
        result = function(*args, **kwargs)
        request = kwargs["request"] if "request" in kwargs else args[0]
        block_pool.kv_event_queue[before:] = of_request(request, block_pool.kv_event_queue[before:])
        return result

    def take(function: Callable[..., Any]) -> Any:
        return taken(function())

    for name in ("cache_full_blocks", "cache_partial_block", "emit_cached_block_events"):
        wrap(block_pool, name, name_blocks)
    wrap(block_pool, "take_events", take)


@contextmanager
def keeping_requests_out(scheduler: Any) -> Iterator[None]:
    """Meanwhile vLLM's scheduler lets no waiting request in, as after its own pause of new ones."""
    from vllm.v1.core.sched.interface import PauseState

    before = scheduler._pause_state
    if before == PauseState.UNPAUSED:  # else somebody has paused it
        scheduler._pause_state = PauseState.PAUSED_NEW
    try:
        yield
    finally:
        scheduler._pause_state = before


def wake(engine_core: Any) -> None:
    """Make an engine core that waits for work go through its loop once. One in the process of its user waits for nothing."""
    from vllm.v1.engine import EngineCoreRequestType

    inputs = getattr(engine_core, "input_queue", None)
    if inputs is not None:
        inputs.put((EngineCoreRequestType.WAKEUP, None))


def builders() -> tuple[Any | None, Any | None]:
    """The engine core and the scheduler, or what is derived from them, whose constructors are running, if any."""
    owners = [owner for owner, _ in _constructors()]
    core, scheduler = (next((owner for owner in owners if kind in _kinds(owner)), None) for kind in ("EngineCore", "Scheduler"))
    return core, scheduler


def parent_config() -> Any | None:
    """The `kv_transfer_config` of the outermost MultiConnector, or what is derived from it, that makes this connector; None: none does.

    The children's configuration does not name the parent (each child gets a copy with its own `kv_transfer_config`),
    so the parent is looked up among the callers.
    """
    makers = [arguments.get("vllm_config") for owner, arguments in _constructors() if "MultiConnector" in _kinds(owner)]
    return getattr(makers[-1], "kv_transfer_config", None) if makers else None


def _kinds(owner: Any) -> list[str]:
    return [base.__name__ for base in type(owner).__mro__]


def _constructors() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each object among our callers whose `__init__` is running, and that function's variables."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            yield frame.f_locals.get("self"), frame.f_locals
        frame = frame.f_back
