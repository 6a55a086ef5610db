"""The table of model families: how the KV of each is cut, which models belong to it, and the tiny model that stands for it in tests.

`test_families` asserts every row of `FAMILIES` on real engines, `hack.model_support` writes `docs/reference/models.md` from them.
Standard library only: both environments read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Config = Mapping[str, Any]

IMAGE_TOKEN: Final = 508
"""In a prompt: here is the picture. Ids from here on are no words."""
IMAGE_PIXELS: Final = 112
"""Edge of a picture: 16 tokens, and 3 around them."""
SMALL: Final[Config] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
"""What every tiny model has, unless its family says otherwise."""


@dataclass(frozen=True)
class Crowd:
    """Requests that fit into the GPU's `blocks` one by one and not together: `number` prompts of `tokens`, `outputs` tokens each."""

    blocks: int
    number: int = 4
    tokens: int = 250
    outputs: int = 60


@dataclass(frozen=True)
class Family:
    """Models whose KV is cut in the same way.

    Attributes:
        kind: the layers that the engine has KV or states of, in words.
        models: of 2025 and 2026, by name.
        config: of the tiny model, over `SMALL`.
        groups: (vLLM's class of the spec, tokens of a block) of each KV cache group of its engine.
        wide_groups: the same on a CPU without instructions for bfloat16, where vLLM computes in float32; the figures are not for it.
        hit: tokens that are found again of a prompt of `tokens`.
        shared: tokens that are found of a prompt which shares `fork` tokens with that one.
        junction: the same, once vLLM has seen that prompts part there.
        crowd: what makes an engine preempt; None: not tried.
        arguments: of the engine, beyond those that every engine of these tests has.
        gains: see `family_child.draw`.
        noise: how far logprobs of one answer may lie apart, in nats. Chunks of a prompt are added up in another order.
        drafter: of the draft model that an EAGLE drafter has.
        refused: words of the sentence with which the engine refuses its tiers; `remedy`: what would help, a sentence for the page.
        sliced: whether `make test` runs it, too.
    """

    name: str
    kind: str
    models: str
    config: Config
    groups: tuple[tuple[str, int], ...]
    hit: int = 896
    tokens: int = 900
    shared: int = 672
    junction: int = 672
    fork: int = 675
    crowd: Crowd | None = None
    arguments: Config = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=dict)
    noise: float = 1e-3
    drafter: Config | None = None
    refused: str = ""
    remedy: str = ""
    sliced: bool = False
    wide_groups: tuple[tuple[str, int], ...] = ()

    @property
    def largest_block(self) -> int:
        """Tokens of a block of the group with the largest ones."""
        return max(tokens for _, tokens in self.groups)

    @property
    def with_images(self) -> bool:
        return "vision_config" in self.config


def of(architecture: str, model_type: str, **values: Any) -> dict[str, Any]:
    """The part of a `config.json` that names the architecture, and `values`."""
    return {"architectures": [architecture], "model_type": model_type, **values}


FULL: Final = ("FullAttentionSpec", 32)
WINDOW: Final = ("SlidingWindowSpec", 32)
CHUNK: Final = ("ChunkedLocalAttentionSpec", 32)
EXPERTS: Final[Config] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
THREE_OF_FOUR: Final = ["sliding_attention"] * 3 + ["full_attention"]
GEMMA_GAINS: Final[Mapping[str, float]] = {"embed_tokens": 0.1, "q_norm": 0.6, "k_norm": 0.6}
"""Gemma multiplies embeddings, adds 1 to the weights of norms, or does not scale scores."""


FAMILIES: Final = (
    Family(
        "full",
        "full attention",
        "Llama 3, Qwen3, Mistral Small 3, Phi-4, SmolLM3, Seed-OSS",
        of("Qwen3ForCausalLM", "qwen3"),
        (FULL,),
        crowd=Crowd(blocks=36),
    ),
    Family(
        "moe",
        "full attention with experts",
        "Qwen3-30B-A3B and 235B, MiniMax-M2, ERNIE 4.5, Hunyuan, dots",
        of("Qwen3MoeForCausalLM", "qwen3_moe", **EXPERTS, num_experts=4),
        (FULL,),
        crowd=Crowd(blocks=36),
    ),
    Family(
        "sliding",
        "sliding windows and full attention",
        "Gemma 3, OLMo 3, EXAONE 4, Command A, MiMo-V2, Step-3.5",
        of("Gemma3ForCausalLM", "gemma3_text", sliding_window=160, query_pre_attn_scalar=32, layer_types=THREE_OF_FOUR),
        (WINDOW, WINDOW, WINDOW, FULL),
        shared=0,
        crowd=Crowd(blocks=110),
        gains=GEMMA_GAINS,
    ),
    Family(
        "sinks",
        "sliding windows and full attention with sinks, experts",
        "gpt-oss",
        of("GptOssForCausalLM", "gpt_oss", sliding_window=160, num_local_experts=4, num_experts_per_tok=2),
        (WINDOW, FULL),
        shared=0,
        crowd=Crowd(blocks=66, number=6, outputs=140),
    ),
    Family(
        "unequal",
        "sliding windows and full attention with heads of other sizes",
        "Gemma 4",
        of(
            "Gemma4ForCausalLM",
            "gemma4_text",
            sliding_window=160,
            layer_types=THREE_OF_FOUR,
            global_head_dim=64,
            num_global_key_value_heads=2,
            hidden_size_per_layer_input=0,
        ),
        (("SlidingWindowSpec", 64), ("SlidingWindowSpec", 64), ("SlidingWindowSpec", 64), FULL),
        shared=0,
        junction=640,
        gains=GEMMA_GAINS,
    ),
    Family(
        "sharing",
        "sliding windows and full attention, layers that use another layer's KV",
        "Gemma 3n, Gemma 4 (E2B, E4B)",
        of(
            "Gemma3nForCausalLM",
            "gemma3n_text",
            sliding_window=160,
            num_hidden_layers=6,
            num_kv_shared_layers=2,
            layer_types=[*THREE_OF_FOUR, "sliding_attention", "full_attention"],
            vocab_size_per_layer_input=512,
            hidden_size_per_layer_input=32,
            laurel_rank=16,
        ),
        (WINDOW, WINDOW, WINDOW, FULL),
        shared=0,
        gains={**GEMMA_GAINS, "altup": 0.3, "correct_output_scale": 1.0},
    ),
    Family(
        "chunked",
        "chunked local attention and full attention, experts",
        "Llama 4",
        of(
            "Llama4ForCausalLM",
            "llama4_text",
            attention_chunk_size=384,
            intermediate_size_mlp=128,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
        ),
        (CHUNK, CHUNK, CHUNK, FULL),
        crowd=Crowd(blocks=112, number=6),
        sliced=True,
    ),
    Family(
        "gdn",
        "gated delta nets and full attention, experts",
        "Qwen3-Next, Qwen3.5, Qwen3.6, OLMo hybrid",
        of(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            **EXPERTS,
            num_experts=2,
            decoder_sparse_step=1,
            shared_expert_intermediate_size=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            head_dim=128,
        ),
        (("MambaSpec", 384), ("MambaSpec", 384), ("MambaSpec", 384), ("FullAttentionSpec", 384)),
        wide_groups=(("MambaSpec", 256), ("MambaSpec", 256), ("MambaSpec", 256), ("FullAttentionSpec", 256)),
        hit=768,
        tokens=800,
        fork=600,
        shared=0,
        junction=384,
        crowd=Crowd(blocks=20, number=6, tokens=378, outputs=40),
        arguments={"dtype": "bfloat16", "block_size": None, "max_num_batched_tokens": 512},
        gains={"out_proj": 3.0},
        noise=0.26,  # a step of bfloat16 at these logits is 0.25
        sliced=True,
    ),
    Family(
        "mamba2",
        "Mamba-2 and full attention side by side in each layer",
        "Falcon-H1",
        of(
            "FalconH1ForCausalLM",
            "falcon_h1",
            mamba_d_ssm=128,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_n_groups=1,
            mamba_d_state=32,
            mamba_chunk_size=64,
        ),
        (("FullAttentionSpec", 128), ("MambaSpec", 128)),
        shared=0,
        junction=640,
        crowd=Crowd(blocks=20, number=6, outputs=40),
        arguments={"block_size": None},
    ),
    Family(
        "mamba2_moe",
        "Mamba-2 and full attention, experts",
        "Granite 4, Bamba",
        of(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            num_attention_heads=2,
            num_key_value_heads=1,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_d_state=32,
            mamba_n_groups=1,
            mamba_chunk_size=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
            layer_types=["mamba"] * 3 + ["attention"],
            position_embedding_type="rope",
        ),
        (("MambaSpec", 128), ("MambaSpec", 128), ("MambaSpec", 128), ("FullAttentionSpec", 128)),
        shared=0,
        junction=640,
        crowd=Crowd(blocks=36, number=6, outputs=40),
        arguments={"block_size": None},
    ),
    Family(
        "nemotron",
        "Mamba-2, full attention and layers without KV",
        "Nemotron-H, Nemotron 3",
        of(
            "NemotronHForCausalLM",
            "nemotron_h",
            layers_block_type=["mamba", "attention", "mamba", "mlp"],
            hybrid_override_pattern="M*M-",
            mamba_num_heads=4,
            mamba_head_dim=32,
            ssm_state_size=32,
            n_groups=1,
            chunk_size=64,
        ),
        (("MambaSpec", 128), ("MambaSpec", 128), ("FullAttentionSpec", 128)),
        shared=0,
        junction=640,
        crowd=Crowd(blocks=24, number=6, outputs=40),
        arguments={"block_size": None},
    ),
    Family(
        "mtp",
        "full attention with a multi-token prediction layer that drafts",
        "GLM-4.5 to 4.7, MiMo, ERNIE 4.5",
        of("Glm4MoeForCausalLM", "glm4_moe", **EXPERTS, n_routed_experts=4, num_nextn_predict_layers=1, first_k_dense_replace=1),
        (FULL,),
        crowd=Crowd(blocks=36),
        hit=864,
        shared=640,
        junction=640,
        arguments={"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    ),
    Family(
        "eagle",
        "full attention with an EAGLE drafter that has other heads",
        "Llama 3 with EAGLE or EAGLE-3",
        of("LlamaForCausalLM", "llama"),
        (FULL,),
        crowd=Crowd(blocks=36),
        hit=864,
        shared=640,
        junction=640,
        drafter=of("LlamaForCausalLM", "llama", num_hidden_layers=1, num_key_value_heads=4),
        sliced=True,
    ),
    Family(
        "images",
        "full attention behind a vision encoder",
        "Qwen3-VL, Mistral Small 3 and 4, InternVL 3.5, Kimi-VL",
        of(
            "Idefics3ForConditionalGeneration",
            "idefics3",
            image_token_id=IMAGE_TOKEN,
            scale_factor=2,
            text_config={**SMALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            vision_config={
                "model_type": "idefics3_vision",
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": IMAGE_PIXELS,
                "patch_size": 14,
            },
        ),
        (FULL,),
        crowd=Crowd(blocks=36),
        arguments={"skip_tokenizer_init": False},
        sliced=True,
    ),
    Family(
        "latent",
        "latent attention (MLA)",
        "DeepSeek V3 and R1, Kimi K2, Mistral Large 3, LongCat",
        of(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            **EXPERTS,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=32,
            v_head_dim=32,
            num_key_value_heads=4,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
        (("MLAAttentionSpec", 16),),
        hit=0,
        arguments={"block_size": None},
        refused="vLLM's reference kernel for it, which runs on CPUs without AMX, ignores cached context",
        remedy="Use a GPU.",
        sliced=True,
    ),
)
