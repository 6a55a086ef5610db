"""Sockets and threads around the state machines: ZeroMQ ROUTER/DEALER with CURVE."""

from epochkv_fence.net.agent.engine import AgentHooks, EngineIdentity
from epochkv_fence.net.agent.thread import AgentThread
from epochkv_fence.net.keys import ClientKeys, CredentialsError, KeyPair, generate_keypair
from epochkv_fence.net.serving.pools import UnknownPool
from epochkv_fence.net.serving.server import HubServer
from epochkv_fence.protocol.pool import EngineView, PoolConfig, PoolSnapshot

__all__ = [
    "AgentHooks",
    "AgentThread",
    "ClientKeys",
    "CredentialsError",
    "EngineIdentity",
    "EngineView",
    "HubServer",
    "KeyPair",
    "PoolConfig",
    "PoolSnapshot",
    "UnknownPool",
    "generate_keypair",
]
