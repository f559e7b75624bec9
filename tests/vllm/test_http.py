"""Two servers, started and asked by the commands of docs/kv-vllm.md, over HTTP from end to end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import eventually
from tests.support.ports import free_port
from tests.vllm.support import ENGINE, ROOT, SECRET, START_S, Instance

PRODUCER, CONSUMER = free_port(), free_port()  # for 8100 and 8200 of the page, which may be taken here
TOKENS_MAX = ENGINE["max_model_len"]
FLAGS = "--enforce-eager --dtype float32 --max-model-len 512 --num-gpu-blocks-override 64"


def of_page(marker: str) -> str:
    """The page's block of shell that has this in it."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "kv-vllm.md").read_text(), re.DOTALL)
    block = next(block for block in blocks if marker in block)
    return block.replace("8100", str(PRODUCER)).replace("8200", str(CONSUMER))


@pytest.fixture(scope="module")
def spoken(model: Path) -> Path:
    """The model, with words: t0, t1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(255)} | {"<unk>": 255}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(model)
    return model


@pytest.fixture(scope="module")
def environment(folder: Path, spoken: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MODEL": str(spoken),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture(scope="module")
def servers(folder: Path, environment: dict[str, str]) -> Iterator[Path]:
    """Their log."""
    script = of_page("kv_producer").replace('"$(openssl rand -hex 32)"', f'"{SECRET}"')
    # A lease that no test lives to see the end of, and models as small as the tests'.
    script = script.replace(r"\"$2\"}", r"\"$2\", \"kv_connector_extra_config\": {\"lease_s\": 3600}}")
    script = script.replace('--port "$1"', f'--port "$1" {FLAGS}') + "wait\n"
    assert "lease_s" in script and FLAGS in script and SECRET in script
    log = folder / "http.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", script], env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while not (_is_healthy(PRODUCER) and _is_healthy(CONSUMER)):
            assert "Engine core initialization failed" not in log.read_text(), log.read_text()[-6000:]
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            time.sleep(1.0)
        yield log
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def post(port: int, **body: Any) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120.0) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=30.0) as answer:
        text = answer.read().decode()
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_the_pages_commands(alone: Instance, servers: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-c", of_page("PARAMS=$(ask")], env=environment, capture_output=True, text=True, timeout=300
    )

    text = json.loads(done.stdout)["choices"][0]["text"]
    expected = alone.ask("http", [1, 2, 3, 4, 5], 32)["tokens"]
    assert text.split() == [f"t{token}" for token in expected], done.stderr
    assert metric(CONSUMER, "vllm:crossrail_loaded_total") == 1


def test_what_a_server_rejects_is_let_go_at_its_producer(servers: Path, spoken: Path) -> None:
    """It never had the request, and its client is told so; the producer's blocks do not wait for their lease."""
    body = {"model": str(spoken), "prompt": [*range(200)], "temperature": 0}
    _, prefilled = post(PRODUCER, **body, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert metric(PRODUCER, "vllm:kv_cache_usage_perc") > 0

    status, _ = post(CONSUMER, **body, max_tokens=10 * TOKENS_MAX, kv_transfer_params=prefilled["kv_transfer_params"])

    assert status == 400
    eventually(lambda: metric(PRODUCER, "vllm:kv_cache_usage_perc") == 0, "its blocks are free", 60.0, 0.5)
    assert metric(PRODUCER, "vllm:crossrail_leases_expired_total") == 0


def test_choices_hold_no_blocks_at_the_producer(alone: Instance, servers: Path, spoken: Path) -> None:
    """As vLLM's example proxies for NIXL send it: n as the client has it, their own keys, the answer passed on."""
    body = {"model": str(spoken), "prompt": [*range(3, 90)], "top_k": 1, "n": 3}
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    asked |= {"remote_host": None, "remote_port": None}
    loaded = metric(CONSUMER, "vllm:crossrail_loaded_total")

    _, prefilled = post(PRODUCER, **body, max_tokens=1, kv_transfer_params=asked)
    params = prefilled["kv_transfer_params"]
    _, told = post(CONSUMER, **body, max_tokens=8, ignore_eos=True, kv_transfer_params=params)

    words = " ".join(f"t{token}" for token in alone.ask("choices", body["prompt"], 8)["tokens"])
    assert [choice["text"].strip() for choice in told["choices"]] == [words] * 3
    assert metric(CONSUMER, "vllm:crossrail_loaded_total") == loaded + 1
    eventually(lambda: metric(PRODUCER, "vllm:kv_cache_usage_perc") == 0, "its blocks are free", 60.0, 0.5)
    assert metric(PRODUCER, "vllm:crossrail_leases_expired_total") == 0


def test_what_goes_wrong_is_in_the_log_by_our_name(servers: Path, spoken: Path) -> None:
    body = {"model": str(spoken), "prompt": [1, 2, 3], "max_tokens": 4}
    status, _ = post(CONSUMER, **body, kv_transfer_params={"do_remote_prefill": True})
    assert status == 500
    lines = [line for line in servers.read_text().splitlines() if "needs transfer_id and crossrail_instance" in line]
    assert lines and all("crossrail" in line.partition("needs transfer_id")[0] for line in lines), lines
