"""Which requests arrive when? Arrival streams for the simulator, from a seeded generator or from data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it reaches the engine, its prompt, and how many tokens it will ask for."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


Lengths = Callable[[float, Random], tuple[int, int]]  # (time, generator) -> (prompt, output) tokens


def uniform(prompt: tuple[int, int], output: tuple[int, int]) -> Lengths:
    """Lengths drawn evenly and independently from two closed ranges."""

    def draw(_at_s: float, rng: Random) -> tuple[int, int]:
        return rng.randint(*prompt), rng.randint(*output)

    return draw


def poisson(
    rng: Random, rate_at: Callable[[float], float], rate_max: float, lengths: Lengths, start_s: float = 0.0
) -> Iterator[Arrival]:
    """A Poisson stream whose rate (requests/s) follows `rate_at`, by thinning a stream at `rate_max`.

    It never ends, and `rate_at` may be zero but must not exceed `rate_max`.
    """
    at_s = start_s
    while True:
        at_s += rng.expovariate(rate_max)
        kept = rng.random() * rate_max < rate_at(at_s)
        prompt, output = lengths(at_s, rng)  # drawn even when thinned out: phases do not shift each other
        if kept:
            yield Arrival(at_s, prompt, output)
