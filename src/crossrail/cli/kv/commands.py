"""The options of `crossrail kv`; what the commands do is in other modules, imported when they run."""

from __future__ import annotations

from typing import Any

import click

from crossrail.cli.group import body
from crossrail.cli.json_output import json_option
from crossrail.cli.option_types import FloatRange, IntRange, OutputFolder, seconds
from crossrail.cli.service import Decorator, engine_options, together, transport_option
from crossrail.kv.options import NodeOptions, RouterOptions

_TOKENS_MAX = 1 << 20  # what a router serves at most
_SEED_MAX = (1 << 63) - 1
MEMBERSHIP_HELP = "etcd://HOST:PORT,HOST:PORT/CLUSTER, where a cluster's nodes and routers are"


service_options = together(
    engine_options,
    click.option(
        "--port",
        type=IntRange(0, 65535),
        default=0,
        show_default=True,
        help="First port that the engine's TCP rails listen on; 0: any.",
    ),
    click.option(
        "--peer-timeout-s",
        type=seconds(),
        default=10.0,
        show_default=True,
        help="Seconds of silence after which the engine gives up a peer on another host.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(["warning", "info", "debug"]),
        help="Log to standard error, with the time: warnings, what became of each request too, or all [default: "
        "warnings, without the time].",
    ),
    click.option("--until-stdin-closes", is_flag=True, hidden=True),
)


def options_of(defaults: Any, **helps: str) -> Decorator:
    """Fields of a dataclass as options, each with its default there and the help given here; all are more than 0."""
    return together(
        *(
            click.option(
                f"--{field.replace('_', '-')}",
                type=at_least_one() if isinstance(default := getattr(defaults, field), int) else seconds(),
                default=default,
                show_default=True,
                help=text,
            )
            for field, text in helps.items()
        )
    )


def at_least_one() -> IntRange:
    """The type of a count."""
    return IntRange(1, 1 << 30)


_node_options = together(
    click.option(
        "--router", "routers", multiple=True, metavar="URL", help="URL of a router to serve; may be repeated."
    ),
    click.option("--membership", metavar="URL", help=f"Instead of --router: {MEMBERSHIP_HELP}."),
    click.option("--name", help="Name, unique among all nodes; by default role, host and process."),
    click.option(
        "--model",
        default="toy",
        show_default=True,
        help="'toy', 'qwen3', 'llama', 'deepseek', a checkpoint's directory, or package.module:function.",
    ),
    click.option(
        "--model-option",
        "model_options",
        multiple=True,
        metavar="KEY=VALUE",
        help="Option of the model; may be repeated.",
    ),
    click.option("--metrics-port", type=IntRange(0, 65535), help="Serve the engine's metrics on this port; 0: any."),
    click.option(
        "--metrics-host", default="127.0.0.1", show_default=True, help="Address of this host where metrics are served."
    ),
    click.option(
        "--drain-s",
        type=seconds(),
        default=30.0,
        show_default=True,
        help="Seconds to finish requests in progress after SIGTERM.",
    ),
    options_of(
        NodeOptions,
        retry_s="Seconds until a router that has gone is looked for again.",
        probe_s="Seconds between probes of peers.",
        prefiller_timeout_s="Seconds without an answer after which a peer is given up as lost.",
        model_timeout_s="Seconds that a model may compute without a layer (prefiller) or a token (decoder).",
        page_wait_s="Seconds that a request may wait for KV pages, once it has been accepted.",
        lease_s="With etcd: lease of the node's record, in seconds; a node that is frozen for longer is gone.",
    ),
    service_options,
)


@click.command()
@click.option("--model", default="toy", show_default=True, help="Model, as for `crossrail kv prefiller`.")
@click.option(
    "--model-option", "model_options", multiple=True, metavar="KEY=VALUE", help="Option of the model; may be repeated."
)
@click.option("--prompt", help="The prompt; by default a sentence repeated up to --prompt-tokens.")
@click.option(
    "--prompt-tokens",
    type=IntRange(1, _TOKENS_MAX),
    default=2000,
    show_default=True,
    help="Length of that prompt; with a checkpoint's tokenizer in characters.",
)
@click.option("--max-tokens", type=IntRange(1, _TOKENS_MAX), default=48, show_default=True, help="Tokens to generate.")
@click.option(
    "--temperature", type=FloatRange(0, 100), default=0.8, show_default=True, help="Sampling temperature; 0: greedy."
)
@click.option("--seed", type=IntRange(0, _SEED_MAX), default=7, show_default=True, help="Seed of sampling.")
@click.option("--prefillers", type=IntRange(1, 64), default=2, show_default=True, help="Prefiller processes.")
@click.option("--decoders", type=IntRange(1, 64), default=1, show_default=True, help="Decoder processes.")
@click.option(
    "--token-us",
    type=FloatRange(0, 1e6),
    default=40.0,
    show_default=True,
    help="How long the toy takes for a token in a layer.",
)
@click.option("--tp", type=IntRange(1, 64), default=1, show_default=True, help="Ranks of each node.")
@transport_option()
@click.option("--kill", "kills", is_flag=True, help="Kill the active prefiller in the middle of the prompt.")
@click.option(
    "--out",
    type=OutputFolder(),
    help="Write the timeline to this folder too, as a picture (SVG) and for chrome://tracing.",
)
def demo(**options: Any) -> None:
    """Run a prompt through several processes and check the tokens against a single node."""
    body("kv", "crossrail.cli.kv.demo", "demo")(**options)


@click.command()
@click.option(
    "--layers", type=IntRange(1, 94), default=4, show_default=True, help="Layers of the model, which are alike."
)
@click.option("--seed", default=1, show_default=True, help="Seed of the simulated worlds.")
@json_option("the figures")
def sim(**options: Any) -> None:
    """Simulate the per-layer transfer of Qwen3-235B's KV, at TP 4 on two EFA rails of 200 Gb/s per GPU.

    Real senders, receivers and engines, but no data and no GPU; computing takes the published time. "four GPUs" and
    "one GPU" (all ranks on one GPU's rails) follow from the published figures of the NICs alone. "fitted" has two more
    numbers, chosen for the rows of 4,096 and 16,384 tokens: what it says about these is no test of it.
    """
    body("kv", "crossrail.cli.kv.sim", "sim")(**options)


@click.command()
@click.option(
    "--listen", default="127.0.0.1:8000", show_default=True, metavar="HOST:PORT", help="Address of the HTTP server."
)
@click.option("--name", default="router", show_default=True, help="Name of this router in logs and metrics.")
@click.option(
    "--tokenizer",
    default="toy",
    show_default=True,
    help="'toy' (bytes), a checkpoint's directory, package.module:function, or 'none' if prompts are token ids.",
)
@click.option(
    "--membership", default="embedded", show_default=True, metavar="URL", help=f"embedded, or {MEMBERSHIP_HELP}."
)
@options_of(
    RouterOptions,
    requests_max="Maximum number of requests in progress; further ones get status 429.",
    tokens_max="Maximum sum of their prompts and max_tokens; further requests get status 429.",
    heartbeat_s="Seconds between reports of a node.",
    lease_s="Seconds without a report after which a node is gone; with etcd twice that, or three reports if longer.",
    queue_s="Seconds that a request may wait for room at a node.",
    request_timeout_s="Seconds that a request may take in total.",
)
@click.option(
    "--drain-s",
    type=seconds(),
    help="Seconds to finish requests in progress after SIGTERM; by default they are cut off.",
)
@service_options
def router(**options: Any) -> None:
    """Serve OpenAI's /v1/completions. Nodes find this router by its URL and the secret."""
    body("kv", "crossrail.cli.kv.router", "router")(**options)


@click.command()
@options_of(
    NodeOptions,
    chunk_tokens="Maximum number of tokens per chunk (one step of the model).",
    queue_max="Maximum number of waiting requests.",
    queue_tokens_max="Tokens of their prompts from which on no further ones are accepted.",
)
@_node_options
def prefiller(**options: Any) -> None:
    """Run prompts through the model and write their KV to decoders. On SIGTERM it finishes its requests, then exits."""
    body("kv", "crossrail.cli.kv.nodes", "prefiller")(**options)


@click.command()
@options_of(NodeOptions, requests_max="Maximum number of requests in progress.")
@_node_options
def decoder(**options: Any) -> None:
    """Receive the KV of prompts and generate tokens. On SIGTERM it finishes its requests, then exits."""
    body("kv", "crossrail.cli.kv.nodes", "decoder")(**options)
