"""Folders of tiny models that vLLM starts without weights on disk: `config.json`, and what a processor of images needs."""

import json
from pathlib import Path
from typing import Any

from tests.engine.families import IMAGE_PIXELS, IMAGE_TOKEN, SMALL, Config, Family


def make(family: Family, out: Path) -> Path:
    """Write the folder of the family's model and return it."""
    write(out, family.config)
    if family.drafter is not None:
        write(out / "drafter", family.drafter)
    if family.with_images:
        write_processor(out)
    return out


def arguments(family: Family, folder: Path) -> dict[str, Any]:
    """Of the engine that serves the model in `folder`."""
    if family.drafter is None:
        return dict(family.arguments)
    return {**family.arguments, "speculative_config": {"method": "eagle", "model": str(folder / "drafter"), "num_speculative_tokens": 2}}


def write(folder: Path, config: Config) -> None:
    """`config.json`, over what all of them have."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SMALL, **config}, indent=1) + "\n")


def write_processor(folder: Path) -> None:
    """A tokenizer that gives each id a word of its own, and the sizes of pictures: vLLM reads both before it takes a picture."""
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    words = [*(f"t{number}" for number in range(IMAGE_TOKEN)), *marks]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": IMAGE_TOKEN + number, "content": mark, **plain} for number, mark in enumerate(marks)],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": "t0"},
    }
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "pad_token": "t0", "eos_token": "t1"}
    pictures = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": IMAGE_PIXELS},
        "max_image_size": {"longest_edge": IMAGE_PIXELS},
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": 16}
    files = {"tokenizer": tokenizer, "tokenizer_config": fast, "preprocessor_config": pictures, "processor_config": processor}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
