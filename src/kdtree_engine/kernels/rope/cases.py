"""Rotary settings of the family."""

from __future__ import annotations

from dataclasses import dataclass

from kdtree_engine.config import RopeConfig


@dataclass(frozen=True)
class Case:
    """One rotary setting over `dim` dimensions, with the YaRN ramp's ends where it has one."""

    name: str
    dim: int
    rope: RopeConfig


CASES = (
    Case("plain", 8, RopeConfig(10000.0)),
    Case("packaged", 32, RopeConfig(50000.0, "yarn", 8.0, 256, 32.0, 1.0, 1.0, 1.0)),
    Case("k2.6", 64, RopeConfig(50000.0, "yarn", 64.0, 4096, 32.0, 1.0, 1.0, 1.0)),
    Case("deepseek-v3", 64, RopeConfig(10000.0, "yarn", 40.0, 4096, 32.0, 1.0, 1.0, 1.0)),
)
