"""vLLM's CPU build, in its own environment; see `benchmarks.vllm_environment`."""

from __future__ import annotations

import importlib
import itertools
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.contenders.process import Setup
from benchmarks.workload import AdapterKey, Run, Workload

_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, as Veneer has; twice what the longest workload needs
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: no third process beside two cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


class Vllm:
    """The engine under `LLM`, driven step by step so that each token's time is seen. Option `eager`: no compilation."""

    def __init__(self, setup: Setup) -> None:
        os.environ.update({name: value for name, value in _SETTINGS.items() if name not in os.environ})
        vllm: Any = importlib.import_module("vllm")  # not of this environment
        self._vllm = vllm
        self._request = importlib.import_module("vllm.lora.request").LoRARequest
        self._setup = setup
        self._runs = 0
        arguments: dict[str, Any] = {
            "model": setup.model,
            "dtype": "bfloat16",
            "max_model_len": setup.context,
            "max_num_seqs": setup.streams,
            "enable_prefix_caching": False,
            "enforce_eager": bool(setup.options.get("eager")),
            "seed": 0,
        }
        if setup.max_adapters:
            arguments |= {"enable_lora": True, "max_loras": setup.max_adapters, "max_lora_rank": setup.max_rank}
        start = time.perf_counter()
        self._engine = vllm.LLM(**arguments).llm_engine
        config = self._engine.vllm_config
        self.settings = {
            "version": vllm.__version__,
            **arguments,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "kv_blocks": config.cache_config.num_gpu_blocks,
            **{name: os.environ[name] for name in _SETTINGS},
            "started_s": round(time.perf_counter() - start),
        }

    def run(self, workload: Workload) -> Run:
        """See `Contender`."""
        self._runs += 1
        sampling = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=workload.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )
        adapters = [self._adapter(key) for key in workload.adapter_keys()]
        ids: list[list[int]] = [[] for _ in range(workload.streams)]
        times: list[list[float]] = [[] for _ in range(workload.streams)]
        start = time.perf_counter()
        for index, (prompt, adapter) in enumerate(zip(workload.prompts(), adapters, strict=True)):
            self._engine.add_request(f"{self._runs}-{index}", {"prompt_token_ids": prompt}, sampling, lora_request=adapter)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                index = int(output.request_id.split("-")[1])
                new = output.outputs[0].token_ids
                ids[index] += new
                times[index] += [now] * len(new)
        seconds = time.perf_counter() - start
        assert {len(one) for one in ids} == {workload.output_tokens}, "every stream has all its tokens"
        gaps = [later - earlier for one in times for earlier, later in itertools.pairwise(one)]
        return Run(seconds, ids, [one[0] - start for one in times], gaps)

    def _adapter(self, key: AdapterKey | None) -> Any:
        if key is None:
            return None
        return self._request(key.name, key.number + 1, str(Path(self._setup.adapters) / key.name))
