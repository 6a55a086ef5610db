"""The keys of the connector's configuration, and the sentence for a wrong one."""
