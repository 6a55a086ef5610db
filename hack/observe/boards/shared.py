"""What the boards of a pool and of an engine both show."""

from __future__ import annotations

from hack.observe.panels import Panel


def rate(series: str, matchers: str) -> str:
    """Of a counter, over the interval that fits the scrapes."""
    return f"rate({series}{matchers}[$__rate_interval])"


def prompts(matchers: str) -> str:
    """Prompt tokens each second."""
    return f"sum({rate('vllm:prompt_tokens_total', matchers)})"


def prompt_tokens_by_tier(matchers: str) -> Panel:
    """Of the engines that `matchers` find."""
    hits, of = rate("vllm:epochkv_hit_tokens_total", matchers), prompts(matchers)
    return Panel(
        "Prompt tokens by tier",
        "Share of the prompt tokens that a tier had: GPU (vLLM's own cache), L1 (host memory), L2 (the store).",
        "percentunit",
        {
            "GPU": f"sum({rate('vllm:prefix_cache_hits_total', matchers)}) / {of}",
            "{{tier}}": f"sum by (tier) ({hits}) / on () group_left () {of}",
        },
        "stack",
    )
