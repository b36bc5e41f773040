"""Whether one record is really faster than another: the bootstrap of the ratio of their speeds.

    for comparison in compare(read_records("before.json"), read_records("after.json")):
        print(comparison.sentence)

**How.** The speed of a record is one over its mean time a token, each round counting alike. Times of tokens are no independent
draws: what one token leaves in the cache the next one finds, so neighbours are alike; and a round, which is a process of its own at
another time, differs from the next as a whole. So there are two levels.

- *Tokens within a round* are resampled in blocks that may overlap (moving block bootstrap: Künsch, Annals of Statistics 17, 1989).
  Their length follows from the lag-1 correlation r of the tokens, as for an autoregression: (6 r^2 / (1 - r^2)^2)^(1/3) n^(1/3)
  (Carlstein, Annals of Statistics 14, 1986, with the constant of overlapping blocks). Deviations are widened by
  1 / sqrt(1 - length / n), since the blocks come from one round's tokens and are compared to that round's mean.
- *Rounds* are resampled too, but not out of the three or five that there are: that has too few outcomes, and it understates the
  variance by (R - 1) / R. What rounds vary by, beyond what their tokens account for, is estimated by analysis of variance (so
  that the tokens' part is not counted twice: Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8), and
  each resampled round is moved by a normal draw of that variance.
- A variance known from so few rounds is itself uncertain. Each resample's deviation is divided by sqrt(chi^2 / df), with df by
  Welch and Satterthwaite over both levels of both records, which for rounds alone is Welch's t-test.

With one round there is nothing to tell rounds' variance from: only tokens are resampled, and the sentence says so.

**Several comparisons** are adjusted for by Holm's method (Scandinavian Journal of Statistics 6, 1979): that `real` is said of any
of them by chance alone has a probability of at most 1 - level. The intervals are each for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import OptionError
from .record import Record, distinct, measured_ts, outcome_text, rate_text, short_size, test_name

__all__ = ["Comparison", "Pairs", "compare", "comparison_lines", "pair_records"]

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One record against another."""

    what: str
    """Arm, test and limits."""
    a_ts: float | None
    """Tokens a second; None if there were none."""
    b_ts: float | None
    ratio: float | None
    """b_ts / a_ts; None, as the next three, if one of them has no speed or nothing to resample."""
    low: float | None
    high: float | None
    """The interval of the ratio, for this comparison alone."""
    p: float | None
    """Two-sided, of this comparison alone: how often chance gives such a difference where there is none."""
    p_adjusted: float | None
    """After Holm, among all that were compared with it."""
    real: bool
    """p_adjusted <= 1 - level, and 1 is outside of the interval."""
    rounds: int
    """Of the record that has fewer. One cannot show how rounds differ."""
    sentence: str
    warnings: tuple[str, ...]
    """What differs beside the arm, such as the machine."""


@dataclass(frozen=True)
class Pairs:
    """Records that belong together, and those without a counterpart."""

    pairs: list[tuple[Record, Record]]
    only_a: list[Record]
    only_b: list[Record]


def compare(
    a_records: Sequence[Record],
    b_records: Sequence[Record],
    *,
    resamples: int = 10000,
    seed: int = 0,
    level: float = 0.95,
) -> list[Comparison]:
    """Compares records by pairs, as :func:`pair_records` finds them. The same seed gives the same result.

    Raises:
        OptionError: No two records belong together, or a number makes no sense.
    """
    if resamples < 100:
        raise OptionError(f"resamples={resamples}: at least 100 are needed")
    if not 0.5 <= level < 1:
        raise OptionError(f"level={level}: expected a number from 0.5 to less than 1, such as 0.95")
    paired = pair_records(a_records, b_records)
    if not paired.pairs:
        raise OptionError(
            f"no record of A is of the same arm and test as one of B: A has {_names(a_records)}; B has {_names(b_records)}"
        )
    rng = np.random.default_rng(seed)
    return _adjusted([_compared(a, b, resamples, rng, level) for a, b in paired.pairs], level)


def pair_records(a_records: Sequence[Record], b_records: Sequence[Record]) -> Pairs:
    """Finds for each record of A its counterpart in B.

    A counterpart is of the same arm and test (n_prompt, n_gen, n_depth). Of several, one that agrees in all conditions is
    taken (model, limits, workload, threads, types of the KV cache, machine), then whichever differs in the fewest; it is
    compared with a warning that says in what. Where A has one arm only and B has one other, the two arms are compared with
    each other: so arms of one file can be, by giving its records of each. Every record is taken once at most.
    """
    one_each = len(distinct(r["arm"] for r in a_records)) == 1 == len(distinct(r["arm"] for r in b_records))

    def test(record: Record) -> tuple[Any, ...]:
        return ("" if one_each else record["arm"], *(record.get(key) or 0 for key in ("n_prompt", "n_gen", "n_depth")))

    near = [
        (len(_differences(a, b)), i, j)
        for i, a in enumerate(a_records)
        for j, b in enumerate(b_records)
        if test(a) == test(b)
    ]
    of_a: dict[int, int] = {}
    for _, i, j in sorted(near):
        if i not in of_a and j not in of_a.values():
            of_a[i] = j
    return Pairs(
        [(a_records[i], b_records[of_a[i]]) for i in sorted(of_a)],
        [a for i, a in enumerate(a_records) if i not in of_a],
        [b for j, b in enumerate(b_records) if j not in of_a.values()],
    )


def comparison_lines(comparisons: Sequence[Comparison], pairs: Pairs | None = None) -> list[str]:
    """For people: a comparison a paragraph, what it lacks, what had no counterpart, and whether p was adjusted."""
    lines = []
    for one in comparisons:
        speeds = " against ".join("none" if ts is None else f"{ts:.2f}" for ts in (one.b_ts, one.a_ts))
        lines += [f"{one.what}: {speeds} tokens a second", f"  {one.sentence}"]
        lines += [f"  warning: {warning}" for warning in one.warnings]
    tested = sum(one.p is not None for one in comparisons)
    if tested > 1:
        lines.append(
            f"What is called a difference allows for {tested} comparisons at once (Holm); the intervals are each for itself."
        )
    for name, alone in (("A", pairs.only_a), ("B", pairs.only_b)) if pairs else ():
        lines += [f"only in {name}: {_name(record)}" for record in alone]
    return lines


# Names and conditions


def _name(record: Record) -> str:
    parts = [f"{record['arm']} {test_name(record)}"]
    parts += [f"{short_size(record['memory_limit'])} of memory"] if record.get("memory_limit") else []
    parts += [rate_text(record["disk_bps_limit"])] if record.get("disk_bps_limit") else []
    return ", ".join(parts)


def _names(records: Iterable[Record]) -> str:
    names = distinct(f"{r['arm']} {test_name(r)}" for r in records)
    return "; ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") if names else "no records"


_CONDITIONS = {
    "model_hash": "the model",
    "memory_limit": "the memory limit",
    "disk_bps_limit": "the limit of the disk",
    "workload": "the workload",
    "routing": "the routing",
    "n_threads": "the threads",
    "n_batch": "n_batch",
    "n_ubatch": "n_ubatch",
    "type_k": "type_k",
    "type_v": "type_v",
    "flash_attn": "flash_attn",
    "cpu_info": "the CPU",
}
_OF_MACHINE = {"cores_usable": "the usable cores", "memory_bytes": "the memory of the machine", "kernel": "the kernel"}
_OF_DISK = {"device": "the disk", "model": "the model of the disk", "file_system": "the file system"}


def _differences(a: Record, b: Record) -> list[str]:
    found = []
    for names, of in ((_CONDITIONS, None), (_OF_MACHINE, "machine"), (_OF_DISK, "disk")):
        ours, theirs = ((r if of is None else r.get(of) or {}) for r in (a, b))
        found += [
            f"{name} {'differ' if name.endswith('s') else 'differs'}: {_said(key, ours.get(key))} in A, {_said(key, theirs.get(key))} in B"
            for key, name in names.items()
            if ours.get(key) != theirs.get(key)
        ]
    return found


def _said(key: str, value: Any) -> str:
    if value is None:
        return "none" if key.endswith("limit") else "unknown"
    if key in ("memory_limit", "memory_bytes"):
        return short_size(value)
    return rate_text(value) if key == "disk_bps_limit" else str(value)


# One comparison


def _compared(a: Record, b: Record, resamples: int, rng: np.random.Generator, level: float) -> Comparison:
    what = _name(a) if a["arm"] == b["arm"] else f"{_name(b)} (B) against {_name(a)} (A)"
    warnings = tuple(_differences(a, b))
    samples = [None if measured_ts(record) is None else _Sample.of(record) for record in (a, b)]
    speeds = [None if s is None else s.speed for s in samples]
    nothing = Comparison(
        what=what,
        a_ts=speeds[0],
        b_ts=speeds[1],
        ratio=None,
        low=None,
        high=None,
        p=None,
        p_adjusted=None,
        real=False,
        rounds=min(0 if s is None else s.rounds for s in samples),
        sentence="",
        warnings=warnings,
    )
    first, second = samples
    if first is None or second is None:
        return replace(nothing, sentence=_without_speed(a, b, speeds))
    ratio = second.speed / first.speed
    if not (first.varies and second.varies):
        return replace(
            nothing, ratio=ratio, sentence="cannot be told from one value each: measure more rounds or tokens"
        )
    # Log of B's speed over A's is log of A's time over B's.
    deviations = first.resampled(resamples, rng) - second.resampled(resamples, rng)
    df = _degrees_of_freedom((first, second))
    if math.isfinite(df):
        deviations /= np.sqrt(rng.chisquare(df, resamples) / df)
    low, high = np.exp(math.log(ratio) - np.quantile(deviations, [(1 + level) / 2, (1 - level) / 2]))
    beyond = np.count_nonzero(np.abs(deviations) >= abs(math.log(ratio)))
    # Its sentence is for _adjusted to say, which knows the others.
    return replace(nothing, ratio=ratio, low=float(low), high=float(high), p=(beyond + 1) / (resamples + 1))


def _without_speed(a: Record, b: Record, speeds: Sequence[float | None]) -> str:
    said = []
    for name, record, speed in (("A", a, speeds[0]), ("B", b, speeds[1])):
        outcome = outcome_text(record)
        if speed is not None:
            said.append(f"{name} ran at {speed:.2f} tokens a second")
        else:
            said.append(f"{name} has no speed" + (f" ({outcome})" if outcome else ""))
    return "; ".join(said)


def _adjusted(comparisons: Sequence[Comparison], level: float) -> list[Comparison]:
    """Holm: the smallest p times the number of tests, the next times one less, ..., and never less than one before it."""
    tested = sorted((c.p, i) for i, c in enumerate(comparisons) if c.p is not None)
    adjusted: dict[int, float] = {}
    largest = 0.0
    for rank, (p, i) in enumerate(tested):
        largest = adjusted[i] = max(largest, min(1.0, p * (len(tested) - rank)))
    found = []
    for i, one in enumerate(comparisons):
        if i in adjusted:
            assert one.low is not None and one.high is not None
            real = adjusted[i] <= 1 - level + 1e-12 and not one.low <= 1 <= one.high
            one = replace(one, p_adjusted=adjusted[i], real=real, sentence=_sentence(one, real, level))
        found.append(one)
    return found


def _sentence(one: Comparison, real: bool, level: float) -> str:
    assert one.ratio is not None and one.low is not None and one.high is not None
    between = f"B/A between {one.low:.3g} and {one.high:.3g}"
    if real:
        ends = [_percent(abs(bound - 1)) for bound in sorted((one.low, one.high), key=lambda bound: abs(bound - 1))]
        word = "faster" if one.ratio > 1 else "slower"
        said = f"B is {_percent(abs(one.ratio - 1))} {word} ({level:.0%}: {ends[0]} to {ends[1]})"
    elif not one.low <= 1 <= one.high:
        said = f"no difference shown among so many comparisons, though there would be alone ({between})"
    else:
        least = _percent(max(1 - one.low, one.high - 1))
        said = f"no difference shown: {between}; more rounds or tokens would be needed to show less than {least}"
    return said + ("; of one round only, which cannot show how rounds differ" if one.rounds == 1 else "")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.0995 else f"{100 * share:.0f}%"


# The statistics of one record


@dataclass(frozen=True)
class _Sample:
    """Times a token, by round. Variances are of the mean over rounds, relative to its square, as those of its logarithm are."""

    times: tuple[Values, ...]

    @classmethod
    def of(cls, record: Record) -> _Sample | None:
        """Of its tokens; of its rounds, where the test has a prompt: its tokens are not told apart, and are most of its time."""
        times = () if record.get("n_prompt") else record.get("token_ns") or ()
        rounds = [np.asarray(of_round, np.float64) for of_round in times if len(of_round)]
        if not rounds:
            rounds = [np.asarray([1e9 / ts]) for ts in record.get("samples_ts") or () if ts > 0]
        return cls(tuple(rounds)) if rounds else None

    @property
    def rounds(self) -> int:
        return len(self.times)

    @property
    def varies(self) -> bool:
        return self.rounds > 1 or len(self.times[0]) >= 8

    @property
    def means(self) -> Values:
        return np.array([times.mean() for times in self.times])

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return float(1e9 / self.means.mean())

    def block_length(self) -> int:
        """Of tokens that are resampled together: 1 where neighbours have nothing in common."""
        centred = [times - times.mean() for times in self.times if len(times) > 2]
        power = sum(float(c @ c) for c in centred)
        if not power:
            return 1
        r = sum(float(c[1:] @ c[:-1]) for c in centred) / power
        r = min(max(r, 0.0), 0.97)
        n = min(len(c) for c in centred)
        length = (6 * r * r / (1 - r * r) ** 2) ** (1 / 3) * n ** (1 / 3)
        return max(1, min(math.ceil(length), n // 4))

    def variances(self) -> tuple[float, float]:
        """What rounds vary by beyond their tokens, and what tokens do."""
        scale = self.means.mean() ** 2
        within = [_mean_variance(times, self.block_length()) for times in self.times]
        tokens = float(np.mean(within)) / scale / self.rounds
        if self.rounds < 2:
            return 0.0, tokens
        total = float(self.means.var(ddof=1)) / scale / self.rounds
        return max(0.0, total - tokens), tokens

    def resampled(self, resamples: int, rng: np.random.Generator) -> Values:
        """Deviations of the log of the mean time [resamples]."""
        mean, length = self.means.mean(), self.block_length()
        between = math.sqrt(self.variances()[0] * self.rounds)
        deviations = rng.normal(0, between, (self.rounds, resamples)).sum(axis=0) if between else np.zeros(resamples)
        for times in self.times:
            deviations += _block_means(times, length, resamples, rng) / mean
        return np.log1p(np.maximum(deviations / self.rounds, -0.99))

    def degrees_of_freedom(self) -> tuple[float, float]:
        """Of the two variances."""
        blocks = sum(len(times) // self.block_length() - 1 for times in self.times if len(times) > 1)
        return max(1.0, self.rounds - 1), max(1.0, blocks)


def _block_sums(times: Values, length: int) -> Values:
    """Of each block of that length that there is, less the mean of the round."""
    sums = np.concatenate([[0.0], np.cumsum(times - times.mean())])
    return sums[length:] - sums[:-length]


def _mean_variance(times: Values, length: int) -> float:
    """Of the mean of a round, as the moving block bootstrap has it; without limit of resamples."""
    n = len(times)
    if n < 2:
        return 0.0
    sums = _block_sums(times, min(length, n // 2))
    length = min(length, n // 2)
    return float(sums.var()) / length / n / (1 - length / n)


def _block_means(times: Values, length: int, resamples: int, rng: np.random.Generator) -> Values:
    """Deviations of the mean of a round that is put together of its blocks."""
    n = len(times)
    if n < 2:
        return np.zeros(resamples)
    length = min(length, n // 2)
    sums = _block_sums(times, length)
    blocks = math.ceil(n / length)
    drawn = np.zeros(resamples)
    for _ in range(blocks):
        drawn += sums[rng.integers(len(sums), size=resamples)]
    drawn -= blocks * sums.mean()
    return drawn / (blocks * length) * math.sqrt(blocks * length / n / (1 - length / n))


def _degrees_of_freedom(samples: Sequence[_Sample]) -> float:
    """Welch and Satterthwaite's, over the variances of rounds and of tokens of both."""
    variances = [v for sample in samples for v in sample.variances()]
    degrees = [d for sample in samples for d in sample.degrees_of_freedom()]
    total = sum(variances)
    uncertain = sum(v * v / d for v, d in zip(variances, degrees, strict=True))
    return total * total / uncertain if uncertain else math.inf
