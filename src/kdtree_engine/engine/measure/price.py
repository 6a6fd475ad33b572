"""The contract's price: the same step free of it, timed in turns with the engine's own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

from kdtree_engine.engine.measure.decoding import Decoding
from kdtree_engine.engine.measure.free import (
    TRIALS,
    Choices,
    Matrices,
    dense_choices,
    free_of_contract,
)
from kdtree_engine.engine.measure.products import products
from kdtree_engine.engine.measure.table import Measurement, Price
from kdtree_engine.engine.measure.timing import Timed, medians_ms
from kdtree_engine.model import Kimi

Make = Callable[[], Decoding]

_TRIAL_REPEATS = 7


class Pricer:
    """Prices of steps of one row count. `make` gives a new engine that has captured nothing."""

    def __init__(self, make: Make, matrices: Matrices) -> None:
        self._make = make
        self._matrices = matrices
        step = make()
        self._products = products(step)
        self._target = step.engine.target
        self._dense = dense_choices(self._products, self._target.head, matrices)

    def price(self, contract: Timed, found: Measurement) -> Price:
        """Of the step that `found` measures and `contract` runs."""
        device = self._target.device
        best, choices = contract, Choices()
        for kind in (self._dense_trial, *TRIALS):
            for trial in kind(choices, self._target, found.context):
                timed = self._timed(trial, found.context)
                before, after = medians_ms([best, timed], device, _TRIAL_REPEATS)
                if after < before:
                    best, choices = timed, trial
                del timed
                gc.collect()  # an engine and its runner know each other, and hold a graph's memory
        ms_contract, ms_free = medians_ms([contract, best], device, found.repeats)
        return Price(found, ms_contract, ms_free, self._names(choices))

    def _dense_trial(self, chosen: Choices, target: Kimi, context: int) -> list[Choices]:
        return [replace(chosen, dense=self._dense)] if self._dense else []

    def _timed(self, choices: Choices, context: int) -> Timed:
        """A step by `choices` at this context."""
        with free_of_contract(choices, self._matrices):
            step = self._make()
            step.stand(context)
            call = step.captured()
        if step.engine.runner.captures:
            return step.reset, call

        def operators() -> None:
            with free_of_contract(choices, self._matrices):
                call()

        return step.reset, operators

    def _names(self, choices: Choices) -> dict[str, str]:
        """The choices in words."""
        words: dict[str, str] = {}
        for one in self._products:
            way = choices.dense.get((one.rows, one.weight.columns, one.weight.depth))
            if way is not None:
                words[one.name] = f"in {way}" if way else "by cuBLAS"
        if choices.attention is not None:
            words["attention"] = f"by {choices.attention}"
        if choices.experts is not None:
            words["experts"] = f"in {choices.experts}"
        return words
