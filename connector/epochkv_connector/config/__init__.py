"""The keys of the connector's configuration, and one sentence for what is wrong with one."""
