"""Sockets and threads around the state machines: ZeroMQ ROUTER/DEALER with CURVE."""

from epochkv_fence.net.agent import AgentHooks, AgentThread, EngineIdentity
from epochkv_fence.net.keys import ClientKeys, CredentialsError, KeyPair, generate_keypair
from epochkv_fence.net.server import HubServer, UnknownPool
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
