"""EpochKV's connector for vLLM: host-memory and Mooncake tiers behind the prefix cache, fenced by weights and epochs.

vLLM loads `epochkv_connector.connector:EpochKVConnector`; nothing else here is public.
"""
