"""verl's `kv_store` block: one block under `rollout` instead of vLLM's `kv_transfer_config`, checked before anything is started.

verl's driver loads this, so nothing here needs vLLM or torch. `plugin` alone knows verl.
"""
