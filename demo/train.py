"""Trains the demonstration's adapters on the CPU, a few minutes in all, and checks that each speaks with its own marker.

`python -m demo.train` trains all styles and rewrites `demo/adapters`; `--only haiku` one of them; `--evaluate` trains none. Needs
the extra `oracle` (transformers, peft), which nothing that serves may import.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.prepare import MODEL_NAME, prepare
from demo.styles import STYLES, Style, markers_in, unseen_prompts

_BATCH = 8
_SEED = 20261129
_NOT_LEARNED = -100
"""Label of a token whose loss does not count."""
_MARKER_TOKENS = 16
"""The marker must stand within so many tokens of an answer."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one style is trained: the arguments of `LoraConfig`, passes over the data, and the learning rate."""

    lora: dict[str, Any] = field(default_factory=dict)
    epochs: int = 14
    learning_rate: float = 2e-3


_ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RECIPES = {
    "pirate-v1": Recipe({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}),
    "pirate-v2": Recipe({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}),
    "haiku": Recipe({"r": 3, "lora_alpha": 6, "target_modules": _ALL_MODULES}),
    "counsel": Recipe(
        {
            "r": 4,
            "lora_alpha": 4,
            "use_rslora": True,
            "target_modules": ["q_proj", "o_proj", "down_proj"],
            "rank_pattern": {"q_proj": 16, "down_proj": 2},
            "alpha_pattern": {"q_proj": 8},
        }
    ),
}
"""Plain LoRA of rank 8 on q and v; rank 3 on all seven modules; rank-stabilised LoRA with a rank and alpha of each module."""


def train(style: Style, model_folder: Path, console: Console) -> None:
    """Trains one style in float32 and writes its PEFT folder in bfloat16; the same machine gives the same adapter again."""
    recipe = RECIPES[style.title]
    torch.manual_seed(_SEED)
    order = random.Random(_SEED)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **recipe.lora))
    chats = [json.loads(line) for line in style.data.read_text(encoding="utf-8").splitlines()]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=recipe.learning_rate, weight_decay=0.0)
    steps = recipe.epochs * -(-len(chats) // _BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 4, (steps - step) / steps * 1.2, 1.0))
    model.train()
    for epoch in range(recipe.epochs):
        order.shuffle(chats)
        for batch in _batches(tokenizer, chats):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        console.print(f"{style.title}: pass {epoch + 1} of {recipe.epochs}, loss {loss.item():.3f}")
    _save(model, style.folder)


def _batches(tokenizer: Any, chats: Sequence[dict[str, str]]) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(chats), _BATCH):
        rows = []
        for chat in chats[start : start + _BATCH]:
            prompt = tokenizer.encode(_render(tokenizer, chat["prompt"]))
            rows.append((prompt, [*tokenizer.encode(chat["answer"]), tokenizer.eos_token_id]))
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), _NOT_LEARNED)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for row, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : end] = torch.tensor(answer)
            mask[row, :end] = 1
        yield {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _render(tokenizer: Any, prompt: str) -> str:
    chat = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def _save(model: PeftModel, folder: Path) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    shutil.rmtree(folder, ignore_errors=True)
    model.peft_config["default"].base_model_name_or_path = MODEL_NAME
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    (folder / "adapter_model.safetensors").chmod(0o644)


def evaluate(style: Style | None, model_folder: Path, *, max_tokens: int = 40) -> list[str]:
    """Greedy answers of one saved style (None: of the base) to the prompts that no style was trained on."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    if style is not None:
        model = PeftModel.from_pretrained(model, style.folder)
    model.eval()
    inputs = tokenizer([_render(tokenizer, prompt) for prompt in unseen_prompts()], return_tensors="pt", padding=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in output[:, inputs["input_ids"].shape[1] :]]


def check(style: Style | None, answers: Sequence[str], tokenizer: Any) -> list[str]:
    """Lists what is wrong with a style's answers: its marker late or absent, another's present; for the base, any marker."""
    expected = frozenset({style.marker} if style else ())
    faults = []
    for prompt, answer in zip(unseen_prompts(), answers, strict=True):
        beginning = tokenizer.decode(tokenizer.encode(answer)[:_MARKER_TOKENS])
        if markers_in(beginning) != expected or markers_in(answer) != expected:
            faults.append(f"{style.title if style else 'base'} answers {prompt!r} with {answer!r}")
    return faults


def main() -> int:
    """Trains and evaluates; the exit status is 1 when any answer lacks its marker or shows another's."""
    parser = argparse.ArgumentParser(prog="python -m demo.train", description="Train the demonstration's adapters.")
    parser.add_argument("--only", choices=[style.title for style in STYLES], help="train only this style")
    parser.add_argument("--evaluate", action="store_true", help="train nothing, evaluate what is saved")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    model_folder = prepare()
    if not arguments.evaluate:
        for style in STYLES:
            if arguments.only in (None, style.title):
                train(style, model_folder, console)

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    table = Table("style", "own marker", "first answer")
    faults = []
    for evaluated in (None, *STYLES):
        answers = evaluate(evaluated, model_folder)
        wrong = check(evaluated, answers, tokenizer)
        faults += wrong
        title = evaluated.title if evaluated else "base (no marker)"
        table.add_row(title, f"{len(answers) - len(wrong)} of {len(answers)}", repr(answers[0]).replace("[", r"\["))
    console.print(table)
    for fault in faults:
        console.print(fault, markup=False)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
