"""Everything that reaches into vLLM: its plugin entry point, its unstable names, the machine that it runs on."""
