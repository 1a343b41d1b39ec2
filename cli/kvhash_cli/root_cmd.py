"""``kvhash root``: NONE_HASH of an engine's settings."""

from __future__ import annotations

import json

import click

from kvhash.block_hash import hash_text, json_hash, low64
from kvhash.contract import Contract
from kvhash.hasher import none_hash

from .options import output_option

__all__ = ["root"]


@click.command()
@click.option("--vllm", default="latest", show_default=True, metavar="RELEASE", help="vLLM release.")
@click.option(
    "--algorithm", default="sha256", show_default=True, metavar="NAME", help="--prefix-caching-hash-algo."
)
@click.option(
    "--hash-seed", default=None, metavar="TEXT", help="PYTHONHASHSEED; left out where the engine has none."
)
@output_option("text", "jsonl")
def root(vllm: str, algorithm: str, hash_seed: str | None, output: str) -> None:
    """Show NONE_HASH, the parent of every prompt's block 0.

    \b
    Example:
      kvhash root --vllm 0.33.0 --algorithm sha256_cbor --hash-seed 0
    """
    contract = Contract.for_vllm(vllm)
    value = none_hash(contract, contract.algorithm(algorithm), hash_seed)
    if output == "jsonl":
        record = {
            "v": 1,
            "vllm": str(contract.release),
            "algorithm": algorithm,
            "hash_seed": hash_seed,
            "none_hash": json_hash(value),
            "external": str(value if isinstance(value, int) else low64(value)),
        }
        click.echo(json.dumps(record))
    else:
        click.echo(hash_text(value))
