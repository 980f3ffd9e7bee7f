"""`generate` of transformers; with adapters, a mixed batch of peft (`adapter_names`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders.process import Setup
from benchmarks.workload import AdapterKey, Run, Workload


class Transformers:
    """One batch, greedy. A time to the first token is not to be seen."""

    def __init__(self, setup: Setup) -> None:
        import transformers

        self._setup = setup
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.bfloat16).eval()
        self._loaded: set[str] = set()
        self.settings: dict[str, Any] = {
            "transformers": transformers.__version__,
            "dtype": "bfloat16",
            "attention": self._model.config._attn_implementation,
            "threads": torch.get_num_threads(),
        }
        if setup.max_adapters:
            import peft

            self.settings["peft"] = peft.__version__

    def run(self, workload: Workload) -> Run:
        """See `Contender`."""
        keys = [key for key in workload.adapter_keys() if key is not None]
        for key in dict.fromkeys(keys):
            self._load(key)
        prompts = torch.tensor(workload.prompts())
        arguments = {"adapter_names": [key.name for key in keys]} if keys else {}
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=workload.output_tokens,
                max_new_tokens=workload.output_tokens,
                pad_token_id=0,
                **arguments,
            )
        seconds = time.perf_counter() - start
        ids: list[list[int]] = out[:, prompts.shape[1] :].tolist()
        assert {len(one) for one in ids} == {workload.output_tokens}, "every stream has all its tokens"
        return Run(seconds, ids)

    def _load(self, key: AdapterKey) -> None:
        if key.name in self._loaded:
            return
        folder = Path(self._setup.adapters) / key.name
        if self._loaded:
            self._model.load_adapter(folder, key.name, autocast_adapter_dtype=False)
        else:
            import peft

            self._model = peft.PeftModel.from_pretrained(self._model, folder, key.name, autocast_adapter_dtype=False).eval()
        self._loaded.add(key.name)
