"""A vLLM instance in a process of its own, driven by lines of JSON: python -m tests.vllm.instance '{...}'.

Arguments: of vLLM's engine. Lines in: {"add": id, "prompt": [tokens], "max_tokens": n, "params": kv_transfer_params},
{"abort": id}, {"quit": 1}, {"call": id, "method": of all workers, "arguments": {...}}, {"reset": id, "running":
whether running requests are computed again} (prefix cache).
Lines out: {"ready": 1}, then {"id", "tokens", "finish", "params"} for each that ends, {"id", "error"} for calls.
"""

import json
import logging
import os
import queue
import sys
import threading
import time
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_PAUSE_S = 0.002  # between steps while nothing is to be computed


def main() -> None:
    os.environ.update(ENVIRONMENT)
    # What vLLM prints goes to stderr; the lines have stdout for themselves.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    logging.basicConfig(stream=sys.stderr, format="%(name)s %(levelname)s %(message)s")
    logging.getLogger("crossrail").setLevel(logging.INFO)

    from vllm import EngineArgs, LLMEngine, SamplingParams

    arguments = json.loads(sys.argv[1])
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    lines: queue.Queue[dict] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        lines.put({"quit": 1})

    threading.Thread(target=read, daemon=True).start()
    out.write(json.dumps({"ready": 1}) + "\n")
    while True:
        while not lines.empty():
            line = lines.get()
            if "quit" in line:
                engine.engine_core.shutdown()
                os._exit(0)  # some threads of vLLM's own never end
            if "abort" in line:
                engine.abort_request([line["abort"]])
                out.write(json.dumps({"id": line["abort"], "finish": "aborted", "tokens": [], "params": None}) + "\n")
                continue
            if "call" in line or "reset" in line:
                out.write(json.dumps(called(engine, line)) + "\n")
                continue
            extra = {"kv_transfer_params": line["params"]} if line.get("params") else None
            sampling = SamplingParams(
                temperature=0, max_tokens=line["max_tokens"], detokenize=False, ignore_eos=True, extra_args=extra
            )
            engine.add_request(line["add"], {"prompt_token_ids": line["prompt"]}, sampling)
        for output in engine.step():
            if output.finished:
                made = output.outputs[0]
                answer = {
                    "id": output.request_id,
                    "tokens": list(made.token_ids),
                    "finish": made.finish_reason,
                    "params": output.kv_transfer_params,
                }
                out.write(json.dumps(answer) + "\n")
        if not engine.has_unfinished_requests():
            time.sleep(_PAUSE_S)


def called(engine: Any, line: dict[str, Any]) -> dict[str, Any]:
    """error: empty when it went well."""
    try:
        if "reset" in line:
            is_reset = engine.reset_prefix_cache(line["running"], reset_connector=line["running"])
            return {"id": line["reset"], "error": "" if is_reset else "requests are under way"}
        engine.collective_rpc(line["method"], kwargs=line["arguments"])
    except Exception as error:
        return {"id": line.get("call") or line["reset"], "error": f"{type(error).__name__}: {error}"}
    return {"id": line["call"], "error": ""}


if __name__ == "__main__":
    main()
