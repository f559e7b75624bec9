"""Our classes and the stand-in against SGLang's own: what an update of SGLang would break is named here first."""

import ast
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.disaggregation.base.conn as base
import torch

from crossrail.integrations.sglang import conn, front, prompts
from tests.sglang.conftest import stand_in

# By what SGLang's schedulers call them, and which of our classes it is.
CALLED = {
    "kv_manager": conn.CrossrailKVManager,
    "kv_mgr": conn.CrossrailKVManager,
    "disagg_kv_sender": conn.CrossrailKVSender,
    "kv_receiver": conn.CrossrailKVReceiver,
}
BASES = [
    (conn.CrossrailKVManager, "BaseKVManager"),
    (conn.CrossrailKVSender, "BaseKVSender"),
    (conn.CrossrailKVReceiver, "BaseKVReceiver"),
    (conn.CrossrailKVBootstrapServer, "BaseKVBootstrapServer"),
]
# Asked for only where a feature is on that crossrail refuses, or behind hasattr and getattr.
NOT_OURS = {
    "_staging_handler": "staging buffers, which SGLang allows for mooncake and nixl alone",
    "transfer_infos": "the same",
    "set_kv_buffer_tensors": "behind hasattr",
    "_ensure_prefill_recompute_executor": "ranks of data parallelism other than the room's",
    "enable_all_cp_ranks_for_transfer": "senders that take indices on the device",
    "is_abort_release_safe": "deferred release, which we need not: poll says Failed only when it is safe",
    "clear_deferred_abort_state": "the same",
    "bootstrap_infos": "the same",
    "teardown": "role switch",
    "attn_cp_rank": "a helper that only senders of CommonKVManager call",
    "attn_cp_size": "the same",
}


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("ours", "name"), BASES)
def test_ours_are_whole_and_take_what_sglang_gives(ours: type, name: str) -> None:
    theirs = getattr(base, name)
    assert issubclass(ours, theirs) and not inspect.isabstract(ours)
    for method, function in vars(theirs).items():
        if inspect.isfunction(function):
            assert parameters(getattr(ours, method)) == parameters(function), method


@pytest.mark.parametrize("name", [name for _, name in BASES])
def test_the_stand_in_has_the_same_methods(name: str) -> None:
    our_own, theirs = getattr(stand_in("disaggregation/base/conn"), name), getattr(base, name)
    assert our_own.__abstractmethods__ == theirs.__abstractmethods__
    for method, function in vars(our_own).items():
        if inspect.isfunction(function):
            assert parameters(function) == parameters(getattr(theirs, method)), method


@pytest.mark.parametrize("kind", ["KVPoll", "KVTransferDestination", "KVTransferMetric"])
def test_the_stand_in_has_the_same_values(kind: str) -> None:
    our_own, theirs = getattr(stand_in("disaggregation/base/conn"), kind), getattr(base, kind)
    for name, value in vars(our_own).items():
        if not name.startswith("_") and not callable(value):
            assert getattr(theirs, name) == value, name


def test_the_fields_of_kv_args_that_are_read_are_there() -> None:
    from tests.sglang.side import Side

    read = {
        name for name in Side.kv_args.__code__.co_names if name.startswith(("kv_", "aux_", "state_", "page_", "ib_"))
    }
    known = {*inspect.get_annotations(base.KVArgs), "kv_args"}
    assert read <= known, read - known


@pytest.mark.parametrize("module", ["prefill", "decode", "utils", "decode_hicache_mixin"])
def test_what_schedulers_ask_of_our_classes_is_there(module: str) -> None:
    """Every attribute by which SGLang's source names them, at any depth."""
    source = Path(base.__file__).parents[1] / f"{module}.py"
    missing = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            if owner in CALLED and not (_has(CALLED[owner], node.attr) or node.attr in NOT_OURS):
                missing.add(f"{owner}.{node.attr}")
    assert not missing


def _has(kind: type, name: str) -> bool:
    """In the class, or given by its methods."""
    return hasattr(kind, name) or any(
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name
        for node in ast.walk(ast.parse(inspect.getsource(kind)))
    )


def test_the_canary_of_that_test() -> None:
    assert not _has(conn.CrossrailKVSender, "no_such_thing") and _has(conn.CrossrailKVSender, "kv_mgr")


def test_what_place_of_asks_is_what_sglang_knows() -> None:
    """In the text: SGLang's own reader of these needs a published configuration, which takes a model."""
    source = (Path(base.__file__).parents[1] / "common" / "conn.py").read_text()
    for name in (*conn._PARALLELISM, "attn_tp_rank", "attn_tp_size", "dist_init_addr"):
        assert f"parallel.{name}" in source or f"get_parallel().{name}" in source, name
    for name in ("disaggregation_bootstrap_port", "disaggregation_decode_allocation_policy"):
        assert f"get_disagg().{name}" in source, name
    for name in ("host", "port"):
        assert f"get_serving().{name}" in source, name


def test_what_the_plugin_hooks_is_there() -> None:
    """In the text: importing SGLang's utils takes packages for GPUs."""
    tree = ast.parse((Path(base.__file__).parents[1] / "utils.py").read_text())
    theirs = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    ours = stand_in("disaggregation/utils")
    for name in ("TransferBackend", "KVClassType", "DisaggregationMode"):
        values = {node.value.value for node in ast.walk(theirs[name]) if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
        assert {one.value for one in getattr(ours, name)} <= values
        assert [base.id for base in theirs[name].bases] == ["Enum"]  # type: ignore[attr-defined,union-attr]
    function = theirs["get_kv_class"]
    assert isinstance(function, ast.FunctionDef)
    assert [argument.arg for argument in function.args.args] == ["transfer_backend", "class_type"]


def test_it_is_found_by_its_entry_point() -> None:
    found = importlib.metadata.entry_points(group="sglang.srt.plugins", name="crossrail")
    assert [entry.value for entry in found] in (["crossrail.integrations.sglang.plugin:register"], [])
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert (
        '[project.entry-points."sglang.srt.plugins"]\ncrossrail = "crossrail.integrations.sglang.plugin:register"'
        in text
    )


def test_importing_the_integration_imports_no_sglang() -> None:
    code = "import sys, crossrail.integrations.sglang.manager; sys.exit('sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_health_checks_are_of_the_host_that_is_left_alone() -> None:
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    assert front._NO_HOST == FAKE_BOOTSTRAP_HOST


def test_the_most_top_logprobs_are_as_many_as_sglang_has_room_for() -> None:
    from sglang.srt.disaggregation.utils import MetadataBuffers

    assert inspect.signature(MetadataBuffers).parameters["max_top_logprobs_num"].default == front.TOP_LOGPROBS_MAX


@pytest.mark.parametrize("mode", prompts.QUEUES)
def test_the_methods_by_which_prompts_are_known_are_there(mode: str) -> None:
    """In the text: the modules themselves want a GPU's packages."""
    module, method = prompts.QUEUES[mode]
    kind, name = method.split(".")
    source = Path(base.__file__).parents[3].joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    found = [
        function
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == kind
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.name == name
    ]
    assert [[argument.arg for argument in function.args.args[:2]] for function in found] == [["self", "req"]]


def test_adapters_as_sglang_holds_them_are_told_apart() -> None:
    from sglang.srt.lora.lora import LoRAAdapter

    def loaded(seed: int) -> Any:
        drawn, heads = torch.Generator().manual_seed(seed), {"q_proj": 16, "k_proj": 8, "v_proj": 8}
        shapes = {f"{name}.lora_A.weight": (2, 16) for name in heads}
        shapes |= {f"{name}.lora_B.weight": (rows, 2) for name, rows in heads.items()}
        hf_config = {"peft_type": "LORA"}
        config = SimpleNamespace(hf_config=hf_config, lora_alpha=4, r=2, target_modules=list(heads))
        adapter = LoRAAdapter("id", config, SimpleNamespace(num_hidden_layers=1), None, None)
        adapter.initialize_weights_from_tensors(
            {f"model.layers.0.self_attn.{name}": torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
        )
        return adapter

    assert prompts._digest_of(loaded(1)) == prompts._digest_of(loaded(1)) != prompts._digest_of(loaded(2))
    assert [name for name, _ in prompts._tensors_of(loaded(1))] == [
        f"model.layers.0.self_attn.qkv_proj.lora_{part}.weight" for part in "AB"
    ]


def test_where_sglang_keeps_its_adapters() -> None:
    source = (Path(base.__file__).parents[2] / "lora" / "lora_manager.py").read_text()
    assert "self.loras[lora_ref.lora_id] = lora_adapter" in source
    assert "self.lora_refs[lora_ref.lora_id] = lora_ref" in source
