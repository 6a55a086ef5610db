"""The table of model families that no engine on CPUs runs, or whose tiers are off, and the tests that hold what happens to them.

Standard library only, as `families`.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Elsewhere:
    """Models that no engine on CPUs can run, or whose tiers are off.

    Attributes:
        treated: which blocks a hit needs, or why there are none.
        test: file and function that hold this with vLLM's own specs of these layers, or with bytes of such layers.
    """

    kind: str
    models: str
    treated: str
    test: tuple[str, str]


KINDS: Final = "tests/scheduler/test_kinds.py"
BY_CLASS: Final = (KINDS, "test_the_kind_is_told_by_the_class")
START: Final = ("tests/unit/connector_identity/test_start.py", "test_an_encoder_decoder_is_refused_before_it_is_loaded")
WRONG: Final = ("tests/scheduler/test_compat.py", "test_kv_that_would_be_wrong_is_neither_loaded_nor_saved")
REFUSED: Final = (KINDS, "test_what_cannot_be_restored_says_what_would_help")

ELSEWHERE: Final = (
    Elsewhere(
        "latent attention on GPUs",
        "DeepSeek V3 and R1, Kimi K2, GLM-4.7-Flash",
        "all blocks, as full attention. Ranks that hold equal blocks put each of them once",
        ("tests/unit/connector_worker/test_worker_half.py", "test_replicas_of_a_shard_put_each_block_once"),
    ),
    Elsewhere(
        "latent attention with an indexer (sparse attention)",
        "DeepSeek V3.2, GLM-5",
        "all blocks of both groups. Their pages have unlike sizes",
        ("tests/scheduler/test_slots.py", "test_l1_of_unlike_pages_evicts_when_it_is_full"),
    ),
    Elsewhere(
        "latent attention in sliding windows",
        "DeepSeek V4",
        "the last window, as other sliding windows. Windows that vLLM computes anew (`bounded_replay`) are not moved",
        BY_CLASS,
    ),
    Elsewhere(
        "latent attention beside recurrent states",
        "Kimi-Linear",
        "all blocks, stored once for all ranks, and the last state of each rank",
        (KINDS, "test_ranks_that_hold_the_same_bytes_are_counted_by_group"),
    ),
    Elsewhere(
        "recurrent states with a drafter",
        "Qwen3-Next with MTP",
        "attention loses its last block, as vLLM does; the state does not",
        (KINDS, "test_drafts_take_a_block_off_attention_and_nothing_off_states"),
    ),
    Elsewhere(
        "ring buffers beside attention",
        "models with `CircularBufferSpec`",
        "vLLM fills the ring anew; all other groups are shared",
        (KINDS, "test_a_group_that_vllm_makes_anew_counts_for_alignment_alone"),
    ),
    Elsewhere("recurrent states, drafts and pipeline stages", "Qwen3-Next with MTP, `--pipeline-parallel-size 2`", "refused", REFUSED),
    Elsewhere(
        "`--mamba-cache-mode all` (vLLM 0.30 and 0.31), or no prefix caching",
        "every hybrid",
        "refused: `align` is the mode that can be shared",
        REFUSED,
    ),
    Elsewhere("cross attention", "Whisper and other encoder-decoder models", "refused; attached, they stay without EpochKV", START),
    Elsewhere("KV that later tokens decide (prefix LM, R-SWA)", "HRM-Text, Unlimited-OCR", "refused", BY_CLASS),
    Elsewhere("answers by diffusion", "DiffusionGemma", "refused", WRONG),
    Elsewhere("pooling of a whole prompt in one pass (MEAN, CLS, STEP)", "embedding models, classifiers", "refused", WRONG),
    Elsewhere(
        "blocks in host memory (HiSparse)",
        "DeepSeek V3.2 with HiSparse",
        "refused",
        (KINDS, "test_blocks_that_lie_in_host_memory_of_their_own_are_refused"),
    ),
)
