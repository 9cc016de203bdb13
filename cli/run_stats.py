"""What df-run says afterwards: statistics, and one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from deltafin.cli.answering import Outcome
    from deltafin.runtime import Chosen, Model, RunTimes, Sampling
    from deltafin.runtime.planner import Outcome as PlanOutcome


def compare_with_plan(engine: Model, prompt_tokens: int, outcome: Outcome) -> PlanOutcome | None:
    """What df-plan would have said of the tokens after the first, if it knows this machine; remembered for it."""
    later = len(outcome.ids) - 1
    # The plan is of passes that bring a token each.
    if engine.memory is None or later < 1 or outcome.drafted:
        return None
    from deltafin.runtime.planner import compare

    measured_s = (outcome.total_s - outcome.first_token_s) / later
    cache = engine.store.roots[0].path
    found = compare(engine, cache, "df-run", rows=prompt_tokens, tokens=later, measured_s=measured_s)
    return None if found is None else found[0]


def run_as_json(engine: Model, prompt_ids: Sequence[int], outcome: Outcome, sampling: Sampling) -> dict[str, object]:
    return {
        "model": engine.store.model,
        "identity": engine.store.catalog.identity,
        "prompt_ids": list(prompt_ids),
        "ids": outcome.ids,
        "text": outcome.text if engine.tokenizer is not None else None,
        "stopped": outcome.stopped,
        "finish": outcome.finish,
        "logprobs": None if sampling.top_logprobs is None else [_logprob_json(c) for c in outcome.chosen],
        "sampling": sampling_json(sampling),
        "drafted": outcome.drafted,
        "accepted": outcome.accepted,
        "first_token_s": round(outcome.first_token_s, 6),
        "total_s": round(outcome.total_s, 6),
        "bytes": engine.store.stats.snapshot(),
        "requests": engine.store.requests,
        "passes": engine.times.passes,
        "spine": engine.spine_label or "released",
        "as_released": engine.as_released,
        "memory": None if engine.memory is None else engine.memory.as_json(),
        "seconds": asdict(engine.times),
    }


def _logprob_json(chosen: Chosen) -> dict[str, object]:
    return {"id": chosen.token, "logprob": chosen.logprob, "top": [list(pair) for pair in chosen.top]}


def sampling_json(sampling: Sampling) -> dict[str, object]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed if sampling.temperature else None,
    }


_TROUBLES = ("corrupt_objects", "disk_errors", "refused_spans", "unproven_spans", "unkept_spans", "evicted_spans")


def print_stats(
    engine: Model, prompt_tokens: int, outcome: Outcome, plan: PlanOutcome | None, also: Sequence[str] = ()
) -> None:
    new = len(outcome.ids)
    later = (outcome.total_s - outcome.first_token_s) / max(1, new - 1)
    lines = [
        f"tokens    {prompt_tokens} given, {new} new",
        f"time      {outcome.first_token_s:.2f} s to the first token, then {later:.3f} s a token",
    ]
    if outcome.drafts is not None:
        lines.append(f"drafts    {outcome.drafts}")
    if plan is not None:
        lines.append(
            f"plan      {plan.predicted_s:.3f} s a token after the first, as df-plan has it ({plan.error:+.0%})"
        )
    click.echo("\n".join([*lines, *engine_lines(engine), *also]), err=True)


def engine_lines(engine: Model) -> list[str]:
    """What any run may say of itself: visits, times, bytes by source, memory, requests, troubles."""
    from deltafin.cli.progress import human_nbytes
    from deltafin.store import SOURCES

    store, times = engine.store, engine.times
    counts = store.stats.snapshot()
    lines = [f"visits    {counts['expert_visits']:,} experts{_hits(times)}, {counts['spine_visits']:,} spines"]
    if times.passes:
        lines += times_lines(times)
    asked = counts["expert_visits"] * store.catalog.expert_nbytes + counts["spine_nbytes"] + counts["head_nbytes"]
    for source in SOURCES:
        spans, nbytes = counts[f"{source}_spans"], counts[f"{source}_nbytes"]
        if spans or source in ("object", "shard", "http"):
            share = f", {nbytes / asked:.0%} of what was used" if source == "ram" and asked else ""
            lines.append(f"{source:9} {spans:,} spans, {human_nbytes(nbytes)}{share}")
    if engine.spine_label is not None:
        lines.append(f"spine     {engine.spine_label}")
    if engine.memory is not None:
        lines += memory_lines(engine)
    lines.append(f"requests  {store.requests:,}")
    for trouble in _TROUBLES:
        if counts.get(trouble):
            lines.append(f"{trouble.replace('_', ' '):9} {counts[trouble]:,}")
    return lines


def _hits(times: RunTimes) -> str:
    """How many experts were in memory when they were asked for."""
    experts, reads = times.layers.experts, times.layers.reads
    return f" ({(experts - reads) / experts:.0%} in memory)" if experts else ""


def times_lines(times: RunTimes) -> list[str]:
    """Of an average pass: what was waited for, and what was computed."""
    passes, layers = times.passes, times.layers
    waits = layers.spine_wait_s + layers.expert_wait_s
    return [
        f"passes    {passes:,}, {times.rows:,} rows; of {times.total_s / passes:.3f} s a pass:",
        f"  waiting {waits / passes:.3f} s: spine {layers.spine_wait_s / passes:.3f}, "
        f"experts {layers.expert_wait_s / passes:.3f}",
        f"  compute {(times.total_s - waits) / passes:.3f} s: attention {layers.attention_s / passes:.3f}, shared "
        f"{layers.shared_s / passes:.3f}, experts {layers.expert_s / passes:.3f}, head {times.head_s / passes:.3f}",
    ]


def memory_lines(engine: Model) -> list[str]:
    from deltafin.cli.progress import human_nbytes

    plan = engine.memory
    assert plan is not None
    kept, room = engine.store.resident_experts
    return [
        f"memory    {human_nbytes(plan.total)} planned of {human_nbytes(plan.budget)}: passes of up to {plan.rows:,} "
        "rows, "
        f"{len(plan.resident)} of {plan.spine_layers} layers, the head among them, resident "
        f"({human_nbytes(plan.resident_nbytes)}), {plan.slots} slots, {kept:,} of at most {room:,} experts",
    ]
