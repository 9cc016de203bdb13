"""df-bench batch: what one more conversation in a pass costs, on layers of the true dimensions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin.cli.bench_model import RELEASED, about, causes, describe, few_layers, folder_option, layers_option, size
from deltafin.cli.options import json_option, options, print_json, threads_option, verbose_option
from deltafin.errors import NoMemory

if TYPE_CHECKING:
    from deltafin.indexer import ModelConfig
    from deltafin.runtime import MemoryPlan
    from deltafin.runtime.batchbench import BatchCost, BatchPass
    from deltafin.store import Standin

SEQUENCES = "1,8,32,64"


class Counts(click.ParamType[tuple[int, ...]]):
    """Numbers of sequences, ascending."""

    name = "numbers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(re.fullmatch(r"\s*[1-9]\d{0,3}\s*", word) for word in words):
            self.fail(f"{value!r}: expected numbers from 1 to 9999 with commas between them", param, ctx)
        return tuple(sorted({int(word) for word in words}))


@click.command("batch")
@options(folder_option, layers_option, threads_option, json_option, verbose_option)
@click.option(
    "--sequences",
    type=Counts(),
    default=SEQUENCES,
    show_default=True,
    metavar="LIST",
    help="How many conversations a pass serves.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="The median counts.")
def bench_batch(
    folder: Path | None,
    layers: int | None,
    threads: int | None,
    as_json: bool,
    sequences: tuple[int, ...],
    rounds: int,
) -> None:
    """Measure what one more conversation in a pass costs.

    Each of them gets one token a pass and has a state of its own. With a spine that streams past and with one that
    stays in memory, in turns, on a stand-in with a few layers of Kimi K3's dimensions; experts are always read. The
    command fails if a byte of an expert is read that no row chose, or one twice. With invented weights rows choose
    nearly at random; rows of one text share more.

    Example: df-bench batch --dir /data/k3-few --sequences 1,16,64
    """
    from deltafin.indexer import k3_config, parse_config
    from deltafin.runtime import batchbench
    from deltafin.store import open_store

    standin = few_layers(folder, layers)
    with open_store(standin.model, cache_dir=standin.cache_dir, offline=True) as store:
        config = store.catalog.config
        plans = {"streamed": batchbench.streamed(store, max(sequences))}
        _require(plans["streamed"], "give fewer --sequences or --layers")
        kept = batchbench.resident(store, max(sequences))
        if _fits(kept):
            plans["resident"] = kept
        else:
            click.echo(
                f"df-bench: a resident spine and {max(sequences)} sequences take {size(kept.total)}, more than is "
                "available: only the streamed one is measured",
                err=True,
            )
    passes = _measure(standin, plans, sequences, rounds, threads)
    costs = {spine: batchbench.costs(found) for spine, found in passes.items()}
    whole = parse_config(k3_config())
    if as_json:
        print_json({**about(standin), "rounds": rounds, "spines": {
            spine: [_as_json(cost, config, whole, plans[spine]) for cost in found] for spine, found in costs.items()
        }})  # fmt: skip
        return
    click.echo(describe(standin) + f"; {len(config.moe_layers)} of {config.num_layers} layers have experts")
    click.echo(f"{rounds} rounds in turns: median, and from the best to the worst")
    for spine, found in costs.items():
        _print(spine, plans[spine], found, config, whole)


def _measure(
    standin: Standin, plans: dict[str, MemoryPlan], sequences: Sequence[int], rounds: int, threads: int | None
) -> dict[str, list[BatchPass]]:
    """Spines take turns, each with a model of its own, and in every other round the numbers go down."""
    from deltafin.cli.progress import Progress
    from deltafin.runtime import Model
    from deltafin.runtime.batchbench import measure_batches
    from deltafin.store import open_store

    found: dict[str, list[BatchPass]] = {spine: [] for spine in plans}
    for number in range(rounds):
        for spine, plan in plans.items():
            with (
                open_store(standin.model, cache_dir=standin.cache_dir, offline=True) as store,
                Model(store, threads=threads, plan=plan, spine=RELEASED) as model,
                Progress(
                    f"round {number + 1} of {rounds}, {spine}", (len(sequences) + 1) * model.config.num_layers, "layers"
                ) as progress,
            ):
                order = sequences if number % 2 == 0 else sequences[::-1]
                found[spine] += measure_batches(model, order, progress.set)
    return found


def _fits(plan: MemoryPlan) -> bool:
    from deltafin.runtime.memory import available_nbytes, own_nbytes

    return plan.total <= own_nbytes() + available_nbytes()


def _require(plan: MemoryPlan, advice: str) -> None:
    if not _fits(plan):
        raise NoMemory(f"{size(plan.total)} of memory are needed and not available; {advice}")


def _as_json(cost: BatchCost, config: ModelConfig, whole: ModelConfig, plan: MemoryPlan) -> dict[str, object]:
    from deltafin.runtime.batchbench import uniform_union

    return {
        "sequences": cost.sequences,
        "wall_s": cost.wall_s,
        "walls_s": cost.walls,
        "tokens_s": cost.tokens_s,
        "union": cost.union,
        "uniform_union": uniform_union(config, cost.sequences),
        "expert_nbytes": cost.expert_nbytes,
        "spine_nbytes": cost.spine_nbytes,
        "device_nbytes": cost.device_nbytes,
        "head_s": cost.head_s,
        "all_layers_s": cost.all_layers_s(config, whole),
        "memory": plan.as_json(),
        "passes": [asdict(p) for p in cost.passes],
    }


def _print(spine: str, plan: MemoryPlan, costs: Sequence[BatchCost], config: ModelConfig, whole: ModelConfig) -> None:
    from deltafin.runtime.batchbench import marginal_s, uniform_union

    click.echo(
        f"\nspine {spine}, {size(plan.total)} of memory\n"
        f"{'sequences':>9} {'s a pass':>9} {'spread':>15} {'tokens/s':>9} {'s more':>7} {'union':>7} {'uniform':>7} "
        f"{'experts read':>12} {'spine':>8} {'drive':>8}"
    )
    for number, cost in enumerate(costs):
        more = f"{marginal_s(costs[number - 1], cost):7.3f}" if number else f"{'':7}"
        walls = f"{cost.walls[0]:.2f} to {cost.walls[-1]:.2f}"
        device = "unknown" if cost.device_nbytes is None else size(cost.device_nbytes)
        click.echo(
            f"{cost.sequences:9} {cost.wall_s:9.3f} {walls:>15} {cost.tokens_s:9.3f} {more} {cost.union:7.1f} "
            f"{uniform_union(config, cost.sequences):7.1f} {size(cost.expert_nbytes):>12} "
            f"{size(cost.spine_nbytes):>8} {device:>8}"
        )
    click.echo("seconds a pass, by cause (means):")
    for cost in costs:
        click.echo(f"{cost.sequences:9} {causes(cost.parts, len(cost.passes))}, head {cost.head_s:.3f}")
    computed = [(cost.sequences, cost.all_layers_s(config, whole)) for cost in costs]
    if all(seconds is not None for _, seconds in computed):
        some = ", ".join(f"{n}: {seconds:.0f} s, {n / seconds:.3f} tokens/s" for n, seconds in computed if seconds)
        click.echo(f"computed, not measured: {whole.num_layers} layers as long as these of their kind: {some}")
