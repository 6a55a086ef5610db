"""`warm`: have one engine compute prompts that all engines will ask for."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from epochkv_fence.cli.render import Output, show_json
from epochkv_fence.client import ConfigurationError
from epochkv_fence.client.warm import WARM_SECONDS, Prompt
from epochkv_fence.client.warm import warm as warm_prompts

FORM = 'give a JSON string, a list of token ids, or an object with "prompt" or "messages", in each line'
KEYS = "prompt", "messages", "tools", "chat_template_kwargs", "cache_salt"
"""What a request holds of a prompt: with others of these keys it has other KV. Data sets have more in a line."""


def prompts_of(path: Path) -> list[Prompt]:
    """The prompts in a file of JSON lines. Raises `ConfigurationError`: the message names the line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a text may have other ends of lines in it
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"--prompts {path}: {error}") from None
    found: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        asked = {key: value[key] for key in KEYS if key in value} if isinstance(value, dict) else {"prompt": value}
        prompt = asked.get("messages", asked.get("prompt"))
        kind = dict if "messages" in asked else int
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and all(type(one) is kind for one in prompt))) or not prompt:
            raise ConfigurationError(f"--prompts {path}, line {number}: {line[:60]!r} is no prompt; {FORM}")
        found.append(asked)
    if not found:
        raise ConfigurationError(f"--prompts {path} has no prompt; {FORM}")
    return found


def warm(
    prompts: Annotated[Path, typer.Option("--prompts", metavar="FILE", help="A prompt in each line, as JSON.")],
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The OpenAI server of one engine of the pool, or of a Service of them.")],
    model: Annotated[str | None, typer.Option("--model", help="As the server calls it. Default: the first that it serves.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Give up after this time.")] = WARM_SECONDS,
    output: Annotated[Output, typer.Option("--output", "-o", help="A line for people, or JSON.")] = Output.TABLE,
) -> None:
    """Compute prompts once, and return when L2 holds them under the weights that the engine holds now.

    After a push nothing of the new weights is cached, and rollouts of one prompt start everywhere at once. Warm what they share, such as
    system prompts and descriptions of tools, and each engine loads it instead of computing it.

    \b
      epochkv warm --prompts system.jsonl --url http://rollout:8000

    Exit status: 0 L2 holds all of it; 1 it does not in time, weights keep changing, the engine has no L2, or it cannot be reached.
    """
    wanted = prompts_of(prompts)
    with Progress(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("warming", total=len(wanted))
        found = warm_prompts(wanted, url, model=model, timeout_s=timeout, progress=lambda number: shown.update(task, completed=number))
    if output is Output.JSON:
        show_json(asdict(found))
    else:
        held = f"{found.tokens:,} tokens of {found.prompts} prompts under weights {found.weights[:8]}"
        print(f"L2 holds {held}; {found.computed:,} tokens were computed")
