"""Sockets and threads around the state machines: ZeroMQ ROUTER/DEALER with CURVE."""

from epochkv_fence.pool import EngineView, PoolConfig, PoolSnapshot
from epochkv_fence.transport.agent_thread import AgentHooks, AgentThread, EngineIdentity
from epochkv_fence.transport.hub_server import HubServer, UnknownPool
from epochkv_fence.transport.keys import ClientKeys, CredentialsError, HubKeys, KeyPair, generate_keypair

__all__ = [
    "AgentHooks",
    "AgentThread",
    "ClientKeys",
    "CredentialsError",
    "EngineIdentity",
    "EngineView",
    "HubKeys",
    "HubServer",
    "KeyPair",
    "PoolConfig",
    "PoolSnapshot",
    "UnknownPool",
    "generate_keypair",
]
