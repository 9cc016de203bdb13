"""Options of how tokens are chosen, and what they come to."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from deltafin.cli.options import gathered, options
from deltafin.errors import BadRequest

if TYPE_CHECKING:
    from deltafin.runtime import Draft, Model, Sampling
    from deltafin.store import Store

_options = options(
    click.option("--temperature", type=float, default=0.0, show_default=True, metavar="T", help="0 is greedy."),
    click.option("--top-p", type=float, metavar="P", help="Draw from the likeliest that make up this share."),
    click.option("--top-k", type=int, metavar="K", help="Draw from the K likeliest."),
    click.option(
        "--min-p", type=float, metavar="P", help="Draw from those at least P times as likely as the likeliest."
    ),
    click.option("--seed", type=int, metavar="N", help="Of the draws; the same seed, the same text (default: random)."),
    click.option("--stop", "stops", multiple=True, metavar="TEXT", help="End before this text. Repeatable."),
    click.option(
        "--logit-bias",
        "biases",
        multiple=True,
        metavar="ID=BIAS",
        help="Added to a token's logit; -inf forbids it. Repeatable.",
    ),
    click.option(
        "--logprobs",
        type=click.IntRange(min=0),
        metavar="N",
        help="With --json: log-probabilities of the tokens, and of the N likeliest at each place.",
    ),
    click.option(
        "--draft",
        type=click.Choice(["ngram", "none"]),
        help="Guess tokens from what was said before and check several in a pass, where that pays. On the CPU it "
        "changes no token (default: ngram, but none where an expert is missing, with --trace, and with torch).",
    ),
    click.option(
        "--draft-depth", type=click.IntRange(min=1), metavar="N", help="Most tokens guessed at a time (default: 4)."
    ),
)


def choosing_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options; the command takes them as one argument `choosing`."""
    return _options(gathered("choosing", ChoosingOptions)(command))


@dataclass(frozen=True, slots=True)
class ChoosingOptions:
    """As they were given."""

    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stops: tuple[str, ...]
    biases: tuple[str, ...]
    logprobs: int | None
    draft: str | None
    draft_depth: int | None


@dataclass(frozen=True, slots=True)
class Choosing:
    """How the tokens of an answer are chosen and guessed."""

    sampling: Sampling
    stops: tuple[str, ...]
    depth: int  # most tokens guessed at a time; 0: none
    asked: bool  # whether guessing was asked for

    def beside(self, store: Store, device: str) -> Choosing:
        """For this store and device.

        Unasked, nothing is guessed where an expert is missing: a guess may want one that nobody needs; nor with torch,
        which has no times to say what pays, and whose rows may depend on their company in the last bit.
        """
        if self.asked or self.depth == 0 or (device == "cpu" and _has_all_experts(store)):
            return self
        return replace(self, depth=0)

    def new_draft(self) -> Draft | None:
        from deltafin.runtime import NGram

        return NGram() if self.depth else None


def choose(given: ChoosingOptions, *, as_json: bool, traced: bool) -> Choosing:
    """Checks the options against each other. Draws without a seed get one, which is said."""
    from deltafin.runtime import DEPTH, Sampling, StopStrings

    draws = {"--top-p": given.top_p, "--top-k": given.top_k, "--min-p": given.min_p, "--seed": given.seed}
    if given.temperature == 0:
        for name, value in draws.items():
            if value is not None:
                raise BadRequest(f"{name} has no effect without --temperature above 0: the likeliest token is taken")
    if given.logprobs is not None and not as_json:
        raise BadRequest("--logprobs has no effect without --json")
    if given.draft_depth is not None and given.draft == "none":
        raise BadRequest("--draft-depth has no effect with --draft none")
    if traced and (given.draft == "ngram" or given.draft_depth is not None):
        raise BadRequest("--draft and --trace exclude each other: a trace would hold rows that do not count")
    StopStrings(given.stops)  # refuses what makes no sense, before anything is read
    seed = given.seed
    if given.temperature != 0 and seed is None:
        seed = secrets.randbits(32)
    sampling = Sampling(
        temperature=given.temperature,
        top_p=1.0 if given.top_p is None else given.top_p,
        top_k=given.top_k or 0,
        min_p=given.min_p or 0.0,
        seed=seed or 0,
        logit_bias=_biases(given.biases),
        top_logprobs=given.logprobs,
    )
    if given.temperature != 0 and given.seed is None:
        click.echo(f"df-run: --seed {seed}", err=True)
    guesses = not traced and given.draft != "none"
    asked = given.draft == "ngram" or given.draft_depth is not None
    return Choosing(sampling, given.stops, (given.draft_depth or DEPTH) if guesses else 0, asked)


def _has_all_experts(store: Store) -> bool:
    from deltafin.store import expert_items

    config = store.catalog.config
    experts = expert_items(store.catalog, config.moe_layers, range(config.num_experts))
    return all(store.is_local(item.span) for item in experts)


def check_for(how: Choosing, model: Model) -> None:
    """What cannot work with this model. Raises BadRequest."""
    from deltafin.runtime import Sampler

    if how.stops and model.tokenizer is None:
        raise BadRequest("--stop needs a tokenizer, which this model has not")
    Sampler(how.sampling, vocab_size=model.config.vocab_size, forbidden=model.reserved_ids)


def _biases(given: tuple[str, ...]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token, bias in map(_bias, given):
        if token in biases:
            raise BadRequest(f"--logit-bias is given twice for {token}; give one")
        biases[token] = bias
    return biases


def _bias(text: str) -> tuple[int, float]:
    token, equals, value = text.partition("=")
    try:
        number = float(value)
        if not equals or math.isnan(number):
            raise ValueError
        return int(token), number
    except ValueError:
        raise BadRequest(f"--logit-bias {text!r}: expected ID=BIAS, like 163585=-inf or 1008=2.5") from None
